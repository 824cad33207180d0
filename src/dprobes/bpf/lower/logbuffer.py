"""
What the logging templates share: LP and PLP, overflow, prefixes.

The rules are those of ``vm.rules_log``. A template says ``begin`` before it logs, and ``end`` when it has succeeded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.state.handlerstate import LOG, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, ExceptionCode, Token

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.state.stack import Operand
    from dprobes.bpf.lower.writer import Writer

__all__ = [
    "advance",
    "append",
    "begin",
    "check_prefix",
    "end",
    "move_back",
    "move_to",
    "open_again",
    "overflow",
    "overflow_if",
    "room",
    "write_prefix",
]

_R = Register


def begin(w: Writer) -> None:
    """Set PLP to LP; takes R1."""
    if w.flow.uses("push plp"):
        w.asm.load(_R.R1, SCRATCH, Field.LP)
        w.asm.store(SCRATCH, Field.PLP, _R.R1)


end = begin
"""At the end of an instruction that succeeded the same is done with the new LP."""


def overflow_if(w: Writer, condition: Jump, register: Register, operand: Operand, ignored: Label) -> None:
    """Raise LOG_OVERFLOW under a condition; if that is ignored, close the log and go to ``ignored``."""
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        full = w.asm.label()

        def close() -> None:
            w.asm.place(full)
            _close(w)
            w.asm.jump(ignored)

        w.asm.jump_if(condition, register, operand, full)
        w.defer(close)
    else:
        w.throw_if(condition, register, operand, ExceptionCode.LOG_OVERFLOW, w.point.logmax, wide=True)


def overflow(w: Writer) -> None:
    """Raise LOG_OVERFLOW; if that is ignored, close the log."""
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        _close(w)
    else:
        w.throw(ExceptionCode.LOG_OVERFLOW, w.point.logmax)


def _close(w: Writer) -> None:
    """Let nothing more be logged (``Machine.close_log``); takes R1."""
    closed = w.asm.label()
    w.asm.load(_R.R1, SCRATCH, Field.CUT_AT)
    w.asm.jump_if(Jump.JNE, _R.R1, 0, closed)
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    w.asm.alu(Alu.ADD, _R.R1, 1)
    w.asm.store(SCRATCH, Field.CUT_AT, _R.R1)
    w.asm.store(SCRATCH, Field.LP, w.point.logmax)
    w.asm.place(closed)


def open_again(w: Writer) -> None:
    """Let LP be where the log ends, if it is closed; takes R1."""
    if not w.may_cut:
        return
    is_open = w.asm.label()
    w.asm.load(_R.R1, SCRATCH, Field.CUT_AT)
    w.asm.jump_if(Jump.JEQ, _R.R1, 0, is_open)
    w.asm.alu(Alu.SUB, _R.R1, 1)
    w.asm.store(SCRATCH, Field.LP, _R.R1)
    w.asm.store(SCRATCH, Field.CUT_AT, 0)
    w.asm.place(is_open)


def room(w: Writer, register: Register, size: int, prefix: int = 0) -> None:
    """Load how many items of ``size`` bytes fit into the log buffer behind a prefix, for which there is room."""
    w.asm.load(_R.R9, SCRATCH, Field.LP)
    w.asm.mov(register, w.point.logmax - prefix)
    w.asm.alu(Alu.SUB, register, _R.R9)
    if size > 1:
        w.asm.alu(Alu.RSH, register, size.bit_length() - 1)


def append(w: Writer, value: Register, size: int) -> None:
    """Write a value at LP and advance it; takes R1."""
    asm = w.asm
    asm.load(_R.R1, SCRATCH, Field.LP)
    w.pointer(_R.R1, 0, w.state.log_mask)
    asm.store(_R.R1, LOG, value, Size.of(size))
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.alu(Alu.ADD, _R.R1, size)
    asm.store(SCRATCH, Field.LP, _R.R1)


def write_prefix(w: Writer, token: Token, length: int) -> None:
    """Write a token and the 16-bit length that a field holds at LP, and advance it; takes R1 and R2."""
    asm = w.asm
    asm.load(_R.R2, SCRATCH, length)
    asm.load(_R.R1, SCRATCH, Field.LP)
    w.pointer(_R.R1, 0, w.state.log_mask)
    asm.store(_R.R1, LOG, int(token), Size.B)
    asm.store(_R.R1, LOG + 1, _R.R2, Size.H)
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.alu(Alu.ADD, _R.R1, ITEM_PREFIX_SIZE)
    asm.store(SCRATCH, Field.LP, _R.R1)


def check_prefix(w: Writer, ignored: Label) -> None:
    """Write that there is an overflow if not even a prefix fits; takes R1."""
    if w.point.logmax < ITEM_PREFIX_SIZE:
        if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
            _close(w)
            w.asm.jump(ignored)
            return
        w.asm.mov(_R.R1, 1)
        w.throw_if(Jump.JNE, _R.R1, 0, ExceptionCode.LOG_OVERFLOW, w.point.logmax, wide=True)
        return
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    overflow_if(w, Jump.JGT, _R.R1, w.point.logmax - ITEM_PREFIX_SIZE, ignored)


def advance(w: Writer, field: int) -> None:
    """Add what a field holds to LP; takes R1 and R2."""
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    w.asm.load(_R.R2, SCRATCH, field)
    w.asm.alu(Alu.ADD, _R.R1, _R.R2)
    w.asm.store(SCRATCH, Field.LP, _R.R1)


# A position that a handler moves: ``highest`` is a field that says up to where the buffer is of this hit


def move_back(w: Writer, position: Field, highest: Field) -> None:
    """Note how far a position has come, before it is moved; takes R1 and R2."""
    asm, known = w.asm, w.asm.label()
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, highest)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, known)
    asm.store(SCRATCH, highest, _R.R1)
    asm.place(known)


def move_to(w: Writer, target: int, position: Field, highest: Field, area: int, mask: int) -> None:
    """
    Move a position of the buffer at ``area`` to where a field says, and clear what nothing of this hit lies in.

    Takes R0-R5; nothing of the stack is in registers.
    """
    asm, length, done = w.asm, w.work(1), w.asm.label()
    move_back(w, position, highest)
    asm.load(_R.R1, SCRATCH, target)
    asm.store(SCRATCH, position, _R.R1)
    asm.load(_R.R2, SCRATCH, highest)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, done)
    asm.alu(Alu.SUB, _R.R1, _R.R2)
    asm.store(SCRATCH, length, _R.R1)
    asm.load(_R.R1, SCRATCH, highest)
    w.pointer(_R.R1, area, mask)
    asm.load(_R.R2, SCRATCH, length)
    asm.alu(Alu.AND, _R.R2, mask)
    w.host.clear_memory()
    asm.load(_R.R1, SCRATCH, target)
    asm.store(SCRATCH, highest, _R.R1)
    asm.place(done)
