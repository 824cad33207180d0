"""Requirements of a program: ``--allow-write``, call stacks, the entries of calls, and the codes of its records."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from dprobes.rpn.instruction_encoding import closed
from dprobes.rpn.instruction_set import ExceptionCode, Flow, OperandKind, rows_by_syntax
from dprobes.rpn.keyed_tables import TableKind
from dprobes.rpn.performance_counters import counter_number
from dprobes.rpn.rpn_program import Address, Expression, ModuleType, Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture, Register
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program

__all__ = [
    "CORE_DUMP",
    "COUNTED",
    "ELAPSED",
    "ENTRY",
    "USER_STACKS",
    "counters_read",
    "counters_sampled",
    "dumps_core",
    "entry_counters",
    "entry_instructions",
    "entry_registers",
    "executed_instructions",
    "logs_stacks",
    "makes_records",
    "needs_target",
    "patched_definitions",
    "record_majors",
    "sets_codes",
    "shared_tables",
    "skipping_instruction",
    "stops_target",
    "takes_user_stacks",
    "traced_fields",
    "usdt_arguments",
    "watches_user_addresses",
    "writing_instructions",
]

ELAPSED, ENTRY, COUNTED = "push elapsed", "push entry, <register>", "push elapsed, <counter>"
"""Instructions that read the entry of the returning call."""
_OF_ENTRIES = frozenset({ELAPSED, ENTRY, COUNTED})
_SKIP = frozenset({"skip"})

USER_STACKS = ("log ustack", "log ustack, <frames>")
"""Instructions that log user call stacks."""

CORE_DUMP = 3
"""Operand of ``exit`` that requests a core dump of the process."""

_ACCESSES = frozenset({ExceptionCode.INVALID_ADDR, ExceptionCode.SEG_FAULT})
_TARGETS = (
    *("skip", "remove", "exit <code>", "callk", "push usdt", "push tp", "push task", "push pmc"),
    *("log str", "log mrf", "log kstack", "match str", "vfyr", "seg2lin", "vsa"),
)
"""First words of instructions that use the target, in addition to instructions that may fault."""


def stops_target(instruction: Instruction, modtype: ModuleType) -> bool:
    """
    Return whether an instruction stops the target for a debugger (``exit 1``) or a crash dump (``exit 2``).

    In programs for user modules ``exit 2`` does not count: there it cannot cause a crash dump.
    """
    codes = (1,) if modtype is ModuleType.USER else (1, 2)
    return instruction.row.syntax == "exit <code>" and instruction.operand in codes


def dumps_core(program: Program) -> bool:
    """Return whether a handler requests a core dump of the process (``exit 3``)."""
    instructions = (instruction for code in program.bodies() for instruction in code.instructions)
    return any(each.row.syntax == "exit <code>" and each.operand == CORE_DUMP for each in instructions)


def logs_stacks(program: Program) -> bool:
    """Return whether handlers log call stacks of programs or of the kernel."""
    return any(syntax.startswith(("log ustack", "log kstack")) for syntax in program.syntaxes)


def takes_user_stacks(program: Program) -> bool:
    """Return whether handlers log user call stacks or store them in tables."""
    if any(table.has_user_stack for table in program.tables):
        return True
    return any(i.row.syntax in USER_STACKS for code in program.bodies() for i in code.instructions)


def writing_instructions(program: Program) -> tuple[Instruction, ...]:
    """Return the instructions that change or stop the target, extensions excluded."""
    return tuple(
        instruction
        for code in program.bodies()
        for instruction in code.instructions
        if instruction.row.writes or stops_target(instruction, program.modtype)
    )


def patched_definitions(program: Program) -> tuple[ProbeDefinition, ...]:
    """Return the definitions whose functions are replaced (``patch =``)."""
    return tuple(definition for definition in program.definitions if definition.patch is not None)


def counters_read(program: Program) -> tuple[str, ...]:
    """Return the names of the performance counters that handlers read, in the order of ``COUNTERS``."""
    instructions = (instruction for code in program.bodies() for instruction in code.instructions)
    names = {str(each.operand) for each in instructions if each.row.operand_kind is OperandKind.COUNTER}
    return tuple(sorted(names, key=counter_number))


def counters_sampled(program: Program) -> tuple[str, ...]:
    """Return the names of the performance counters whose events are sampled, in the order of ``COUNTERS``."""
    locations = [definition.location for definition in program.definitions]
    names = {each.counter for each in locations if isinstance(each, Sampler) and each.counter is not None}
    return tuple(sorted(names, key=counter_number))


def makes_records(program: Program) -> bool:
    """Return whether a hit may write a record; records of exceptions without a handler do not count."""
    ending = rows_by_syntax()["exit"]
    handlers = (closed(definition.handler, ending) for definition in program.definitions)
    codes = (*handlers, *(procedure.code for procedure in program.procedures))
    return any(i.row.flow is Flow.END and i.row.syntax != "abort" for code in codes for i in code.instructions)


def record_majors(program: Program) -> frozenset[int] | None:
    """
    Return the major codes that the records of a program may have.

    None means that the program computes a code at run time.
    """
    majors = {program.major}
    for code in program.bodies():
        for instruction in code.instructions:
            match instruction.row.syntax, instruction.operand:
                case "setmaj <major>", int() as major:
                    majors.add(major)
                case (("setmaj" | "setmaj <major>"), _):
                    return None
    return frozenset(majors)


def sets_codes(program: Program) -> bool:
    """Return whether handlers contain ``setmaj`` or ``setmin``, which replace the codes of the headers in records."""
    return any(
        instruction.row.syntax.startswith(("setmaj", "setmin"))
        for code in program.bodies()
        for instruction in code.instructions
    )


def traced_fields(program: Program, definition: ProbeDefinition) -> tuple[Instruction, ...]:
    """Return the instructions that read tracepoint fields in a handler and in the procedures that it calls."""
    return _executed(program, definition, _syntaxes_with(OperandKind.FIELD))


def usdt_arguments(program: Program, definition: ProbeDefinition) -> tuple[Instruction, ...]:
    """Return the instructions that read USDT arguments in a handler and in the procedures that it calls."""
    return _executed(program, definition, _syntaxes_with(OperandKind.ARGUMENT))


def entry_instructions(program: Program, definition: ProbeDefinition) -> tuple[Instruction, ...]:
    """Return the instructions of a handler, or of a procedure that it calls, that read the entry of a call."""
    return _executed(program, definition, _OF_ENTRIES)


def entry_registers(
    program: Program, definition: ProbeDefinition, architecture: Architecture
) -> tuple[Register, ...] | None:
    """
    Return the registers to store at the entry of a call for its return.

    None means that no instruction reads values of the entry.
    """
    if not definition.at_return or not (asking := entry_instructions(program, definition)):
        return None
    names = (each.operand for each in asking if each.row.syntax == ENTRY)
    found = (architecture.register(name) for name in names if isinstance(name, (str, int)))
    return tuple(sorted({r for r in found if r is not None and r.is_kept_at_entry}, key=lambda each: each.index))


def entry_counters(program: Program, definition: ProbeDefinition) -> tuple[int, ...]:
    """Return the counters to store from the entry of a call to its return, as indices in ``COUNTERS``, sorted."""
    names = {str(i.operand) for i in entry_instructions(program, definition) if i.row.syntax == COUNTED}
    return tuple(sorted(map(counter_number, names)))


def skipping_instruction(program: Program, definition: ProbeDefinition) -> Instruction | None:
    """Return the first ``skip`` that a handler, or a procedure that it calls, executes; None if there is none."""
    return next(iter(_executed(program, definition, _SKIP)), None)


def needs_target(program: Program, definition: ProbeDefinition, architecture: Architecture) -> bool:
    """Return whether a handler changes the target or reads more of it than general registers."""
    if takes_user_stacks(program):
        return True
    for instruction in executed_instructions(program, definition):
        row, operand = instruction.row, instruction.operand
        if row.writes or row.syntax.startswith(_TARGETS):
            return True
        if row.operand_kind is OperandKind.REGISTER:
            register = architecture.register(operand) if isinstance(operand, (str, int)) else None
            if register is None or not register.is_kept_at_entry or register.memory_offset is not None:
                return True
        elif row.operand_kind is not OperandKind.TABLE and _ACCESSES & set(row.faults):
            return True
    return False


def _executed(program: Program, definition: ProbeDefinition, syntaxes: frozenset[str]) -> tuple[Instruction, ...]:
    """Return the instructions with these syntaxes in a handler and in the procedures that it calls."""
    if program.syntaxes.isdisjoint(syntaxes):
        return ()  # found for thousands of definitions at once
    return tuple(i for i in executed_instructions(program, definition) if i.row.syntax in syntaxes)


@cache
def _syntaxes_with(kind: OperandKind) -> frozenset[str]:
    """Return the syntaxes of the instructions with this kind of operand."""
    return frozenset(syntax for syntax, row in rows_by_syntax().items() if row.operand_kind is kind)


def executed_instructions(program: Program, definition: ProbeDefinition) -> Iterator[Instruction]:
    """Iterate over the instructions of a handler and of the procedures that it calls, each once."""
    procedures = {procedure.name: procedure.code for procedure in program.procedures}
    waiting, seen = [definition.handler], set[str]()
    while waiting:
        for instruction in waiting.pop().instructions:
            yield instruction
            name = str(instruction.operand)
            if instruction.row.operand_kind is OperandKind.PROCEDURE and name in procedures and name not in seen:
                seen.add(name)
                waiting.append(procedures[name])


_KERNEL_HALF = 1 << 63
"""Lowest address of the kernel's half of the address space."""


def watches_user_addresses(program: Program) -> bool:
    """
    Return whether a kernel program has only watchpoints at user addresses, and names no symbol of the kernel.

    Such a program applies to every process, whatever the process maps.
    """
    if program.modtype is not ModuleType.KERNEL:
        return False
    for definition in program.definitions:
        is_users = False
        match definition.location:
            case Address(Expression(low, None), None | Expression(_, None)):
                is_users = low < _KERNEL_HALF and definition.watchpoint is not None and not definition.watches_ports
        if not is_users:
            return False
    operands = (instruction.operand for code in program.bodies() for instruction in code.instructions)
    return not any(isinstance(operand, Expression) and operand.symbol is not None for operand in operands)


def shared_tables(program: Program) -> frozenset[int]:
    """Return the numbers of the tables that CPUs share: those of kind ``last``, and those with a read or ``delete``."""
    if not program.tables:
        return frozenset()
    looked_at = {
        instruction.operand
        for code in program.bodies()
        for instruction in code.instructions
        if instruction.row.operand_kind is OperandKind.TABLE and instruction.row.operator != "tally"
    }
    return frozenset(
        number for number, table in enumerate(program.tables) if table.kind is TableKind.LAST or table.name in looked_at
    )
