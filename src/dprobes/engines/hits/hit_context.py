"""
Interfaces that an engine implements for hits: the context of handlers, counts, and the variables of probe programs.

An engine implements ``HitContext`` once and uses the same object for one stopped thread after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dprobes.vm import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Changes", "HitContext", "Reach", "SharedCounters", "SharedHits", "Tally"]

Changes = dict[int, tuple[int, int]]
"""Registers that handlers changed: the values before and after, keyed by the engine's number of the register."""


class Tally(Protocol):
    """Counts of one probepoint. Hits whose handler did not run are in ``passed``, ``missed`` or ``skipped``."""

    hits: int
    records: int
    lost: int
    passed: int
    missed: int
    skipped: int
    faulted: int
    neighbours: int

    def note(self, placement: Any) -> None:
        """Record the way in which the probed instruction is executed, such as in an out-of-line slot."""


class SharedHits(Protocol):
    """Hits of a probepoint that handlers in the probed processes count at the same time."""

    is_limited: bool
    """True if the probepoint has a passcount or maxhits: ``draw`` must be called for each hit."""

    @property
    def is_over(self) -> bool:
        """True if no more handlers run: maxhits is reached, or a handler has removed the probepoint."""

    def draw(self) -> bool | None:
        """
        Count a hit. Return True if its handler must run, and False if passcount excludes it.

        If the probepoint has reached maxhits or is disabled, count nothing and return None.
        """

    def give_back(self) -> None:
        """Undo ``draw`` for a hit that does not count, for example because the probed instruction faulted."""

    def disable(self) -> None:
        """Disable the probepoint in all processes: no more handlers run."""


class Reach(Protocol):
    """Processes that a program probes, by process id."""

    pids: set[int]


class SharedCounters(Protocol):
    """Memory of a probe program's variables, through which the client requests resets."""

    @property
    def resets(self) -> Sequence[int]:
        """The number of resets that were requested, and the number that were made."""

    def reset_if_asked(self) -> None:
        """Set variables to zero if a reset was requested. Call this only between two runs of handlers."""


class HitContext(Context, Protocol):
    """
    Context of the handlers of a hit, for a thread of the process with the id ``process``.

    ``word_size`` is the word size of the probed code in bytes, and ``probe`` the probepoint whose handler runs.
    ``written`` has the registers that handlers changed, or is None if they changed none.
    """

    process: int
    word_size: int
    probe: Any
    written: Changes | None

    @property
    def program(self) -> object:
        """Probe program that was last passed to ``use``."""

    def use(self, program: Any) -> None:
        """Use the variables and extensions of a probe program from now on."""

    def set_aside(self) -> Changes | None:
        """Restore the registers to their values at the hit, and return the handlers' changes, or None without any."""

    def apply(self, changes: Changes) -> None:
        """Apply changes that ``set_aside`` returned, in addition to earlier changes of other registers."""

    def pointers(self) -> tuple[int, int, int, int]:
        """Return cs, the instruction pointer, ss and the stack pointer."""
