"""Many peers on virtual time: the very protocol of the native engine, with a network and training that are modelled."""
