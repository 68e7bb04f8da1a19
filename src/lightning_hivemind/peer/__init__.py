"""One peer's own model and devices: one process, or several ranks that are one peer together."""
