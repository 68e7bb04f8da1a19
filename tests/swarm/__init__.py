"""Swarm tests: several real trainer processes over real loopback sockets, and the harness that runs them."""
