"""Templates that log cells, and those that change codes and LP."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.logbuffer import (
    append,
    begin,
    check_prefix,
    end,
    move_to,
    open_again,
    overflow,
    overflow_if,
    room,
    write_prefix,
)
from dprobes.bpf.lower.state.handlerstate import LOG, Field
from dprobes.bpf.lower.state.stack import SCRATCH, store_number
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, ExceptionCode, Token

if TYPE_CHECKING:
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_R = Register
_UNROLLED = 16
_REACH = (1 << 15) - 64
"""How far an address in the state may be from its start for an instruction to hold it."""


# Cells


def _cells(width: int) -> Template:
    """Return the template of ``log <count>`` (width 0: the word) and of ``log b|w|d, <count>``."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        count, size = int(i.operand), width or w.word_size
        if w.lp is not None and count <= _UNROLLED:
            behind = w.lp + count * size
            if behind <= w.point.logmax and LOG + behind < _REACH:
                _to_known_place(w, w.lp, count, size)
                return
        w.lp = None
        w.open_loop()
        begin(w)
        if count <= _UNROLLED and count * size <= w.point.logmax:
            _in_a_row(w, count, size)
        else:
            _in_a_loop(w, count, size)

    return template


def _to_known_place(w: Writer, lp: int, count: int, size: int) -> None:
    asm = w.asm
    if w.flow.uses("push plp"):
        asm.store(SCRATCH, Field.PLP, lp + count * size)
    for n in range(count):
        value, place = w.stack.peek(n), LOG + lp + n * size
        if isinstance(value, Register):
            asm.store(SCRATCH, place, value, Size.of(size))
        elif size == 8:
            store_number(asm, SCRATCH, place, value)
        else:
            low = value & ((1 << 8 * size) - 1)
            asm.store(SCRATCH, place, low - (1 << 32) if low >> 31 else low, Size.of(size))
        w.stack.release()
    w.stack.drop(count)
    w.lp = lp + count * size
    asm.store(SCRATCH, Field.LP, w.lp)


def _in_a_row(w: Writer, count: int, size: int) -> None:
    asm, over, done = w.asm, w.asm.label(), w.asm.label()
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.jump_if(Jump.JGT, _R.R1, w.point.logmax - count * size, over)

    def what_fits() -> None:
        asm.place(over)
        _in_a_loop(w, count, size, is_over=True)
        asm.jump(done)

    w.defer(what_fits)
    w.pointer(_R.R1, 0, w.state.log_mask)
    for n in range(count):
        offset = w.stack.address(_R.R0, w.stack.top + n)
        asm.load(_R.R2, w.stack.base(_R.R0), offset)
        asm.store(_R.R1, LOG + n * size, _R.R2, Size.of(size))
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.alu(Alu.ADD, _R.R1, count * size)
    asm.store(SCRATCH, Field.LP, _R.R1)
    w.stack.drop(count)
    end(w)
    asm.place(done)


def _in_a_loop(w: Writer, count: int, size: int, *, is_over: bool = False) -> None:
    """Log as many of ``count`` cells as fit; TSP is in its field, if it is not known."""
    asm, kept, fits, done = w.asm, w.work(2), w.asm.label(), w.asm.label()
    asm.store(SCRATCH, kept, count)
    room(w, _R.R1, size)
    asm.jump_if(Jump.JGE, _R.R1, count, fits)
    asm.store(SCRATCH, kept, _R.R1)
    asm.place(fits)
    _store_position(w)
    _copy_cells(w, size, kept)
    w.close_loop()
    w.stack.drop(count)
    asm.load(_R.R1, SCRATCH, kept)
    if is_over:
        overflow(w)
    else:
        overflow_if(w, Jump.JNE, _R.R1, count, done)
        end(w)
        asm.place(done)


def _store_position(w: Writer) -> None:
    """Put TSP into work word 1."""
    if w.stack.tsp is not None:
        w.asm.store(SCRATCH, w.work(1), w.stack.tsp + w.stack.top)
    else:
        w.asm.load(_R.R1, SCRATCH, Field.TSP)
        w.asm.store(SCRATCH, w.work(1), _R.R1)


