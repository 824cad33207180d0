"""Registers that a program names, and that a stub does not have: errors at the instructions, before any breakpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.rpn.isa import OperandKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.registers import Registers
    from dprobes.rpn.program import Program

__all__ = ["refuse_lacking_registers"]


def refuse_lacking_registers(
    program: Program, architecture: Architecture, names: Mapping[int, str], registers: Registers, stub: str
) -> None:
    """
    Raise ``SourceError`` if a handler names a register that the stub called ``stub`` does not have.

    ``names`` are the stub's by our index, ``registers`` those of a thread.
    """
    diagnostics = Diagnostics()
    for code in program.bodies():
        for instruction in code.instructions:
            operand = instruction.operand
            if instruction.row.operand_kind is not OperandKind.REGISTER or not isinstance(operand, (str, int)):
                continue
            register = architecture.register(operand)
            if register is None or register.memory_offset is not None or register.selector_cells:
                continue
            name = names.get(register.index)
            if name is None or name not in registers:
                span = instruction.operand_place or instruction.span
                diagnostics.error(span, f"the stub {stub} has no register '{register.name}'")
    diagnostics.raise_if_errors()
