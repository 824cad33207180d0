"""
What the life of a hit needs of an engine: the context of the handlers, and the programs that these are of.

An engine implements ``HitContext`` once and lets it speak of one stopped thread after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dprobes.vm import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Changes", "HitContext", "Reach", "SharedCounters", "SharedHits", "Tally"]

Changes = dict[int, tuple[int, int]]
"""Registers that handlers changed: (before, after) by the engine's number of the register."""


class Tally(Protocol):
    """The counts of one probepoint; hits without a run of the handler are in ``passed``, ``missed`` or ``skipped``."""

    hits: int
    records: int
    lost: int
    passed: int
    missed: int
    skipped: int
    faulted: int

    def note(self, placement: Any) -> None:
        """Note where the probed instruction is executed."""


class SharedHits(Protocol):
    """The hits of a probepoint that has handlers in the probed processes as well, which count at the same time."""

    is_limited: bool
    """Whether hits are drawn, because of passcount or maxhits."""

    @property
    def is_over(self) -> bool:
        """Whether no handler is to run any more: all hits are drawn, or a handler said so."""

    def draw(self) -> bool | None:
        """Draw a hit: return whether its handler runs, None if it is no hit any more."""

    def give_back(self) -> None:
        """Let a hit that was drawn be none after all."""

    def disable(self) -> None:
        """Let no handler run any more."""


class Reach(Protocol):
    """The processes that a program is about."""

    pids: set[int]


class SharedCounters(Protocol):
    """The memory of a program's variables, which others may ask to be reset."""

    @property
    def resets(self) -> Sequence[int]:
        """How many resets were asked for, and made."""

    def reset_if_asked(self) -> None:
        """Set variables to zero if somebody wants that; only between two handlers."""


class HitContext(Context, Protocol):
    """
    The context of the handlers of a hit, on a thread of the process ``process`` in code with words of ``word_size``.

    ``probe`` is that whose handler runs, on the variables and extensions of the program that ``use`` named. ``written``
    holds what handlers changed in the registers.
    """

    process: int
    word_size: int
    probe: Any
    written: Changes | None

    @property
    def program(self) -> object:
        """The program that was named last."""

    def use(self, program: Any) -> None:
        """Give handlers what is their program's."""

    def set_aside(self) -> Changes | None:
        """Set registers back to what they were before handlers changed them, and return the changes."""

    def apply(self, changes: Changes) -> None:
        """Make changes that were set aside; what was changed before stays as far as they do not concern it."""

    def pointers(self) -> tuple[int, int, int, int]:
        """Return cs, the instruction pointer, ss and the stack pointer."""
