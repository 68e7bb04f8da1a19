"""Numbers as commands read and write them."""

from __future__ import annotations


def bytes_of(value: float) -> str:
    """In the unit that suits it."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1000
    return f"{value:,.2f} GB"


def count(text: str) -> int:
    """A whole number, also as 50e6."""
    value = float(text)
    if not value.is_integer():  # nor are "inf" and "nan"
        raise ValueError(text)
    return int(value)


count.__name__ = "whole number"  # argparse says: invalid whole number value
