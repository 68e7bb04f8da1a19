"""The libp2p daemon and the DHT: addresses, identity, start, stop, small records, invitations.

Only :mod:`~lightning_hivemind.network.daemon` and :mod:`~lightning_hivemind.network.records` need hivemind.
"""
