"""Whatever the program, the interpreter gives an outcome, and soon."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.diagnostics import Diagnostics, Severity
from dprobes.rpn.instruction_encoding import CodeImage, encode
from dprobes.rpn.program_checker import check, check_flow
from dprobes.testing import run_definition
from dprobes.vm import Ending, Interpreter, Outcome, Point
from support.random_programs import RandomPrograms, random_context
from support.rounds import rounds

SEEDS = st.integers(0, (1 << 32) - 1)


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
@given(seed=SEEDS)
def test_a_wild_program_ends_with_an_outcome_within_its_limits(name: str, seed: int) -> None:
    random = Random(seed)
    target = architecture(name)
    program = RandomPrograms(random, target).wild()
    context = random_context(random, target)
    for number in range(len(program.definitions)):
        machine = run_definition(program, number, context)
        outcome = machine.outcome()
        assert isinstance(outcome, Outcome)
        assert len(outcome.log) <= program.logmax
        assert len(outcome.trace) <= program.ex_logmax
        assert machine.jumps <= program.jmpmax
        assert machine.dispatches <= 256
        assert all(0 <= cell <= target.word_mask for cell in machine.cells)
        assert 0 <= outcome.major <= 0xFFFF
        assert 0 <= outcome.minor <= 0xFFFF


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
@given(seed=SEEDS)
def test_no_program_depends_on_what_earlier_hits_left(name: str, seed: int) -> None:
    random = Random(seed)
    target = architecture(name)
    program = RandomPrograms(random, target).wild()
    image = encode(program, target)
    point = Point.of(program, program.definitions[0], 0)
    interpreter = Interpreter(image, target)
    outcomes = []
    for _ in range(2):
        context = random_context(Random(seed), target)
        context.local_variables[:] = context.global_variables[:] = context.cpu_variables()[:] = [0, 0, 0, 0]
        context.thread_variables()[:] = [0, 0, 0, 0]
        outcome = interpreter.run(image.handlers[0], point, context)
        outcomes.append((outcome, list(context.local_variables), context.read(0x1000, 0x1000), context.port_writes))
    assert outcomes[0] == outcomes[1]


def test_defined_programs_do_something() -> None:
    target = architecture("x86_64")
    logged = 0
    for seed in range(rounds(300)):
        random = Random(seed)
        program = RandomPrograms(random, target).defined()
        logged += len(run_definition(program, 0, random_context(random, target)).outcome().log) > 8
    assert logged > rounds(300) // 2


@pytest.mark.parametrize("name", ["i386", "x86_64", "s390", "s390x"])
@given(data=st.binary(max_size=200), seed=SEEDS)
def test_random_bytes_as_code_end_with_an_outcome(name: str, data: bytes, seed: int) -> None:
    target = architecture(name)
    image = CodeImage(data, target.word_size, target.byte_order, (0,), {}, (), {})
    context = random_context(Random(seed), target)
    context.local_variables[:] = [0, 0]
    point = Point(jmpmax=1000, logmax=200, exception_mask=seed & 0xFFFF, autostacktrace=bool(seed & 1))
    outcome = Interpreter(image, target).run(0, point, context)
    assert outcome.ending in Ending


@given(start=st.integers(-(1 << 64), 1 << 64))
def test_code_that_starts_outside_of_the_image_raises_invalid_opcode(start: int) -> None:
    target = architecture("x86_64")
    image = CodeImage(b"", 8, "little", (0,), {}, (), {})
    machine = Interpreter(image, target).final_state(start, Point(), random_context(Random(0), target))
    assert machine.last_exception == (0x80, 0, start & target.word_mask)


@given(seed=SEEDS, name=st.sampled_from(ARCHITECTURE_NAMES))
def test_the_checker_misses_no_cell_in_a_defined_program(seed: int, name: str) -> None:
    target = architecture(name)
    diagnostics = Diagnostics()
    program = RandomPrograms(Random(seed), target).defined()
    check(program, target, diagnostics, allow_write=True)
    # Fields are of tracepoints only, where there are no registers: programs that run nowhere have both.
    elsewhere = (
        "needs a tracepoint",
        "needs a USDT probe",
        "needs a program about the kernel",
        "none begins at the return of a function",
    )
    assert all(d.message.endswith(elsewhere) for d in diagnostics if d.severity is Severity.ERROR)
    check_flow(program, target, diagnostics)
    assert not [d.message for d in diagnostics if "pushed" in d.message or "reached" in d.message]
