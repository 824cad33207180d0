"""
The code of a filter before it has labels and jumps that are whole: instructions, and where the labels are.

A condition ends with a jump to one of two labels; the other one follows. At both of them one cell is on the stack that
is not needed any more, so that all ways to a label leave the same depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn.isa import ExceptionCode, Flow, rows_by_syntax
from dprobes.rpn.program import Expression, Instruction

if TYPE_CHECKING:
    from dprobes.rpn.program import Operand
    from dprobes.source import Span

__all__ = ["HandlerCode"]

_INVERTED = {"jz": "jnz", "jnz": "jz", "jlt": "jge", "jge": "jlt"}


class HandlerCode:
    """Collect instructions; ``prefix`` is what labels begin with."""

    def __init__(self, prefix: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.jumps = 0
        """How many jumps are made at most."""
        self._prefix = prefix
        self._label_count = 0

    @property
    def faulting(self) -> list[Instruction]:
        """The instructions that may meet something that is not there."""
        return [each for each in self.instructions if ExceptionCode.INVALID_ADDR in each.row.faults]

    def label(self) -> str:
        """Return a new label."""
        self._label_count += 1
        return f"{self._prefix}{self._label_count}"

    def place(self, label: str) -> None:
        """Give the next instruction a label."""
        self.labels[label] = len(self.instructions)

    def enter(self, label: str) -> None:
        """Begin what comes behind a condition: place its label, and drop the cell that is left."""
        self.place(label)
        self.add("ros <cells>", 1)

    def add(self, syntax: str, operand: Operand = None, span: Span | None = None) -> None:
        """Add an instruction; ``span`` is the place in the filter that it comes from."""
        row = rows_by_syntax()[syntax]
        self.instructions.append(Instruction(row, operand, span, span))
        if row.flow in (Flow.JUMP, Flow.BRANCH):
            self.jumps += 1

    def push(self, number: int, span: Span | None = None) -> None:
        """Push a number."""
        self.add("push <value>", Expression(number), span)

    def decide(self, operator: str, yes: str, no: str, following: str) -> None:
        """Go to ``yes`` if a jump is taken, else to ``no``; one of them is ``following``, which is placed next."""
        if following == yes:
            self.add(f"{_INVERTED[operator]} <label>", no)
        else:
            self.add(f"{operator} <label>", yes)
            if following != no:
                self.add("jmp <label>", no)
