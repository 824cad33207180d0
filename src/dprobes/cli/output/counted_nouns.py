"""Numbers with nouns in messages: "1 call", "2 calls"."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"
