"""Handlers on a program of each processor, behind its stub, come to what they come to on a made-up machine."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.arch import architecture
from dprobes.engines.engine_capabilities import Capability, requirements
from dprobes.engines.engine_registry import engine_row
from dprobes.engines.gdb.stub_context import StubContext
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.engines.gdb.unmet_needs import refuse_for_process, refuse_lacking_registers
from dprobes.errors import DprobesError
from dprobes.keyed.table_entries import stores_of
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.instruction_set import OperandKind
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter, Outcome
from integration.gdb.processors import PROCESSORS, EmulatedProgram, Processor
from support.case_format import Case, Target, parse_case
from support.case_interpreter import compile_case
from support.random_programs import SYMBOLS, RandomPrograms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.rpn.rpn_program import Program
    from integration.support import Builder

CASES = Path(__file__).parents[2] / "cases"
RANDOM_PROGRAMS = 200
NOW = 123_456_789
_OF_MACHINES = {Capability.SEGMENT_REGISTER, Capability.USER_STACK}
"""What a program may ask a stub for that a made-up machine answers in its own way."""


class Behind:
    """A program that stands still behind a stub, and a made-up machine that has the same registers and memory."""

    def __init__(self, processor: Processor, stub: Stub) -> None:
        self.architecture: Architecture = architecture(processor.name)
        of_stubs = processor_of(self.architecture)
        assert of_stubs is not None
        self._target = StubTarget(stub, processor.order, of_stubs.default_description(), of_stubs.breakpoint)
        self._context = StubContext(self._target, self.architecture, of_stubs, lambda _: None)
        self._context.time = lambda: NOW  # type: ignore[method-assign]
        self._context.process_name = lambda: b"stubbed"  # type: ignore[method-assign]
        self._registers: Registers = self._target.registers(None)
        self._stack = self._registers[of_stubs.sp] & -4096

    def outcomes(self, program: Program) -> tuple[Outcome, Outcome]:
        """Run the first handler of a program on both."""
        image = encode(program, self.architecture)
        interpreter = Interpreter(image, self.architecture)
        made_up = self._made_up()
        expected = interpreter.run(image.handlers[0], prepare(program, 0, made_up), made_up)
        context = self._context
        context.select(None, self._target.registers(None), 7)
        context.local_variables, context.global_variables = [0] * program.vars, [0] * program.gvars
        cells, of_thread = [0] * program.cvars, [0] * program.tvars
        context.cpu_variables = lambda: cells  # type: ignore[method-assign]
        context.thread_variables = lambda: of_thread  # type: ignore[method-assign]
        context.symbol_address = lambda symbol: self._stack  # type: ignore[method-assign]
        context.extensions, context.keyed_tables = {}, stores_of(program.tables)
        point = prepare(program, 0, self._made_up())
        found = interpreter.run(image.handlers[0], point, context)
        context.set_aside()
        return found, expected

    def _made_up(self) -> FakeContext:
        """Return a machine with the registers of the thread, and its stack."""
        names = self._context.names
        values = {
            register.name: self._registers[names[register.index]] & (1 << register.bits) - 1
            for register in self.architecture.registers
            if register.index in names and register.bits <= self.architecture.word_bits
        }
        return FakeContext(
            self.architecture.name,
            registers=cast("Any", values),
            memory={self._stack: self._target.read(self._stack, 4096)},
            pid=7,
            tid=7,
            time=NOW,
            comm="stubbed",
            symbols=dict.fromkeys(SYMBOLS, self._stack),
        )

    def can_run(self, program: Program) -> bool:
        """Return whether the engine takes a program."""
        able = engine_row("gdb").capabilities - _OF_MACHINES
        try:
            refuse_for_process(program, self.architecture)
            refuse_lacking_registers(program, self.architecture, self._context.names, self._registers, "it")
        except DprobesError:
            return False
        return all(need.capability in able for need in requirements(program, self.architecture))


@pytest.fixture(scope="module", params=PROCESSORS)
def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, build: Builder
) -> Iterator[Behind]:
    processor = PROCESSORS[request.param]
    path = processor.build(build, "hotloop.c", "-static")
    program = EmulatedProgram(processor, tmp_path_factory.mktemp("stub"), str(path))
    stub = Stub(open_transport(program.endpoint))
    stub.start()
    yield Behind(processor, stub)
    stub.close()
    program.close()


def cases_without_a_world() -> list[Case]:
    cases = [parse_case(path, path.stem) for path in sorted(CASES.glob("**/*.case"))]
    own = {"context", "program", "diagnostics"}
    return [case for case in cases if case.is_run and not case.is_c and own.isdisjoint(n for n, _ in case.sections)]


def test_cases(behind: Behind) -> None:
    arch, count = behind.architecture, 0
    for case in cases_without_a_world():
        program, diagnostics = compile_case(case, Target(arch.name, arch.word_size, arch.byte_order))
        if program is None or diagnostics.has_errors or not behind.can_run(program):
            continue
        found, expected = behind.outcomes(program)
        assert (case.name, found) == (case.name, expected)
        count += 1
    assert count > 100


def test_random_programs(behind: Behind) -> None:
    logged = ran = 0
    for seed in range(RANDOM_PROGRAMS):
        # Only programs of tracepoints have fields.
        programs = RandomPrograms(
            Random(seed), behind.architecture, lambda row, _: row.operand_kind is not OperandKind.FIELD
        )
        program = programs.wild()
        if not behind.can_run(program):
            continue
        found, expected = behind.outcomes(program)
        assert (seed, found) == (seed, expected)
        ran += 1
        logged += bool(found.log)
    assert ran > 5
    assert logged
