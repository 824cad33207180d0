"""Handlers of several programs run from one saved state, and their changes are put together in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.hits.probe_hits import Emitter, Handled, HandlerRunner, HitLoad, skipping
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux.ptrace_calls import Register, Registers
from dprobes.resolve.probepoints import ProbeState
from dprobes.vm import Ending, Outcome, Point
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.hits.probe_hits import Handlers
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.vm import Context

RDI, RSI, RAX = 0x0A, 0x0B, 0x06
"""Registers as handlers name them (appendix A)."""


class FakeHandlers:
    """Stand for the handlers of a program: a function that may look at the context and change it."""

    def __init__(self, function: Callable[[Context], None]) -> None:
        self._function = function

    def run(self, definition: int, point: Point, context: Context) -> Outcome:
        assert definition == 0
        self._function(context)
        return Outcome(Ending.EXIT, b"", b"", point.major, point.minor)


class Sink:
    """Take every record."""

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        return True


class Hit:
    """Let handlers run at a hit of process 1 with rdi = 10, rsi = 20 and rax = 30."""

    def __init__(self) -> None:
        self.context = ThreadContext()
        self.runner = HandlerRunner(self.context)
        self.registers = Registers()
        self.registers[Register.RDI], self.registers[Register.RSI], self.registers[Register.RAX] = 10, 20, 30
        self.thread = Thread(1, 1, AddressSpace.closed(8), ThreadState.STOPPED)
        self.seen: list[tuple[int, int, int]] = []
        self.context.select(self.thread, self.registers)

    def owner(self, number: int, limits: ProbeLimits | None = None, **changes: int) -> tuple[Probe, Point]:
        """Return a probepoint whose handler notes what it sees, and then changes registers."""

        def handler(context: Context) -> None:
            self.seen.append(tuple(context.register(index, user=False) for index in (RDI, RSI, RAX)))  # type: ignore[arg-type]
            for name, value in changes.items():
                context.set_register({"rdi": RDI, "rsi": RSI, "rax": RAX}[name], value, user=False)

        program = inserted_program(number)
        program.handlers[8] = cast("Handlers", FakeHandlers(handler))
        probe = probe_of(program) if limits is None else probe_of(program, limits=limits)
        return probe, Point()

    @property
    def state(self) -> tuple[int, int, int]:
        return self.registers[Register.RDI], self.registers[Register.RSI], self.registers[Register.RAX]


def test_each_sees_the_state_of_the_hit_and_the_later_change_of_a_register_counts() -> None:
    hit = Hit()
    owners = [hit.owner(1, rdi=11, rsi=21), hit.owner(2, rdi=12), hit.owner(3, rax=33)]
    handled = hit.runner.run(owners)
    assert hit.seen == [(10, 20, 30)] * 3
    assert hit.state == (12, 21, 33)
    assert [each.probe for each in handled] == [probe for probe, _ in owners]
    assert hit.context.written == {Register.RDI: (10, 12), Register.RSI: (20, 21), Register.RAX: (30, 33)}


def test_one_alone_changes_what_it_wants() -> None:
    hit = Hit()
    (handled,) = hit.runner.run([hit.owner(1, rdi=11)])
    assert hit.state == (11, 20, 30)
    assert handled.changes == hit.context.written == {Register.RDI: (10, 11)}


def test_who_ran_before_does_not_run_again_and_its_changes_stay() -> None:
    hit = Hit()
    first, late = hit.owner(1, rdi=11), hit.owner(2, rax=32)
    known = hit.runner.run([first])
    written = hit.context.written
    # The thread hits once more, on registers as the handler has left them.
    hit.context.select(hit.thread, hit.registers)
    hit.context.written = written
    handled = hit.runner.run([first, late], known)
    assert hit.seen == [(10, 20, 30)] * 2
    assert hit.state == (11, 20, 32)
    assert handled[0] is known[0]
    # And once more, after registers were set back, when one of the programs has gone.
    hit.registers[Register.RDI] = hit.registers[Register.RAX] = 0
    hit.context.select(hit.thread, hit.registers)
    assert hit.runner.run([late], handled) == (handled[1],)
    assert len(hit.seen) == 2
    assert hit.state == (0, 20, 32)


def test_only_whom_it_concerns_runs() -> None:
    hit = Hit()
    elsewhere, gone, right = hit.owner(1), hit.owner(2), hit.owner(3)
    elsewhere[0].program.reach.pids = {2}
    gone[0].state = ProbeState.REMOVED
    waiting = hit.owner(4, ProbeLimits(1, 0, keep_on_fault=False, keep_ip=False))
    handled = hit.runner.run([elsewhere, gone, right, waiting])
    assert [each.probe for each in handled] == [right[0], waiting[0]]
    assert [each.outcome is None for each in handled] == [False, True]
    assert len(hit.seen) == 1
    assert hit.runner.run([elsewhere]) == ()


def test_each_program_has_its_own_variables() -> None:
    hit = Hit()
    programs = [inserted_program(number, variables=1) for number in range(2)]

    def count(context: Context) -> None:
        context.local_variables[0] += 1

    owners = []
    for program in programs:
        program.handlers[8] = cast("Handlers", FakeHandlers(count))
        owners.append((probe_of(program), Point()))
    for _ in range(3):
        hit.runner.run(owners)
    hit.runner.run(owners[:1])
    assert [program.counters.local_variables() for program in programs] == [[4], [3]]


def test_a_thinned_handler_runs_at_some_hits_and_the_others_are_counted_as_skipped() -> None:
    hit = Hit()
    probe, point = hit.owner(1)
    probe.load = HitLoad()
    probe.load.thinning = 2
    emitter = Emitter(Sink())
    for _ in range(5):
        assert emitter.count(hit.runner.run([(probe, point)])) == []
    counts = probe.counts
    assert (counts.hits, counts.records, counts.skipped, counts.passed, len(hit.seen)) == (5, 3, 2, 0, 3)
    assert probe.load.in_handler > 0


def test_skipped_hits_count_for_passcount_and_maxhits() -> None:
    hit = Hit()
    probe, point = hit.owner(1, ProbeLimits(2, 4, keep_on_fault=False, keep_ip=False))
    probe.load = HitLoad()
    probe.load.thinning = 2
    emitter = Emitter(Sink())
    ended = [emitter.count(hit.runner.run([(probe, point)])) for _ in range(6)]
    assert ended == [[]] * 5 + [[probe]]
    counts = probe.counts
    assert (counts.hits, counts.passed, counts.records, counts.skipped) == (6, 2, 2, 2)
    assert probe.state is ProbeState.DISABLED


def test_of_handlers_that_skip_the_last_one_counts() -> None:
    def ended(ending: Ending, value: int = 0) -> Handled[Any]:
        return Handled(cast("Any", None), Outcome(ending, b"", b"", 0, 0, value=value))

    first, second, other = ended(Ending.SKIP, 1), ended(Ending.SKIP, 2), ended(Ending.EXIT)
    assert skipping([first, second, other]) is second
    assert skipping([other, Handled(cast("Any", None))]) is None
