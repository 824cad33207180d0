"""Every row of the instruction table: it has a rule, a doc, cases that show it, and the stack effect that it states."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import Architecture, architecture
from dprobes.rpn import instruction_set
from dprobes.rpn.control_flow import stack_effect
from dprobes.rpn.instruction_set import Flow, OperandKind, Row
from dprobes.rpn.performance_counters import COUNTERS, counter_number
from dprobes.rpn.rpn_program import Expression, Instruction, Operand
from dprobes.testing import run_definition
from dprobes.vm import AddressFault, Point, SelectorFault, interpreter
from dprobes.vm.rpn_machine import Machine, Raised
from support.case_interpreter import compile_case, context_of
from support.random_programs import TABLES, random_context
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from support.case_format import Case

ROWS = pytest.mark.parametrize("row", instruction_set.ROWS, ids=lambda row: row.syntax)

Seen = set[tuple[str, int | None]]
"""(syntax, exception code, or None for the normal path)."""


@pytest.fixture(scope="module")
def seen(all_cases: list[Case]) -> Seen:
    """Return what happened to which instruction when all cases ran."""
    found: Seen = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "RULES", {s: _watched(s, rule, found) for s, rule in interpreter.RULES.items()})
        for case in all_cases:
            if case.is_run:
                program, diagnostics = compile_case(case, case.targets[0])
                assert program is not None, diagnostics.render()
                for target in case.targets:
                    run_definition(program, 0, context_of(case, target))
    return found


def _watched(syntax: str, rule: Callable[[Machine, Any], None], found: Seen) -> Callable[[Machine, Any], None]:
    def watched(machine: Machine, operand: Any) -> None:
        try:
            rule(machine, operand)
        except Raised as raised:
            found.add((syntax, raised.code & 0xFFFF))
            raise
        except AddressFault:
            found.add((syntax, instruction_set.ExceptionCode.INVALID_ADDR))
            raise
        except SelectorFault:
            found.add((syntax, instruction_set.ExceptionCode.SEG_FAULT))
            raise
        else:
            found.add((syntax, None))

    return watched


@ROWS
def test_a_row_has_a_rule_and_a_doc(row: Row) -> None:
    assert row.syntax in interpreter.RULES
    assert row.doc.endswith(".")
    assert row.effect.count("--") == 1


def test_there_is_no_rule_without_a_row() -> None:
    assert set(interpreter.RULES) == set(instruction_set.rows_by_syntax())


def test_opcodes_and_syntaxes_are_unique() -> None:
    assert len(instruction_set.rows_by_opcode()) == len(instruction_set.ROWS)
    assert len(instruction_set.rows_by_syntax()) == len(instruction_set.ROWS)
    assert all(0 <= row.opcode <= 0xFF for row in instruction_set.ROWS)


def test_an_alias_leads_to_a_row_with_the_same_operand() -> None:
    for alias in instruction_set.ALIASES:
        row = instruction_set.rows_by_syntax()[alias.canonical]
        assert [o for o in alias.operands if isinstance(o, OperandKind)] == [
            o for o in row.operands if isinstance(o, OperandKind)
        ]


@ROWS
def test_a_case_shows_the_normal_path_of_a_row(row: Row, seen: Seen) -> None:
    normal = instruction_set.ExceptionCode.USER_EX if row.flow is Flow.RAISE else None
    assert (row.syntax, normal) in seen


@pytest.mark.parametrize(
    ("row", "fault"),
    [(row, fault) for row in instruction_set.ROWS for fault in row.faults],
    ids=lambda value: value.syntax if isinstance(value, Row) else value.name,
)
def test_a_case_shows_each_fault_of_a_row(row: Row, fault: instruction_set.ExceptionCode, seen: Seen) -> None:
    assert (row.syntax, fault) in seen


@ROWS
def test_a_row_raises_only_the_faults_that_it_states(row: Row, seen: Seen) -> None:
    raised = {code for syntax, code in seen if syntax == row.syntax and code is not None}
    assert row.flow is Flow.RAISE or raised <= set(row.faults)


# The stack effect of a row is what its rule does to TSP; what lies below the popped cells is left alone.

_WRITES_ELSEWHERE = ("pop sbp", "pop tsp", "copy sbp", "copy tsp")


@ROWS
@pytest.mark.parametrize("name", ["i386", "x86_64", "s390", "s390x"])
def test_the_effect_of_a_row_is_what_its_rule_does(name: str, row: Row) -> None:
    target = architecture(name)
    random = Random(f"{name} {row.syntax}")
    if name.startswith("s390") and row.group in (instruction_set.Group.IO, instruction_set.Group.SEGMENT):
        assert row.opcode >= 0xB0  # the processor's own opcodes: there is nothing to compare
        return
    compared = 0
    for number in range(80):
        if number >= rounds(80) and compared >= 3:
            break
        for operand in _operands(random, row, target):
            effect = stack_effect(Instruction(row, operand), target, TABLES)
            if not effect.exact:
                compared += 1
                continue
            compared += _compare(random, row, operand, target, effect.popped, effect.pushed)
    assert compared >= 3


def _compare(random: Random, row: Row, operand: Operand, target: Architecture, popped: int, pushed: int) -> bool:
    context = random_context(random, target)
    kinds = (context.local_variables, context.global_variables, context.cpu_variables(), context.thread_variables())
    for variables in kinds:
        variables.extend(random.randrange(1 << 32) for _ in range(4))
    machine = Machine(target, Point(ex_logmax=0xFFFF, logmax=0xFFFF, arguments=context.arguments), context, 0)
    if row.syntax == "ret":
        machine.enter(0)
    machine.cells[:] = random.choices((0, 1, 2, 3, 8, 16, 0x1000, 0x1010), k=instruction_set.RPN_STACK_CELLS)
    context.segments.update(dict.fromkeys((0, 1, 2, 3, 8), 0x1000))
    if row.group is instruction_set.Group.HEAP and row.syntax != "malloc":
        _put_heap_operands(machine, row, popped)
    before, below = machine.tsp, [machine.peek(popped + n) for n in range(100)]
    try:
        interpreter.RULES[row.syntax](machine, _as_decoded(row, operand, target))
    except (Raised, AddressFault, SelectorFault):
        if row.flow is Flow.RAISE:
            return machine.tsp == before
        # An instruction that raises has popped its operands and pushed nothing; the value of "move" is not popped.
        assert machine.tsp == before + popped - (row.operator == "move")
        return False
    assert machine.tsp == before + popped - pushed
    if not row.syntax.startswith(_WRITES_ELSEWHERE):
        assert [machine.peek(pushed + n) for n in range(100)] == below
    return True


def _put_heap_operands(machine: Machine, row: Row, popped: int) -> None:
    handle = machine.heap.allocate(1000)
    # The free form has the handle on top; the others have the offset there.
    machine.poke(handle if row.syntax == "free" else 0, 0)
    machine.poke(handle, 1)


def _operands(random: Random, row: Row, target: Architecture) -> list[Operand]:
    match row.operand_kind:
        case None:
            return [None]
        case OperandKind.REGISTER:
            access = row.syntax.partition(",")[0]
            return [random.choice([r.name for r in target.registers if r.may_be(access)])]
        case OperandKind.VALUE:
            return [Expression(random.randrange(1 << 31))]
        case OperandKind.EXTENSION | OperandKind.LABEL | OperandKind.PROCEDURE:
            return ["name"]
        case OperandKind.FIELD:
            return ["next.comm"]
        case OperandKind.TEXT:
            return ["text"]
        case OperandKind.EXIT_CODE:
            return [random.randrange(1, 4)]
        case OperandKind.DISPLACEMENT:
            return [random.randrange(-300, 300)]
        case OperandKind.BITS:
            return [random.randrange(1, 70)]
        case OperandKind.COUNTER:
            return [random.choice(COUNTERS).name]
        case OperandKind.TABLE:
            return [random.choice([each for each in TABLES if row.operator != "add" or each.takes_additions]).name]
        case _:
            return [random.randrange(4)]


def _as_decoded(row: Row, operand: Operand, target: Architecture) -> object:
    match row.operand_kind:
        case OperandKind.REGISTER:
            assert isinstance(operand, str)
            return target.register(operand)
        case OperandKind.LABEL | OperandKind.PROCEDURE | None:
            return 0
        case OperandKind.COUNTER:
            return counter_number(str(operand))
        case OperandKind.TABLE:
            return [table.name for table in TABLES].index(str(operand))
        case _:
            return operand.addend if isinstance(operand, Expression) else operand
