"""The native engine: rounds in fractions of a second, and the same bytes at every peer."""
