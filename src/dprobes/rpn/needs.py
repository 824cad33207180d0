"""What a program does to its target besides looking at it: the instructions that need ``--allow-write``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.rpn.program import Instruction, Program

__all__ = ["stops_target", "writing_instructions"]


def stops_target(instruction: Instruction) -> bool:
    """Return whether an instruction stops the target to hand it over."""
    return instruction.row.syntax == "exit <code>" and instruction.operand in (1, 2)


def writing_instructions(program: Program) -> tuple[Instruction, ...]:
    """Return the instructions that change or stop the target; what extensions do is not among them."""
    return tuple(
        instruction
        for code in program.bodies()
        for instruction in code.instructions
        if instruction.row.writes or stops_target(instruction)
    )
