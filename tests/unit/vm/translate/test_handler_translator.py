"""
The translation of a handler does what the interpreter does.

Every case runs with it too (``conftest.INTERPRETED``); here are random programs, random bytes, and what only it has.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dprobes.arch import Architecture, architecture
from dprobes.arch.usdt_arguments import parse_arguments
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import CodeImage, Relocation, encode
from dprobes.rpn.instruction_set import rows_by_syntax
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter, Point
from dprobes.vm.translate import Translator
from dprobes.vm.translate.function_writer import Call
from dprobes.vm.translate.instruction_templates import TEMPLATES
from support.random_programs import RandomPrograms, random_context
from support.rounds import rounds
from support.specified_outcomes import Hit, results, specified_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.rpn.rpn_program import Program

SEEDS = st.integers(0, (1 << 32) - 1)
NAMES = pytest.mark.parametrize("name", ["i386", "x86_64", "s390", "s390x"])  # each word size and byte order


def compared(image: CodeImage, target: Architecture, hits: list[Hit], world: Callable[[], FakeContext]) -> bool:
    """Compare both back ends, unless the program is unspecified; return whether it is not."""
    expected = results(Interpreter(image, target), hits, world())
    if specified_results(image, target, hits, world()) != expected:
        return False
    translator = Translator(image, target)
    assert results(translator, hits, world()) == expected
    assert results(translator, hits, world()) == expected  # nothing stays behind in the functions
    context = world()
    assert [translator.final_state(*hit, context).outcome() for hit in hits] == [outcome for outcome, _ in expected]
    return True


def program_agrees(seed: int, name: str, *, wild: bool) -> bool:
    random, target = Random(seed), architecture(name)
    programs = RandomPrograms(random, target)
    program = programs.wild() if wild else programs.defined()

    def world() -> FakeContext:
        context = random_context(Random(seed), target)
        for number in range(len(program.definitions)):
            prepare(program, number, context)
        return context

    image = encode(program, target)
    numbers = [*range(len(program.definitions)), 0]
    hits = [(image.handlers[n], prepare(program, n, world())) for n in numbers]
    return compared(image, target, hits, world)


@NAMES
@given(seed=SEEDS)
def test_a_defined_program_does_the_same(name: str, seed: int) -> None:
    assert program_agrees(seed, name, wild=False)


@NAMES
@given(seed=SEEDS)
@example(seed=97677)  # a key is made of a cell that nothing may depend on
def test_a_wild_program_does_the_same(name: str, seed: int) -> None:
    program_agrees(seed, name, wild=True)


def test_many_wild_programs_are_specified() -> None:
    count = rounds(100)
    assert sum(program_agrees(seed, "x86_64", wild=True) for seed in range(count)) >= count // 4


@NAMES
@given(data=st.binary(max_size=200), seed=SEEDS)
def test_random_bytes_do_the_same(name: str, data: bytes, seed: int) -> None:
    target = architecture(name)
    relocations = (Relocation(seed % 30, "data", -seed % 3),) if seed & 2 else ()
    image = CodeImage(data, target.word_size, target.byte_order, (0,), {}, (), {}, relocations)
    point = Point(jmpmax=1000, logmax=200, exception_mask=seed & 0xFFFF, autostacktrace=bool(seed & 1))

    def world() -> FakeContext:
        context = random_context(Random(seed), target)
        context.local_variables[:] = [0, 0]
        return context

    compared(image, target, [(0, point), (seed % 9, point)], world)


@given(start=st.integers(-(1 << 64), 1 << 64))
def test_code_that_starts_outside_of_the_image_raises_invalid_opcode(start: int) -> None:
    target = architecture("x86_64")
    image = CodeImage(b"", 8, "little", (0,), {}, (), {})
    machine = Translator(image, target).final_state(start, Point(), random_context(Random(0), target))
    assert machine.last_exception == (0x80, 0, start & target.word_mask)


def test_there_is_no_template_without_a_row() -> None:
    assert set(TEMPLATES) <= set(rows_by_syntax())


# What is carried out without the interpreter


def encoded(text: str, context: FakeContext) -> tuple[Program, CodeImage]:
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=True)
    program = parse_source(SourceFile("handler.rpn", text), diagnostics, options)
    check_program(program, context.architecture, diagnostics, options)
    return program, encode(program, context.architecture)


WORLD: dict[str, Any] = {
    "registers": {"rdi": 0x1000, "rax": 0x8000000000000000},
    "memory": {0x1000: b"Nam\0" + bytes(8)},
    "local_variables": [7, 8],
    "pid": 1,
    "tid": 2,
    "uid": 3,
    "cpu": 4,
}


@pytest.mark.parametrize(
    ("text", "log"),
    [
        ("push r, edi; log 1", "0010000000000000"),
        ("push 5; push 7; sub; log w, 1", "0200"),
        ("push 7; push 2; div; log b, 2", "0301"),
        ("push 1; push 4; shl; shl 1; shr 2; log b, 1", "04"),
        ("push 64; push r, edi; log str", "0103004e616d"),
        ("push 2; push r, edi; log mrf", "0002004e61"),
        ("push 0; push 2; log lv", "05020007000000000000000800000000000000"),
        ("push r, edi; push mem, u16; log w, 1", "4e61"),
        ("push 3; l: dup 1; log b, 1; loop l", "030201"),
        ("push r, eax; jlt l; log b, 1; l: log d, 1", "00000000"),
        ("push r, edi; jz l; push 2; jmp m; l: push 3; m: log b, 1", "02"),
        ("sx l; push r, edi; push mem, u8; ux; log b, 1; jmp m; l: log 3; m: nop", "4e"),
        ("push 1; push 2; push 2; log", "07020002000000000000000100000000000000"),
        ("push 9; save tsp; push 4; ros 1; restore tsp; log b, 1", "09"),
        ("push 1; push 2; push 2; dup; log b, 3; push 0; copy tsp, -3; push tsp, -3; log b, 1", "02020200"),
        ("push 7; save sbp; push 3; restore sbp; push sbp, -4; log b, 1", "07"),
        ("push pid; push tid; push uid; push procid; log b, 4", "04030201"),
        ("push lp; log b, 1; push plp; log b, 1", "0001"),
        ("inc lv, 0; push lv, 0; push 1; dec lv; push lv, 1; log b, 2", "0708"),
        ("call f; call f; log b, 2; exit; proc f; push 6; ret; endproc", "0606"),
        ("call f; exit; proc f; save sbp; push r, edi; jz l; nop; l: log w, 1; restore sbp; ret; endproc", "0010"),
    ],
)  # fmt: skip
def test_what_handlers_are_made_of_needs_no_interpreter(text: str, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "finish", None)
    context = FakeContext("x86_64", **WORLD)
    handler, _, procedures = text.partition("proc ")
    program, image = encoded("name = x; vars = 2\n" + (f"proc {procedures}\n" if procedures else "")
                             + f"offset = 0; {handler}", context)  # fmt: skip
    outcome = Translator(image, context.architecture).run(image.handlers[0], prepare(program, 0, context), context)
    assert outcome.log.hex() == log


STRAIGHT = """\
def handler(point, context):
    jumps = 0
    log = b''
    major = point.major
    minor = point.minor
    v0 = context.register(10, user=False) & 0xffffffffffffffff
    if len(log) + 16 > point.logmax:
        return leave(0, point, context, locals())
    log += k0(v0, 5)
    return new(Outcome, (EXIT, log, b'', major, minor, 0, 0, 0, False))
