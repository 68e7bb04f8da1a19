"""``lightning-hivemind COMMAND``: finds the command, and says what was wrong with its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_hivemind._version import __version__
from lightning_hivemind.cli import advise, collate, simulate
from lightning_hivemind.errors import ArgumentError

WRONG_ARGUMENTS, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for wrong arguments, 130 after Ctrl+C."""
    parser = argparse.ArgumentParser(prog="lightning-hivemind", description="Tools around training in a swarm.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    advise.add_to(commands)
    simulate.add_to(commands)
    collate.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except ArgumentError as error:
        print(f"lightning-hivemind {given.command}: {error}", file=sys.stderr)  # noqa: T201
        return WRONG_ARGUMENTS
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
