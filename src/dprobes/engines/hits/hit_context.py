"""
Interfaces that an engine provides for hits: the context of handlers, counts, and the variables of programs.

An engine implements ``HitContext`` once and uses the same object for one stopped thread after another.
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
    """Counts of one probepoint; hits whose handler did not run are in ``passed``, ``missed`` or ``skipped``."""

    hits: int
    records: int
    lost: int
    passed: int
    missed: int
    skipped: int
    faulted: int

    def note(self, placement: Any) -> None:
        """Record where the probed instruction is executed."""


class SharedHits(Protocol):
    """Hits of a probepoint that handlers in the probed processes count at the same time."""

    is_limited: bool
    """True if the probepoint has a passcount or maxhits, so that each hit must be drawn."""

    @property
    def is_over(self) -> bool:
        """True if no handler runs any more: maxhits is reached, or a handler has ended the probepoint."""

    def draw(self) -> bool | None:
        """Draw a hit: return whether its handler runs, or None if the probepoint takes no more hits."""

    def give_back(self) -> None:
        """Undo the draw of a hit that turned out not to count."""

    def disable(self) -> None:
        """Disable the probepoint: no handler runs any more."""


class Reach(Protocol):
    """Processes that a program probes."""

    pids: set[int]


class SharedCounters(Protocol):
    """Memory of a program's variables, with requests to reset them."""

    @property
    def resets(self) -> Sequence[int]:
        """Number of resets that were requested, and number that were made."""

    def reset_if_asked(self) -> None:
        """Set variables to zero if a reset was requested; call it only between two handlers."""


class HitContext(Context, Protocol):
    """
    Context of the handlers of a hit, for a thread of the process ``process`` in code with words of ``word_size`` bytes.

    ``probe`` is the probepoint whose handler runs, with the variables and extensions of the program that was passed to
    ``use``. ``written`` holds the registers that handlers changed, None if there are none.
    """

    process: int
    word_size: int
    probe: Any
    written: Changes | None

    @property
    def program(self) -> object:
        """Program that was last passed to ``use``."""

    def use(self, program: Any) -> None:
        """Use the variables and extensions of a program from now on."""

    def set_aside(self) -> Changes | None:
        """Restore the registers that handlers changed, and return the changes; None if there are none."""

    def apply(self, changes: Changes) -> None:
        """Apply changes that ``set_aside`` returned; earlier changes of other registers stay."""

    def pointers(self) -> tuple[int, int, int, int]:
        """Return cs, the instruction pointer, ss and the stack pointer."""
