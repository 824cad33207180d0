"""
One program for the handlers of many definitions: the attach cookie says whose probepoint was hit.

A program of its own for each definition needs a link of its own as well, and the kernel takes tens of milliseconds to
take a link away. Tail calls would let one program lead to any number of others, but not to those that may sleep. So
handlers are put one behind the other, and a tree of comparisons leads to the one that is meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.insn import CALL
from dprobes.bpf.asm.isa import Alu, CallKind, Helper, Jump, Register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.asm.insn import Insn

__all__ = ["COOKIE", "SHARED_MAX", "can_share", "dispatch"]

COOKIE = -104
"""Where on the stack a handler finds the attach cookie (``Request.shared``), below all else that is put there."""

SHARED_MAX = 8_000
"""
Instructions that handlers in one program may have together.

What the kernel puts in the place of single instructions moves all that is behind them, so that the time grows with the
square of the size; and at four times as many its own jumps become too long (16 bits).
"""

_CONTEXT = Register.R6
_R = Register


def can_share(assembled: Assembled) -> bool:
    """Return whether a handler can stand in a program with others: its frame is that of the program."""
    return not any((insn.opcode, insn.src, insn.imm) == (CALL, CallKind.HELPER, Helper.LOOP) for insn in assembled.code)


def dispatch(handlers: Sequence[tuple[int, Assembled]], mask: int) -> Assembled:
    """
    Return one program for handlers, each with the number of its probepoint, in ascending order.

    The handlers were lowered as ``Request.shared``. The number is what ``mask`` leaves of the attach cookie.
    """
    asm = Assembler()
    asm.mov(_CONTEXT, _R.R1)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.store(_R.R10, COOKIE, _R.R0)
    asm.mov(_R.R1, _CONTEXT)
    asm.alu(Alu.AND, _R.R0, mask)
    leaves = [asm.label() for _ in handlers]
    _choose(asm, [number for number, _ in handlers], leaves)
    behind: dict[tuple[Insn, ...], tuple[Assembled, list[Label]]] = {}
    for leaf, (_, assembled) in zip(leaves, handlers, strict=True):
        asm.place(leaf)
        functions = assembled.code[assembled.end_of_main :]
        if functions not in behind:
            behind[functions] = assembled, [asm.label() for _ in assembled.functions[1:]]
        asm.include(assembled, behind[functions][1])
    for assembled, labels in behind.values():
        asm.include_functions(assembled, labels)
    return asm.assemble()


def _choose(asm: Assembler, numbers: Sequence[int], leaves: Sequence[Label]) -> None:
    """Jump to the leaf whose number is in R0."""
    if len(leaves) == 1:
        asm.jump(leaves[0])
        return
    middle, upper = len(leaves) // 2, asm.label()
    asm.jump_if(Jump.JGE, _R.R0, numbers[middle], upper)
    _choose(asm, numbers[:middle], leaves[:middle])
    asm.place(upper)
    _choose(asm, numbers[middle:], leaves[middle:])
