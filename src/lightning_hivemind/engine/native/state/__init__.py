"""One peer's state for another: parameters, optimizer, statistics; as bytes, from several donors at once."""
