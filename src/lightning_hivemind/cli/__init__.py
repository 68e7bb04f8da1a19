"""The command ``lightning-hivemind``: one file per subcommand."""

from lightning_hivemind.cli.main import main

__all__ = ["main"]
