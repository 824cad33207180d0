"""
The probepoints as the tracer runs them: state, counts, and the rules of passcount and maxhits.

The hit counter starts at -passcount; the handler runs while it is not negative, and the probepoint is disabled when it
reaches maxhits (recovered reference 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.engines.ptrace.sharedcounters import Tally
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.isa import ExceptionCode
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.sites import Code, ProbeLimits
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram
    from dprobes.vm import Context, Outcome, Point

__all__ = ["CORE_DUMP", "DEBUGGER", "HANDING_OVER", "Handlers", "Probe"]

DEBUGGER, CORE_DUMP = 1, 3
"""The operands of ``exit`` that mean something in user programs."""

HANDING_OVER = frozenset({DEBUGGER, CORE_DUMP})
"""Those after which the probepoint is taken away."""


class Handlers:
    """Run a program's handlers on modules of one architecture; ``warn`` takes a message and a hint for the user."""

    def __init__(self, code: Code, warn: Callable[[str, str | None], None]) -> None:
        self._warn = warn
        self._ended: set[tuple[int, int]] = set()
        self._translator = Translator(code.image, architecture(code.architecture))
        self._starts = code.image.handlers

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


@dataclass(slots=True, eq=False)
class Probe:
    """
    Hold the state of one probepoint of a program in all processes; ``definition`` is the number of its definition.

    ``file`` is the device and inode of the file that it is in.
    """

    program: InsertedProgram
    number: int
    definition: int
    limits: ProbeLimits
    file: tuple[int, int]
    counter: int = 0
    state: ProbeState = ProbeState.COMPILED
    counts: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.counter = -self.limits.passcount

    @property
    def is_active(self) -> bool:
        """Whether hits count."""
        return self.state not in (ProbeState.DISABLED, ProbeState.REMOVED)

    def concerns(self, thread: Thread) -> bool:
        """Return whether hits of a thread count."""
        return self.is_active and thread.pid in self.program.reach.pids

    @property
    def runs_handler(self) -> bool:
        """Whether the next hit runs the handler instead of being passed over."""
        return self.counter >= 0

    def count_hit(self, outcome: Outcome | None) -> None:
        """Count a hit whose instruction completed; ``outcome`` is None if it was passed over."""
        self.counts.hits += 1
        self.counts.passed += outcome is None
        self.counter += 1
        if outcome is not None and (outcome.ending is Ending.REMOVE or outcome.exit_code in HANDING_OVER):
            self.state = ProbeState.REMOVED
        elif self.limits.maxhits and self.counter >= self.limits.maxhits:
            self.state = ProbeState.DISABLED
