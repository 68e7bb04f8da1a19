"""Which way to train a model in a swarm, from what it is, what it runs on, and the line to the others."""
