"""
The probepoints as hits find them: state, counts, and the rules of passcount and maxhits.

The hit counter starts at -passcount; the handler runs while it is not negative, and the probepoint is disabled when it
reaches maxhits (recovered reference 2.2).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from dprobes.arch import architecture
from dprobes.engines.overload_guard import LOOK_INTERVAL, Load, OverloadPolicy
from dprobes.resolve.probe_state import ProbeState
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dprobes.engines.hits.hit_context import Reach, RecordBuilder, SharedCounters, SharedHits, Tally
    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.engines.overload_guard import Verdict
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm import Context, Outcome, Point

__all__ = [
    "CORE_DUMP",
    "DEBUGGER",
    "HANDING_OVER",
    "HandledProgram",
    "Handlers",
    "HitLoad",
    "Moment",
    "Probe",
    "ProgramGuard",
]

# What hits of one probepoint take, where that is measured, and which of them run no handler because of that.


class HitLoad:
    """What the handler of one probepoint has taken so far, and at which hits it runs."""

    __slots__ = ("_turn", "in_handler", "thinning")

    def __init__(self) -> None:
        self.in_handler = 0.0
        """Seconds."""
        self.thinning = 1
        self._turn = 0

    def skips(self) -> bool:
        """Return whether this hit is to run no handler; to be asked once for each."""
        if self.thinning <= 1:
            return False
        turn, self._turn = self._turn, self._turn + 1
        return turn % self.thinning != 0


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


# The overload guard of a program whose handlers run in this process.
#
# What hits take is what this process takes of a CPU, as long as it has nothing else to do than to see to hits; programs
# share that by their hits. Handlers are measured, and what is left is what their hits cost besides.


class Moment(NamedTuple):
    """A moment: by the clock, by the processor time of this process, and by the hits of all programs."""

    time: float
    busy: float
    hits: int

    @classmethod
    def now(cls, hits: int) -> Moment:
        """Return the present one."""
        return cls(time.monotonic(), time.process_time(), hits)


class ProgramGuard:
    """The guard of one program; ``budget`` is the share of a CPU that its hits may take."""

    def __init__(self, budget: float, clock: Callable[[int], Moment] = Moment.now) -> None:
        self._clock = clock
        self._policy = OverloadPolicy(budget)
        self._last = clock(0)
        self._hits: dict[int, int] = {}
        self._in_handler: dict[int, float] = {}

    @staticmethod
    def new_load() -> HitLoad:
        """Return what measures the hits of one more probepoint."""
        return HitLoad()

    def due_in(self, now: float) -> float:
        """Return in how many seconds ``look`` is to be called."""
        return self._last.time + LOOK_INTERVAL - now

    def look(self, probes: Mapping[int, Probe[Any]], all_hits: int) -> tuple[Verdict, dict[int, float]]:
        """
        Return what is to be done about probepoints, and their hits a second; thinning is done already.

        ``all_hits`` are those of all programs so far.
        """
        last, self._last = self._last, self._clock(all_hits)
        elapsed = self._last.time - last.time
        loads = list(self._loads(probes.values()))
        hits = sum(load.hits for load in loads)
        others = max(0, self._last.hits - last.hits - hits)
        busy = (self._last.busy - last.busy) * hits / (hits + others) if hits else 0.0
        outside = max(0.0, busy - sum(load.in_handler for load in loads))
        loads = [
            Load(load.number, load.hits, load.in_handler, outside * load.hits / hits if hits else 0.0, load.thinning)
            for load in loads
        ]
        verdict = self._policy.judge(busy / elapsed, loads)
        for number, thinning in verdict.thinned.items():
            if (state := probes[number].load) is not None:
                state.thinning = thinning
        return verdict, {load.number: load.hits / elapsed for load in loads}

    def _loads(self, probes: Iterable[Probe[Any]]) -> Iterable[Load]:
        """Iterate over what probepoints did since the last look, if they did anything, or have a thinned handler."""
        for probe in probes:
            state, number = probe.load, probe.number
            if state is None:
                continue
            hits = probe.counts.hits - self._hits.get(number, 0)
            in_handler = state.in_handler - self._in_handler.get(number, 0.0)
            self._hits[number] = probe.counts.hits
            self._in_handler[number] = state.in_handler
            if (hits or in_handler or state.thinning > 1) and probe.is_active:
                yield Load(number, hits, in_handler, 0.0, state.thinning)