def _copy_cells(w: Writer, size: int, kept: int) -> None:
    """Write a loop that logs so many cells as a field says, from the position in work word 1 on; they fit."""
    asm, rest, position, head, done = w.asm, w.work(0), w.work(1), w.asm.label(), w.asm.label()
    asm.load(_R.R1, SCRATCH, kept)
    asm.store(SCRATCH, rest, _R.R1)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, rest)
    asm.jump_if(Jump.JEQ, _R.R1, 0, done)
    asm.alu(Alu.SUB, _R.R1, 1)
    asm.store(SCRATCH, rest, _R.R1)
    asm.load(_R.R2, SCRATCH, position)
    asm.mov(_R.R3, _R.R2)
    asm.alu(Alu.ADD, _R.R3, 1)
    asm.store(SCRATCH, position, _R.R3)
    w.cell(_R.R2)
    asm.load(_R.R2, _R.R2, 0)
    append(w, _R.R2, size)
    w.loops.goto(head)
    asm.place(done)


def _popped_count(w: Writer, i: EncodedInstruction) -> None:
    asm, count, kept = w.asm, w.work(3), w.work(2)
    done, fits = asm.label(), asm.label()
    w.lp = None
    asm.store(SCRATCH, count, w.stack.pop_register())
    w.stack.settle()
    # TSP moves on by the count whatever happens; the cells are logged from where it was.
    tsp = w.stack.tsp_value()
    position = w.stack.in_register(tsp)
    asm.store(SCRATCH, w.work(1), position)
    added = w.field(count)
    asm.alu(Alu.ADD, position, added)
    asm.store(SCRATCH, Field.TSP, position)
    w.reload_tsp()
    begin(w)
    check_prefix(w, done)
    asm.load(_R.R1, SCRATCH, count)
    asm.store(SCRATCH, kept, _R.R1)
    room(w, _R.R2, w.word_size, ITEM_PREFIX_SIZE)
    asm.jump_if(Jump.JGE, _R.R2, _R.R1, fits)
    asm.store(SCRATCH, kept, _R.R2)
    asm.place(fits)
    write_prefix(w, Token.STACK_COUNT, kept)
    _copy_cells(w, w.word_size, kept)
    w.reload_tsp()
    asm.load(_R.R1, SCRATCH, kept)
    asm.load(_R.R2, SCRATCH, count)
    overflow_if(w, Jump.JNE, _R.R1, _R.R2, done)
    end(w)
    asm.place(done)
    w.reload_tsp()


# Codes and positions


def _set(field: Field) -> tuple[Template, Template]:
    def immediate(w: Writer, i: EncodedInstruction) -> None:
        w.asm.store(SCRATCH, field, int(i.operand))

    def popped(w: Writer, i: EncodedInstruction) -> None:
        value = w.stack.pop_register()
        w.asm.alu(Alu.AND, value, 0xFFFF)
        w.asm.store(SCRATCH, field, value)

    return immediate, popped


def _push_field(field: Field) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        w.stack.push(w.field(field))

    return template


def _pop_lp(w: Writer, i: EncodedInstruction) -> None:
    w.lp = None
    target, done = w.work(0), w.asm.label()
    w.asm.store(SCRATCH, target, w.stack.pop_register())
    w.stack.settle()
    w.asm.load(_R.R1, SCRATCH, target)
    w.asm.mov(_R.R9, w.point.logmax)
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        w.asm.jump_if(Jump.JGT, _R.R1, _R.R9, done)
    else:
        overflow_if(w, Jump.JGT, _R.R1, _R.R9, done)
    open_again(w)
    move_to(w, target, Field.LP, Field.LOGGED, LOG, w.state.log_mask)
    w.asm.place(done)


_SETMAJ, _SETMIN = _set(Field.MAJOR), _set(Field.MINOR)

TEMPLATES: dict[str, Template] = {
    "setmin <minor>": _SETMIN[0],
    "setmin": _SETMIN[1],
    "setmaj <major>": _SETMAJ[0],
    "setmaj": _SETMAJ[1],
    "log b, <count>": _cells(1),
    "log w, <count>": _cells(2),
    "log d, <count>": _cells(4),
    "log <count>": _cells(0),
    "log": _popped_count,
    "push lp": _push_field(Field.LP),
    "push plp": _push_field(Field.PLP),
    "pop lp": _pop_lp,
}