"""


class _Clock(FakeContext):
    """A machine whose time goes on with each question."""

    def time(self) -> int:
        self.ids["time"] += 3
        return self.ids["time"]


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize("behind", ["", "push 0; push 0; div; "], ids=["as written", "then by the interpreter"])
def test_the_time_of_a_call_is_the_same_all_along_a_handler_and_another_one_at_the_next_hit(
    name: str, behind: str
) -> None:
    context = _Clock(name, time=100, entry={"time": 90})
    count = 8 // context.architecture.word_size
    asked = f"push elapsed; log {count}; "
    code = f"sx l; {asked}{behind}l: {asked}exit"
    program, image = encoded(f"name = x; logmax = 64; offset = 0; return = yes; {code}", context)
    for runner in (Interpreter(image, context.architecture), Translator(image, context.architecture)):
        for number in range(2):
            context.ids["time"] = 100 + 10 * number
            outcome = runner.run(image.handlers[0], prepare(program, 0, context), context)
            assert [outcome.log[:8], outcome.log[8:16]] == 2 * [(13 + 10 * number).to_bytes(8, "little")]


def test_the_stack_and_exception_handlers_leave_no_trace_in_a_function() -> None:
    context = FakeContext("x86_64")
    _, image = encoded("name = x; offset = 0; sx l; push 5; push r, edi; dup 1; ros 1; ux; log 2; l: exit", context)
    function = Translator(image, context.architecture).function(image.handlers[0])
    assert function.source == STRAIGHT


def test_a_function_leaves_with_what_the_machine_needs() -> None:
    context = FakeContext("x86_64")
    text = "name = x; offset = 0; push 5; call f; exit; proc f; sx l; save sbp; restore sbp; log st; l: ret; endproc"
    _, image = encoded(text.replace("; exit; proc f", "; exit\nproc f"), context)
    function = Translator(image, context.architecture).function(image.handlers[0])
    state = function.exits[-1]
    called = image.procedures["f"]
    assert (state.tsp, state.sbp, state.cells[1023]) == (1023, 1024, 5)
    assert state.calls == (Call(), Call(called, 9 + 9, 1024, called + 9 + 3))


@pytest.mark.parametrize("name", ["i386", "x86_64"])
def test_the_examples_need_no_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in sorted((Path(__file__).parents[4] / "examples").glob("*.rpn")):
        registers = dict.fromkeys(("edi", "esi", "edx"), 0x1000)
        symbols = {"last_command_exit_value": 0x1000}
        text = path.read_text(encoding="utf-8")
        if name == "i386" and ":s64" in text:
            continue  # a word of 32 bits has no such type: INVALID_OPERAND
        fields = dict.fromkeys(re.findall(r"push tp, ([\w.]+)", text), 0x1000)
        memory = {0x1000: bytes(8)}
        context = FakeContext(
            name, registers=registers, memory=memory, symbols=symbols, traced_fields=fields, entry={"time": 0}
        )
        context.arguments = parse_arguments("8@$0x1000 8@$0x1000", context.architecture)
        context.map_memory(0, bytes(64))
        program, image = encoded(text, context)
        translator = Translator(image, context.architecture)
        with monkeypatch.context() as patch:
            patch.setattr(Interpreter, "finish", None)
            for number, start in enumerate(image.handlers):
                translator.run(start, prepare(program, number, context), context)


@pytest.mark.parametrize(
    "code",
    [
        bytes([0x43, 0xFF]) * 10_000,
        bytes([0x43, 0xFF]) * 4 + bytes([0x06, *bytes(8)]) * 5000,
        bytes([0x00]) * 60_000,
        bytes([0x4C, *bytes(8), 0x01, *(-18 & (1 << 64) - 1).to_bytes(8, "little")]),
        bytes([0x09, *(-9 & (1 << 64) - 1).to_bytes(8, "little")]) * 2,
        bytes([0x46, 6, 0, 0x06, 0, 0, 1, *bytes(5)]) * 5000,
    ],
    ids=["dup", "jz with a full stack", "nop", "a loop that fills the stack", "recursion", "branches"],
)
def test_whatever_the_code_a_function_is_small(code: bytes) -> None:
    target = architecture("x86_64")
    image = CodeImage(bytes([0x4C, *bytes(8)]) + code, 8, "little", (0,), {}, (), {})
    assert len(Translator(image, target).function(0).source) < 30_000
    point = Point(jmpmax=0xFFFF)
    expected = Interpreter(image, target).run(0, point, FakeContext("x86_64"))
    assert Translator(image, target).run(0, point, FakeContext("x86_64")) == expected
