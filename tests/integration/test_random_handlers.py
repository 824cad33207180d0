"""Handlers do in a process what the interpreter does: random ones, and those of the cases."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.arch.x86_processors import ACCESSED
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.engines.engine_interface import EngineOptions
from dprobes.engines.inline.inline_engine import InlineEngine
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.keyed_tables import KeyKind
from dprobes.rpn.rpn_program import ModuleType, Procedure
from support.case_interpreter import compile_case, context_of, is_native_case
from support.process_world import STACK_PAGES, Scene
from support.random_programs import TABLES, RandomPrograms, random_context
from support.rounds import IS_TORTURE
from support.session_agreement import GLOBALS, Agreement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.arch import Register
    from dprobes.rpn.instruction_set import Row
    from dprobes.rpn.rpn_program import Code, ProbeDefinition, Program
    from integration.support import Builder
    from support.case_format import Case, Target

PROGRAMS, HANDLERS, HITS = (100, 48, 200) if IS_TORTURE else (2, 16, 40)
"""How many programs there are, how many handlers each has, and how often these are hit together."""

SHARE = 1 if IS_TORTURE else 10
"""One of so many cases is run."""

X86_64 = architecture("x86_64")
PAGES = 6
"""How many pages a case may have beside the stack."""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may map pages at low addresses")

_ELSEWHERE = (
    *("push time", "push elapsed", "push entry, <register>", "push usdt, <argument>", "push tp, <field>", "push task"),
    "push pmc, <counter>",
    "push elapsed, <counter>",
    *("callk", "callk <name>", "log kstack", "log kstack, <frames>", "log ustack", "log ustack, <frames>"),
    *("exit <code>", "skip"),
)
"""What cannot be made up in a process, or has consequences there that a comparison of hits does not need."""

_KEYS_ELSEWHERE = frozenset((KeyKind.COMM, KeyKind.USER_STACK, KeyKind.KERNEL_STACK))
"""What tables take from the process itself."""

_NAMES = ("push uid", "push comm", "match comm, <text>", "match commn, <text>")
_KEPT = ("eip", "esp", "eflags", "cs", "ss")
PLAIN_TABLES = tuple(table for table in TABLES if table.name not in ("sums", "frames"))
"""Tables without names of processes."""


def has_same_meaning(row: Row, register: Register | None) -> bool:
    """Return whether an instruction does in a process what it does in a made-up world."""
    if row.syntax in _ELSEWHERE or row.group in (Group.IO, Group.SEGMENT, Group.PHYSICAL):
        return False
    if row.operand_kind is not OperandKind.REGISTER:
        return True
    if register is None or register.name not in REGISTER_OFFSETS or register.name == ACCESSED:
        return False
    return row.syntax.startswith("push") or register.name not in _KEPT


def needs_no_breakpoint(row: Row, register: Register | None) -> bool:
    """Return whether a handler with such an instruction can run in the process."""
    return has_same_meaning(row, register) and row.syntax not in _NAMES


@pytest.mark.parametrize("engine", [PtraceEngine, InlineEngine])
@pytest.mark.parametrize("kind", ["defined", "wild"])
def test_a_random_handler_does_the_same_in_a_process(build: Builder, engine: type[PtraceEngine], kind: str) -> None:
    with Agreement(engine(EngineOptions(allow_write=True)), build("puppet.c"), X86_64) as agreement:
        for seed in range(PROGRAMS):
            dice, has_names = Random(seed), seed % 4 == 3
            programs = RandomPrograms(
                dice,
                X86_64,
                has_same_meaning if has_names else needs_no_breakpoint,
                TABLES if has_names else PLAIN_TABLES,
            )
            program = programs.together(HANDLERS, wild=kind == "wild")
            definitions = tuple(_limited(definition, dice) for definition in program.definitions)
            agreement.begin(replace(program, definitions=definitions), f"seed {seed}")
            pages = random_context(dice, X86_64)
            for n in range(HITS):
                world = random_context(dice, X86_64)
                registers = {register.name: world.value_of(register.name) for register in X86_64.registers}
                registers["eflags"] = dice.getrandbits(12)
                agreement.hit(
                    dice.randrange(HANDLERS),
                    Scene(registers, pages._pages if n == 0 else None, pages._read_only),
                )
        agreement.finish()
    assert agreement.hits > PROGRAMS * HITS // 2
    if engine is InlineEngine:
        assert agreement.jumps > HANDLERS * PROGRAMS // 2


def _limited(definition: ProbeDefinition, dice: Random) -> ProbeDefinition:
    return replace(
        definition,
        passcount=dice.choice((0, 0, 0, 1, 2)),
        maxhits=dice.choice((0, 0, 0, 1, 2)),
        exception_mask=dice.choice((0x0FFF, 0x1FFF, 0, 0xFFFF, dice.randrange(1 << 16))),
        heap=dice.choice((None, None, 0, 64)),
    )


@pytest.mark.parametrize("engine", [PtraceEngine, InlineEngine])
def test_the_handler_of_a_case_does_the_same_in_a_process(
    build: Builder, engine: type[PtraceEngine], all_cases: list[Case]
) -> None:
    groups = _groups(all_cases[::SHARE])
    with Agreement(engine(EngineOptions(allow_write=True)), build("puppet.c"), X86_64) as agreement:
        for group in groups:
            for first in range(0, len(group), agreement.sites):
                cases = group[first : first + agreement.sites]
                agreement.begin(_joined([program for _, program in cases]), ", ".join(case.name for case, _ in cases))
                for number, (case, _) in enumerate(cases):
                    for _ in range(case.hits):
                        agreement.hit(number, _scene(case))
        agreement.finish()
    assert agreement.hits >= sum(map(len, groups)) * 3 // 4
    if engine is InlineEngine:
        assert agreement.jumps >= sum(map(len, groups)) * 3 // 4


def _groups(cases: Iterable[Case]) -> list[list[tuple[Case, Program]]]:
    """Return cases in groups that may be handlers of one program."""
    groups: dict[str, list[tuple[Case, Program]]] = defaultdict(list)
    for case in cases:
        target = next((each for each in case.targets if each.architecture == "x86_64"), None)
        if target is None or not is_native_case(case, target):
            continue
        program, _ = compile_case(case, target)
        if program is not None and _is_for_processes(case, target, program):
            header = replace(program, name="", id=0, definitions=(), procedures=())
            groups[repr(header)].append((case, program))
    return list(groups.values())


def _is_for_processes(case: Case, target: Target, program: Program) -> bool:
    """Return whether a case can be made up in a process."""
    world, code = context_of(case, target), program.bodies()
    allowed = all(
        needs_no_breakpoint(each.row, X86_64.register(str(each.operand))) for body in code for each in body.instructions
    )
    return (
        allowed
        and len(world._pages) <= PAGES
        and all(1 <= page < 1 << 35 and page not in STACK_PAGES for page in world._pages)
        and not world._registers[True]
        and not world.symbols
        and program.gvars <= GLOBALS
        and program.modtype is ModuleType.USER
        and not program.definitions[0].at_return
        and not any(key.kind in _KEYS_ELSEWHERE for table in program.tables for key in table.parts)
    )


def _scene(case: Case) -> Scene:
    world = context_of(case, next(each for each in case.targets if each.architecture == "x86_64"))
    registers = {register.name: world.value_of(register.name) for register in X86_64.registers}
    return Scene(registers, world._pages, world._read_only)


def _joined(programs: list[Program]) -> Program:
    """Return a program of the first handlers of some."""
    definitions, procedures = [], []
    for number, program in enumerate(programs):

        def renamed(code: Code, number: int = number) -> Code:
            return replace(
                code,
                instructions=tuple(
                    replace(each, operand=f"{each.operand}_{number}")
                    if each.row.operand_kind is OperandKind.PROCEDURE
                    else each
                    for each in code.instructions
                ),
            )

        definitions.append(replace(program.definitions[0], handler=renamed(program.definitions[0].handler)))
        procedures += [Procedure(f"{each.name}_{number}", renamed(each.code)) for each in program.procedures]
    return replace(programs[0], definitions=tuple(definitions), procedures=tuple(procedures))
