"""
The probepoints as hits find them: state, counts, and the rules of passcount and maxhits.

The hit counter starts at -passcount; the handler runs while it is not negative, and the probepoint is disabled when it
reaches maxhits (recovered reference 2.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dprobes.arch import architecture
from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.isa import ExceptionCode
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.hits.hitcontext import Reach, SharedCounters, SharedHits, Tally
    from dprobes.engines.hits.hitload import HitLoad
    from dprobes.engines.hits.probelimits import ProbeLimits
    from dprobes.engines.hits.records import RecordBuilder
    from dprobes.rpn.encoder import CodeImage
    from dprobes.vm import Context, Outcome, Point

__all__ = ["CORE_DUMP", "DEBUGGER", "HANDING_OVER", "HandledProgram", "Handlers", "Probe"]

ProgramT = TypeVar("ProgramT", bound="HandledProgram")

DEBUGGER, CORE_DUMP = 1, 3
"""The operands of ``exit`` that mean something in user programs."""

HANDING_OVER = frozenset({DEBUGGER, CORE_DUMP})
"""Those after which the probepoint is removed."""

_INACTIVE = (ProbeState.DISABLED, ProbeState.REMOVED)


class Handlers:
    """A program's handlers for modules of one architecture; ``warn`` takes a message and a hint for the user."""

    def __init__(self, image: CodeImage, name: str, warn: Callable[[str, str | None], None]) -> None:
        self._warn = warn
        self._ended: set[tuple[int, int]] = set()
        self._translator = Translator(image, architecture(name))
        self._starts = image.handlers

    def run(self, definition: int, point: Point, context: Context) -> Outcome:
        """Run the handler of a probe definition."""
        outcome = self._translator.run(self._starts[definition], point, context)
        if outcome.unhandled and (definition, outcome.unhandled) not in self._ended:
            self._ended.add((definition, outcome.unhandled))
            if not point.autostacktrace:
                self._warn(
                    f"the handler of {point.major},{point.minor} was ended by {ExceptionCode(outcome.unhandled).name}, "
                    "which nothing catches",
                    "catch it with 'sx', or see where it is raised with 'autostacktrace = yes'",
                )
        return outcome


class HandledProgram(Protocol):
    """A program whose handlers run at hits; ``handlers`` are those for modules with words of 4 and 8 bytes."""

    number: int
    rank: int
    records: RecordBuilder
    handlers: dict[int, Handlers]

    @property
    def reach(self) -> Reach:
        """The processes that it is about."""

    @property
    def counters(self) -> SharedCounters:
        """The memory of its variables."""


@dataclass(slots=True, eq=False)
class Probe(Generic[ProgramT]):
    """
    A probepoint of a program, in all processes; ``definition`` is the number of its definition.

    ``file`` is the device and inode of the file that it is in. ``shared`` are its hits where handlers in the probed
    processes have some as well.
    """

    program: ProgramT
    number: int
    definition: int
    limits: ProbeLimits
    file: tuple[int, int]
    counts: Tally
    counter: int = 0
    state: ProbeState = ProbeState.COMPILED
    load: HitLoad | None = None
    shared: SharedHits | None = None
    """What hits take, where that is measured."""

    def __post_init__(self) -> None:
        self.counter = -self.limits.passcount

    def draw(self) -> bool | None:
        """Return whether the handler runs at a hit, which is not counted yet; None if that is no hit any more."""
        if self.shared is None:
            return self.counter >= 0
        if self.shared.is_limited:
            return self.shared.draw()
        return None if self.shared.is_over else True

    def give_back(self) -> None:
        """Let a hit that was drawn be none, because its instruction is not carried out."""
        if self.shared is not None and self.shared.is_limited:
            self.shared.give_back()

    @property
    def is_active(self) -> bool:
        """Whether hits count."""
        return self.state not in _INACTIVE

    @property
    def counts_late(self) -> bool:
        """Whether a hit counts whose handler ran before: it may have been drawn before the last one was counted."""
        return self.is_active or (self.shared is not None and self.shared.is_limited)

    def concerns(self, process: int) -> bool:
        """Return whether hits of a process count."""
        return process in self.program.reach.pids and self.state not in _INACTIVE

    def count_hit(self, outcome: Outcome | None, *, is_skipped: bool = False) -> bool:
        """
        Count a hit whose instruction completed; ``outcome`` is None if its handler did not run (``Handled``).

        Return whether the probepoint has become inactive by this.
        """
        self.counts.hits += 1
        if is_skipped:
            self.counts.skipped += 1
        else:
            self.counts.passed += outcome is None
        self.counter += 1
        if outcome is not None and (outcome.ending is Ending.REMOVE or outcome.exit_code in HANDING_OVER):
            state = ProbeState.REMOVED
        elif self.limits.maxhits and self._is_last:
            state = ProbeState.DISABLED
        else:
            return False
        if self.shared is not None:
            self.shared.disable()
        former, self.state = self.state, state
        return former not in _INACTIVE

    def miss(self) -> None:
        """Count a hit at which no handler can run."""
        if self.state not in _INACTIVE:
            self.counts.hits += 1
            self.counts.missed += 1

    @property
    def _is_last(self) -> bool:
        return self.counter >= self.limits.maxhits if self.shared is None else self.shared.is_over
