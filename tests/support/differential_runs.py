"""
Comparisons of random programs and random bytes between two back ends, hit by hit: compiled, and interpreted.

Functions return False if the behaviour is not specified, and raise ``AssertionError`` with the seed at a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from dprobes.arch import architecture
from dprobes.bpf.lower import Abilities, LoopForm, Placement, Request, is_supported
from dprobes.bpf.map_layouts import LOAD_WINDOW
from dprobes.errors import NotSupportedError
from dprobes.record.log_record import ABOUT_RECORDS, FIXED_ITEMS, Item, LogRecord
from dprobes.rpn.instruction_encoding import CodeImage, Relocation, encode
from dprobes.rpn.instruction_set import ROWS, OperandKind
from dprobes.testing import PAGE, FakeContext, prepare
from dprobes.vm import Ending, Interpreter, Point
from support.ebpf_abilities import loop_forms
from support.ebpf_backend import Stage
from support.random_programs import RandomPrograms, random_context
from support.specified_outcomes import results, specified_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture, Register
    from dprobes.rpn.instruction_set import Row
    from dprobes.rpn.rpn_program import Program
    from dprobes.vm import Outcome
    from support.specified_outcomes import Hit

__all__ = [
    "Demand",
    "NotedPages",
    "bytes_agree",
    "compared",
    "extreme",
    "is_allowed",
    "mapped_pages",
    "program_agrees",
    "random_demand",
]

ANOTHER = 1_000_000_000
"""The number added to the seed of a program that cannot be compared in this process, for another attempt."""

RETURN_STACK = 0x1F00
"""The stack address at a return, in memory that ``random_context`` maps."""

HERE = Stage()


def is_allowed(row: Row, register: Register | None, stage: Stage = HERE) -> bool:
    return is_supported(row, register, stage.offered())


@dataclass(frozen=True)
class Demand:
    """The options with which a handler is compiled."""

    loops: LoopForm | None = None
    sleepable: bool = True
    request: Request = Request(probe=2)  # noqa: RUF009 - frozen
    keeps_stack: bool = True

    def allows(self, row: Row, register: Register | None, stage: Stage = HERE) -> bool:
        """
        Return whether an instruction can be compiled with these options; ``vfyrw`` cannot in handlers of events.

        ``register`` is its operand, None without one. ``stage`` is the back end.
        """
        is_event = self.request.placement is Placement.EVENT
        return is_allowed(row, register, stage) and not (is_event and row.syntax == "vfyrw")


def random_demand(random: Random) -> Demand:
    """Return random options: a loop form of this kernel, a placement, and some or all header items."""
    items = random.choice((Item(0), ~ABOUT_RECORDS, Item(random.randrange(1 << 16))))
    # How trampolines and system calls find the entry of their call is not made up here.
    placement = random.choice((Placement.BREAKPOINT, *(each for each in Placement if not _finds_calls(each))))
    return Demand(
        random.choice((loop_forms()[0], *loop_forms())),
        random.random() < 0.7,
        Request(
            abilities=Abilities(small_states=random.random() < 0.5),
            items=items & ~ABOUT_RECORDS & sum(Item),
            probe=random.choice((2, None)),
            placement=placement,
            moved=random.choice((0, 4, -3)) if placement is Placement.BREAKPOINT else 0,
            return_bytes=random.choice((0, 16)),
            wants_tid=random.random() < 0.5,
            load_limit=random.choice((None, LOAD_WINDOW)),
        ),
        keeps_stack=random.random() < 0.3,
    )


def _finds_calls(placement: Placement) -> bool:
    return placement.is_trampoline or placement is Placement.TRACEPOINT


def extreme(program: Program, random: Random) -> Program:
    """Return the program with random extreme limits: of jumps, log size, heap size and exceptions."""
    definition = replace(
        program.definitions[0],
        exception_mask=random.choice((0, 0xFFFF, 0x1FFF, random.randrange(1 << 16))),
        heap=random.choice((None, 0, 8, 65535)),
    )
    return replace(
        program,
        jmpmax=random.choice((0, 1, 3000)),
        logmax=random.choice((1, 2, 3, 8, 12, 65535)),
        ex_logmax=random.choice((1, 30, 65535)),
        heapmax=random.choice((0, 8, 65536)),
        autostacktrace=random.random() < 0.5,
        definitions=(definition, *program.definitions[1:]),
    )


def at_a_return(context: FakeContext, request: Request) -> None:
    """Put the return address onto the stack, if the placement is a return instruction."""
    if request.placement is Placement.RET_SITE:
        word = context.architecture.word_size
        context.map_memory(RETURN_STACK, context.value_of("eip").to_bytes(word, "little"))
        context.set_value("esp", RETURN_STACK + word + request.return_bytes)


def expected_header(context: FakeContext, outcome: Outcome, request: Request) -> LogRecord:
    """Return the record that a hit with ``outcome`` has to log."""
    values: dict[str, Any] = {**context.ids, "major": outcome.major, "minor": outcome.minor}
    values |= {"cs": context.value_of("cs") & 0xFFFF, "ss": context.value_of("ss") & 0xFFFF}
    values |= {"ip": context.value_of("eip"), "sp": context.value_of("esp")}
    items = request.items | Item.MAJOR | Item.MINOR
    return LogRecord(
        **{name: values[name] for item, name in FIXED_ITEMS if item in items},
        process_name=context.process_name().decode() if Item.PROCESS_NAME in items else None,
        tid=context.ids["tid"] if Item.TID in items else None,
        data=outcome.log,
        word_size=context.architecture.word_size,
        is_cut=outcome.is_cut,
    )


class MappedHereError(Exception):
    """Memory that is missing in the simulated context is mapped in this process, where handlers would find it."""


class NotedPages(dict[int, bytearray]):
    """The pages of a simulated memory; ``missing`` are the numbers of pages that were accessed but do not exist."""

    def __init__(self, pages: dict[int, bytearray]) -> None:
        super().__init__(pages)
        self.missing: set[int] = set()

    def again(self, pages: dict[int, bytearray]) -> NotedPages:
        """Return another memory with contents ``pages`` that shares ``missing`` with this one."""
        noted = NotedPages(pages)
        noted.missing = self.missing
        return noted

    def __contains__(self, page: object) -> bool:
        found = super().__contains__(page)
        if not found and isinstance(page, int):
            self.missing.add(page)
        return found


def mapped_pages(process: str) -> list[range]:
    """Return the page ranges that a process has mapped; ``process`` is its name in /proc."""
    lines = Path("/proc", process, "maps").read_text().splitlines()
    spans = (line.split(" ", 1)[0].split("-") for line in lines)
    return [range(int(start, 16) // PAGE, int(end, 16) // PAGE) for start, end in spans]


def compared(
    image: CodeImage,
    target: Architecture,
    hits: list[Hit],
    world: Callable[[], FakeContext],
    demand: Demand,
    stage: Stage = HERE,
) -> bool:
    """
    Compare hits with those of the interpreter; return False if what they do is unspecified.

    Raises ``MappedHereError`` if they cannot be compared in this process, or that of ``stage``.
    """

    def context_of() -> FakeContext:
        context = world()
        stage.arrange(context, demand.request)
        at_a_return(context, demand.request)
        return context

    context = context_of()
    pages = context._pages = NotedPages(context._pages)
    expected = results(Interpreter(image, target), hits, context)
    context = context_of()
    context._pages = pages.again(context._pages)
    is_specified = specified_results(image, target, hits, context) == expected
    if pages.missing and any(page in span for span in mapped_pages(stage.process) for page in pages.missing):
        raise MappedHereError  # before it runs: machine code would write to this process
    context = context_of()
    runner = stage.runner(
        image,
        target,
        context,
        demand.loops,
        sleepable=demand.sleepable,
        request=demand.request,
        keeps_stack=demand.keeps_stack,
    )
    with runner:
        found = [runner.run(*hit) for hit in hits]
    if not is_specified:
        return False
    assert [_seen(outcome) for outcome, _ in found] == [_seen(outcome) for outcome, _ in expected]
    last = expected[-1][1]
    for variables in ("local_variables", "global_variables", "variables_of_cpu"):
        assert repr(getattr(context, variables)) == last[variables]
    assert repr(context.keyed_tables) == last["keyed_tables"]
    for outcome, state in found:
        if outcome.ending is not Ending.ABORT:
            assert state.record == expected_header(context, outcome, demand.request)
        tid = context.ids["tid"] if demand.request.wants_tid else 0
        assert all(entry_tid == tid for kind, entry_tid, _ in state.entries if kind.value < 2)
    return True


def _seen(outcome: Outcome) -> Outcome:
    """Return an outcome without the major and minor code if the hit leaves no record, where they are not visible."""
    return outcome._replace(major=0, minor=0) if outcome.ending is Ending.ABORT else outcome


def program_agrees(
    seed: int, name: str, kind: str, demand: Demand, stage: Stage = HERE, *, is_extreme: bool = False
) -> bool:
    """
    Compare two hits of a random program between a back end and the interpreter; return False if unspecified.

    ``kind`` names the method of ``RandomPrograms``; ``is_extreme`` sets extreme limits.
    """
    target = architecture(name)
    programs = RandomPrograms(Random(seed), target, partial(demand.allows, stage=stage))
    program = programs.wild() if kind == "wild" else programs.defined()
    if is_extreme:
        program = extreme(program, Random(seed))

    def world() -> FakeContext:
        context = random_context(Random(seed), target)
        for number in range(len(program.definitions)):
            prepare(program, number, context)
        return context

    image = encode(program, target)
    hits = [(image.handlers[0], prepare(program, 0, world()))] * 2
    try:
        return compared(image, target, hits, world, demand, stage)
    except MappedHereError:
        return program_agrees(seed + ANOTHER, name, kind, demand, stage, is_extreme=is_extreme)
    except NotSupportedError as error:
        if "too large" not in error.message:  # which a program may be by chance
            raise
        return program_agrees(seed + ANOTHER, name, kind, demand, stage, is_extreme=is_extreme)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {demand}: {error}") from error


def bytes_agree(seed: int, name: str, stage: Stage = HERE) -> bool:
    """Compare hits of random bytes as a program; return False if unspecified, or not possible in eBPF."""
    random, target = Random(seed), architecture(name)
    opcodes = [row for row in ROWS if row.operand_kind is OperandKind.REGISTER or is_allowed(row, None, stage)]
    data = random.randbytes(random.randrange(30))
    if random.random() < 0.9:
        push = next(row for row in ROWS if row.syntax == "push <value>").opcode
        parts = [bytes([push, random.randrange(4)]).ljust(1 + target.word_size, b"\0") for _ in range(8)]
        for _ in range(random.randrange(1, 30)):
            row = random.choice(opcodes)
            kind = row.operand_kind
            size = 0 if kind is None else kind.width or target.word_size
            operand = random.choice((random.randrange(8), random.randrange(256), random.getrandbits(64)))
            parts.append(bytes([row.opcode]) + operand.to_bytes(8, "little")[:size])
        data = b"".join(parts)
    relocations = (Relocation(random.randrange(30), "data", -random.randrange(3)),) if random.random() < 0.5 else ()
    image = CodeImage(data, target.word_size, "little", (0,), {}, (), {}, relocations)
    point = Point(
        jmpmax=1000,
        logmax=random.choice((1, 20, 200)),
        ex_logmax=random.choice((1, 60, 300)),
        heap=random.choice((0, 100, 65536)),
        exception_mask=random.getrandbits(16),
        autostacktrace=random.random() < 0.5,
    )

    def world() -> FakeContext:
        context = random_context(Random(seed), target)
        context.local_variables[:] = [0, 0]
        return context

    try:
        return compared(image, target, [(0, point), (seed % 9, point)], world, random_demand(random), stage)
    except NotSupportedError:
        return False
    except MappedHereError:
        return bytes_agree(seed + ANOTHER, name, stage)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
