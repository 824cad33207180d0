"""Which probepoints can have handlers in the process, and why others stay with the breakpoint."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Class, Helper, Jump
from dprobes.engines.inline.trials import trial_of
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.isa import Group
from dprobes.rpn.needs import USER_STACKS, entry_instructions, executed_instructions
from dprobes.rpn.program import calls_extensions
from dprobes.rpn.tables import KeyKind, TableKind, table_of
from dprobes.target.code.functionexits import ExitKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.engines.inline.trials import Trial
    from dprobes.native.runtime import ProcessFacts
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Instruction, Program
    from dprobes.rpn.tables import Table

__all__ = [
    "Eligibility",
    "asks_for_thread",
    "may_divert",
    "obstacle_in_process",
    "obstacle_to_module",
    "obstacle_to_program",
    "trial_before",
]

_PROCESSOR = "x86_64"

_DIVERTING = ("exit <code>", "skip")
_NAMING = ("push uid", "push comm", "match comm, <text>", "match commn, <text>")


def obstacle_to_program(program: Program) -> str | None:
    """Return why no handler of a program can run in the process, None if nothing speaks against it."""
    if calls_extensions(program):
        return "the program calls extensions"
    return None


def obstacle_to_module(architecture: Architecture) -> str | None:
    """Return why no handler can run in a module of an architecture, None if nothing speaks against it."""
    if architecture.name != _PROCESSOR:
        return f"jumps are made for {_PROCESSOR}, not for {architecture.name}"
    if architecture.convention == "Go":
        return "stacks of goroutines may have no room for its handler"
    return None


class Eligibility:
    """What speaks against handlers of one program in the process, probepoint by probepoint."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def obstacle_to(self, probe: Probepoint) -> str | None:
        """Return why the handler of a probepoint cannot run in the process, None if nothing speaks against it."""
        program = self._program
        if not probe.is_in_code or probe.state is not ProbeState.COMPILED:
            return "it is not about an instruction"
        executed = list(executed_instructions(program, probe.definition))
        if probe.at_return:
            has_returns = any(leaving.kind is ExitKind.RETURN for leaving in probe.code.exits.exits)
            if not has_returns and not entry_instructions(program, probe.definition):
                return "its function has no return instruction, and is left by jumps only"
        elif (found := trial_before(program, probe)) is not None:
            if isinstance(found, str):
                return found
            if any(instruction.row.writes and instruction.row.syntax != "skip" for instruction in executed):
                return "its instruction may fault, which may depend on what its handler changes"
        for instruction in executed:
            if instruction.row.syntax in _DIVERTING and probe.at_return:
                operand = "" if instruction.row.operand_kind is None else f" {instruction.operand}"
                return f"its handler ends with '{instruction.row.operator}{operand}'"
            if instruction.row.syntax in _NAMING or _has_names(instruction, program):
                return "its handler asks for the process name or the user, which only the kernel knows"
        return self._obstacle_to_stacks(executed)

    def _obstacle_to_stacks(self, executed: Sequence[Instruction]) -> str | None:
        """
        Return why the call stacks that instructions take cannot be those of a copy of the stack, None if nothing is.

        The copy is made when the handler has ended, and followed later.
        """
        program = self._program
        tables = {i.operand for i in executed if (table := _table_of(i, program)) is not None and table.has_user_stack}
        if any(i.row.syntax in USER_STACKS for i in executed) or tables:
            for instruction in executed:
                if instruction.row.syntax == "pop lp":
                    return "its handler takes call stacks, and goes back in the log"
                if (table := _table_of(instruction, program)) and table.has_user_stack and table.kind is TableKind.LAST:
                    return "its call stacks go into a table of what came last"
                if instruction.row.writes:
                    return "its handler takes call stacks, and changes registers or memory"
        if not self._looked_at.isdisjoint(tables):
            return "its call stacks go into a table that handlers look at"
        return None

    @cached_property
    def _looked_at(self) -> frozenset[object]:
        """The tables with which some handler does something else than to count in them."""
        return frozenset(
            instruction.operand
            for code in self._program.bodies()
            for instruction in code.instructions
            if instruction.row.operator != "tally" and _table_of(instruction, self._program) is not None
        )


def trial_before(program: Program, probe: Probepoint) -> Trial | str | None:
    """Return what is tried before the handler of a probepoint; None if nothing is to be, or why it cannot be."""
    if probe.at_return or program.keeps_log_on_fault(probe.definition):
        return None
    return trial_of(probe.instruction.raw)


def may_divert(program: Program, probe: Probepoint) -> bool:
    """Return whether a handler may end so that the probed instruction does not follow."""
    return any(each.row.syntax in _DIVERTING for each in executed_instructions(program, probe.definition))


def obstacle_in_process(assembled: Assembled, facts: ProcessFacts) -> str | None:
    """Return why the code of a handler cannot run in a process, None if nothing speaks against it."""
    if facts.tid_place is None and asks_for_thread(assembled):
        return "nobody knows where its threads have their ids"
    return None


def asks_for_thread(assembled: Assembled) -> bool:
    """Return whether a handler wants to know the ids of its process and thread."""
    call = Class.JMP | Jump.CALL
    return any(insn.opcode == call and insn.imm == Helper.GET_CURRENT_PID_TGID for insn in assembled.code)


def _has_names(instruction: Instruction, program: Program) -> bool:
    """Return whether an instruction puts numbers into a table that has process names as keys."""
    table = _table_of(instruction, program)
    return table is not None and any(key.kind is KeyKind.COMM for key in table.keys)


def _table_of(instruction: Instruction, program: Program) -> Table | None:
    """Return the table that an instruction is about, None if it is about none."""
    return table_of(instruction.operand, program.tables) if instruction.row.group is Group.TABLE else None
