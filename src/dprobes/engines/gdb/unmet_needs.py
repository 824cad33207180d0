"""Errors for needs of a program that a machine or its stub does not meet, reported before breakpoints are inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_capabilities import Capability, requirements
from dprobes.engines.gdb.machine.privileged_registers import MONITORED, SELECTED
from dprobes.errors import EngineError
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.program_needs import CORE_DUMP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dprobes.arch import Architecture
    from dprobes.arch.processor import Register
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.rpn.rpn_program import Instruction, Program

__all__ = ["no_machine", "refuse_for_process", "refuse_lacking", "refuse_lacking_registers"]


def refuse_lacking_registers(
    program: Program, architecture: Architecture, names: Mapping[int, str], registers: Registers, stub: str
) -> None:
    """
    Raise ``SourceError`` if a handler names a register that the stub called ``stub`` does not have.

    ``names`` maps register indices to the stub's names, ``registers`` are those of a thread.
    """
    diagnostics = Diagnostics()
    for instruction, register in _named_registers(program, architecture):
        if not register.selector_cells and names.get(register.index, "") not in registers:
            span = instruction.operand_place or instruction.span
            diagnostics.error(span, f"the stub {stub} has no register '{register.name}'")
    diagnostics.raise_if_errors()


def _named_registers(program: Program, architecture: Architecture) -> Iterator[tuple[Instruction, Register]]:
    """Iterate over the instructions that name a register which is not a place in memory."""
    for code in program.bodies():
        for instruction in code.instructions:
            operand = instruction.operand
            if instruction.row.operand_kind is OperandKind.REGISTER and isinstance(operand, (str, int)):
                register = architecture.register(operand)
                if register is not None and register.memory_offset is None:
                    yield instruction, register


MACHINES_ONLY = frozenset(
    {
        Capability.TASK,
        Capability.SYSTEM_REGISTER,
        Capability.CPUID,
        Capability.IO_PORT,
        Capability.SEGMENTED,
        Capability.PHYSICAL_MEMORY,
        Capability.VERIFY_WRITE,
        Capability.KERNEL_STACK,
        Capability.SAMPLER,
    }
)
"""Capabilities of machines that processes behind a stub lack."""


def no_machine(stub: str) -> EngineError:
    """Return the error for a program that probes a machine, if the stub's target is a process."""
    return EngineError(
        f"the stub {stub} serves a process, which has neither processors nor a kernel",
        hint="write a program about its code: 'name = FILE' and 'offset = FUNCTION'",
    )


def refuse_for_process(program: Program, architecture: Architecture) -> None:
    """Raise ``SourceError`` if a program for a process needs capabilities of machines."""
    diagnostics = Diagnostics()
    for need in requirements(program, architecture):
        if need.capability in MACHINES_ONLY:
            message = f"'{need.what}' needs {need.capability.value}, which processes behind a stub do not have"
            diagnostics.error(need.span, message)
    diagnostics.raise_if_errors()


def refuse_lacking(
    program: Program,
    architecture: Architecture,
    names: Mapping[int, str],
    registers: Registers,
    stub: str,
    *,
    has_monitor: bool,
    has_physical: bool,
    has_kernel: bool,
    has_programs: bool,
) -> None:
    """
    Raise ``SourceError`` if a program needs a register or a port that the ``stub`` of a machine does not have.

    ``names`` maps register indices to the stub's names, ``registers`` are those of a processor. ``has_kernel`` is True
    if the machine's kernel is known, ``has_programs`` if the mappings of its processes are.
    """
    needs: tuple[tuple[bool, Callable[[Instruction], bool], str, str | None], ...] = (
        (
            has_programs,
            lambda each: each.row.syntax.startswith("log ustack"),
            "'{}' needs a kernel whose processes are known, as those since Linux 6.1",
            None,
        ),
        (
            has_kernel,
            lambda each: each.row.syntax.startswith("log kstack"),
            "'{}' needs a kernel that is known, which a machine as such has not",
            "write 'name = vmlinux' if a kernel of Linux runs there",
        ),
        (
            has_monitor,
            lambda each: each.row.group in (Group.IO, Group.SEGMENT),
            f"the stub {stub} has no monitor, which '{{}}' needs",
            "QEMU's stub has one",
        ),
        (
            has_physical,
            lambda each: each.row.group is Group.PHYSICAL,
            f"the stub {stub} shows no physical memory, which '{{}}' needs",
            "QEMU's stub does",
        ),
        (
            False,
            lambda each: each.row.syntax == "exit <code>" and each.operand == CORE_DUMP,
            f"'{{}}' writes the core of a process, but the stub {stub} serves a machine",
            "write 'exit 2' for a dump of the machine's memory",
        ),
    )
    diagnostics = Diagnostics()
    for instruction in (each for code in program.bodies() for each in code.instructions):
        for is_there, is_needed, message, hint in needs:
            if not is_there and is_needed(instruction):
                diagnostics.error(instruction.span, message.replace("{}", str(instruction)), hint=hint)
    for instruction, register in _named_registers(program, architecture):
        is_tellable = register.name in (*MONITORED, *SELECTED)
        if names.get(register.index, "") not in registers and not (has_monitor and is_tellable):
            span = instruction.operand_place or instruction.span
            told = "QEMU's stub has a monitor that shows it" if is_tellable else None
            diagnostics.error(span, f"the stub {stub} has no register '{register.name}'", hint=told)
    diagnostics.raise_if_errors()
