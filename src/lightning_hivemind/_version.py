"""The one place that states the version; the build and the package both read it."""

__version__ = "1.0.0a1"
