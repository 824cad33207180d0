"""Variables that have no plain value at an instruction: they are there in parts, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.dpc.typedtree import typed
    from dprobes.dpc.types.ctype import CType

__all__ = ["NotKnownError", "Part", "Scattered"]


class NotKnownError(Exception):
    """
    Report that the value of a variable is not to be had at an instruction, and why.

    ``hint`` says what to do instead.
    """

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class Part(NamedTuple):
    """``size`` bytes of a variable from ``offset`` on: a word whose low bytes they are; None if they are nowhere."""

    offset: int
    size: int
    value: typed.Value | None


class Scattered(NamedTuple):
    """A structure that is not in memory: its parts in order."""

    parts: tuple[Part, ...]
    type: CType
