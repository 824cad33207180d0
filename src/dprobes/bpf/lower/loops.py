"""
How a handler goes in circles, in each of the ways that kernels have for that (``LoopForm``).

Every way back passes a guard, which gives a handler up that runs for too long. The budgets of the language end loops
long before. A guard stands at the place where the way back leads to, and not where it comes from: so all ways meet
there, and the verifier sees that it has been there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import LOOPS_MAX, Alu, Helper, Jump, Register
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.request import LoopForm
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.request import Abilities

__all__ = ["Guards", "Loops", "Steps", "loops_of", "switch"]

_R = Register

_ITERATOR = -8
"""Where on the stack the number iterator is."""

_PASSING = tuple(register for register in Register if register not in (CONTEXT, SCRATCH, Register.R10))
"""The registers that hold something within a block only."""


def loops_of(asm: Assembler, abilities: Abilities, end: Label) -> Loops:
    """Return how loops of a handler are written for a kernel; the handler goes to ``end`` when it has ended."""
    return Steps(asm, end) if abilities.loops is LoopForm.CALLBACK else Guards(asm, end, abilities)


def switch(asm: Assembler, register: Register, cases: list[tuple[int, Label]], default: Label) -> None:
    """Go to the label of the number that a register holds; the numbers ascend."""
    if len(cases) <= 3:
        for value, label in cases:
            asm.jump_if(Jump.JEQ, register, value, label)
        asm.jump(default)
        return
    middle = len(cases) // 2
    upper = asm.label()
    asm.jump_if(Jump.JGE, register, cases[middle][0], upper)
    switch(asm, register, cases[:middle], default)
    asm.place(upper)
    switch(asm, register, cases[middle:], default)


class Loops(ABC):
    """Write loops. Only R6 and R7 hold something at a head, at a junction, and where control goes to a head."""

    def __init__(self, asm: Assembler, end: Label) -> None:
        self._asm = asm
        self._end = end

    @abstractmethod
    def write_inside(self, body: Callable[[], None]) -> None:
        """Write what runs the handler, within the program; ``body`` writes the handler itself."""

    @abstractmethod
    def write_behind(self, body: Callable[[], None]) -> None:
        """Write what stands behind the program, with the handler if that is a function of its own."""

    @abstractmethod
    def head(self, label: Label) -> None:
        """Place a label to which control comes back through ``goto``."""

    @abstractmethod
    def goto(self, label: Label) -> None:
        """Go to a label, be it a head that is placed already or not."""

    @abstractmethod
    def junction(self) -> None:
        """Write where ways meet that lead on to any place."""

    def _note_exhaustion(self) -> None:
        """Show what lies beyond all jump budgets as JMP_MAX."""
        self._asm.store(SCRATCH, Field.UNHANDLED, ExceptionCode.JMP_MAX)


class Guards(Loops):
    """Write loops as such, with ``may_goto`` or a number iterator."""

    def __init__(self, asm: Assembler, end: Label, abilities: Abilities) -> None:
        super().__init__(asm, end)
        self._iterator = abilities.iterator if abilities.loops is LoopForm.ITERATOR else None
        self._exhausted = asm.label()

    def write_inside(self, body: Callable[[], None]) -> None:
        """Write the handler, and around it what iterators need."""
        asm = self._asm
        if self._iterator is not None:
            asm.mov(_R.R2, 0)
            asm.mov(_R.R3, LOOPS_MAX)
            self._call(self._iterator[0])
        body()
        asm.place(self._exhausted)
        self._note_exhaustion()
        asm.place(self._end)
        if self._iterator is not None:
            self._call(self._iterator[2])

    def write_behind(self, body: Callable[[], None]) -> None:
        """Write nothing."""

    def head(self, label: Label) -> None:
        """Place the label and a guard."""
        self._asm.place(label)
        self.junction()

    def goto(self, label: Label) -> None:
        """Jump."""
        self._asm.jump(label)

    def junction(self) -> None:
        """Write a guard."""
        asm = self._asm
        # Before 6.15 the verifier compares these registers although nobody reads them.
        for register in _PASSING:
            asm.mov(register, 0, wide=False)
        if self._iterator is None:
            asm.may_goto(self._exhausted)
            return
        self._call(self._iterator[1])
        asm.jump_if(Jump.JEQ, _R.R0, 0, self._exhausted)
        asm.mov(_R.R0, 0)

    def _call(self, function: int) -> None:
        """Call a function on the iterator, its address in R1."""
        self._asm.mov(_R.R1, _R.R10)
        self._asm.alu(Alu.ADD, _R.R1, _ITERATOR)
        self._asm.call_kfunc(function)


class Steps(Loops):
    """Write the handler as a callback of ``bpf_loop``: instead of going back it ends a step, and the next goes on."""

    def __init__(self, asm: Assembler, end: Label) -> None:
        super().__init__(asm, end)
        self._callback = asm.label()
        self._heads: set[Label] = set()
        self._resumed: list[Label] = []

    def write_inside(self, body: Callable[[], None]) -> None:  # noqa: ARG002 - it is written behind
        """Write the call, which takes context and state to the callback."""
        asm, ended = self._asm, self._asm.label()
        asm.store(_R.R10, -8, CONTEXT)
        asm.store(_R.R10, -16, SCRATCH)
        asm.store(SCRATCH, Field.RESUME, 0)
        asm.mov(_R.R1, LOOPS_MAX)
        asm.load_function(_R.R2, self._callback)
        asm.mov(_R.R3, _R.R10)
        asm.alu(Alu.ADD, _R.R3, -16)
        asm.mov(_R.R4, 0)
        asm.call(Helper.LOOP)
        asm.jump_if(Jump.JLT, _R.R0, LOOPS_MAX, ended)
        self._note_exhaustion()
        asm.place(ended)

    def write_behind(self, body: Callable[[], None]) -> None:
        """Write the callback, which goes first where the last step said."""
        asm, resume = self._asm, self._asm.label()
        asm.function(self._callback)
        asm.load(SCRATCH, _R.R2, 0)
        asm.load(CONTEXT, _R.R2, 8)
        asm.load(_R.R1, SCRATCH, Field.RESUME)
        asm.jump_if(Jump.JNE, _R.R1, 0, resume)
        body()
        asm.place(self._end)
        asm.mov(_R.R0, 1)
        asm.exit()
        asm.place(resume)
        asm.load(_R.R1, SCRATCH, Field.RESUME)
        switch(asm, _R.R1, [(n, label) for n, label in enumerate(self._resumed, 1)], self._end)

    def head(self, label: Label) -> None:
        """Place the label."""
        self._asm.place(label)
        self._heads.add(label)

    def goto(self, label: Label) -> None:
        """Jump forwards, or end a step that is to go back."""
        if label in self._heads:
            self._step_to(label)
        else:
            self._asm.jump(label)

    def junction(self) -> None:
        """End a step that goes on here."""
        following = self._asm.label()
        self._step_to(following)
        self._asm.place(following)

    def _step_to(self, label: Label) -> None:
        if label not in self._resumed:
            self._resumed.append(label)
        self._asm.store(SCRATCH, Field.RESUME, self._resumed.index(label) + 1)
        self._asm.mov(_R.R0, 0)
        self._asm.exit()
