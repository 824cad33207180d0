"""
What a number does to the value of a table's key, and the number that a value shows (``keyed.layout``).

Work word 0 holds the number; what is made of it before the value is looked up comes to the words behind it. The
buckets are found without branches, so that there is one path for the verifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Jump, Register
from dprobes.bpf.layout import HEAD_CELLS
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.keyed.layout import BIAS, HIST_ZERO
from dprobes.rpn.tables import TableKind

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Writer
    from dprobes.rpn.tables import Range, Table

__all__ = ["load_shown", "prepare_value", "retries", "write_value"]

_R = Register

_VALUE, _LEAST, _LARGEST, _BUCKET = 0, 11, 12, 13
"""The words of work: the number, the numbers of which the greater one wins, the bucket."""

_GREATEST = {
    TableKind.MIN: ((0, _LEAST),),
    TableKind.MAX: ((0, _LARGEST),),
    TableKind.STATS: ((2, _LEAST), (3, _LARGEST)),
}
"""The cells that keep the greatest number, with the word that it is in."""


def retries(table: Table) -> bool:
    """Return whether a change may have to be tried again."""
    return table.kind in _GREATEST


def prepare_value(w: Writer, table: Table) -> None:
    """Make of the number in work word 0 what ``write_value`` takes. Takes R0-R5."""
    asm = w.asm
    if not table.kind.takes_value or table.keeps_bytes:
        return
    asm.load(_R.R1, SCRATCH, w.work(_VALUE))
    if not w.wide and table.value is None:
        asm.alu(Alu.LSH, _R.R1, 32)
        asm.alu(Alu.ARSH, _R.R1, 32)
        asm.store(SCRATCH, w.work(_VALUE), _R.R1)
    if retries(table):
        asm.mov(_R.R2, BIAS)
        asm.alu(Alu.XOR, _R.R1, _R.R2)
        asm.store(SCRATCH, w.work(_LARGEST), _R.R1)
        asm.alu(Alu.XOR, _R.R1, -1)
        asm.store(SCRATCH, w.work(_LEAST), _R.R1)
    elif table.kind is TableKind.HIST:
        _find_power(w)
        asm.store(SCRATCH, w.work(_BUCKET), _R.R1)
    elif table.kind is TableKind.LHIST:
        assert table.range is not None
        _find_step(w, table.range)


def _find_power(w: Writer) -> None:
    """Turn the number in R1 into that of its bucket by powers of two."""
    asm, sign, count = w.asm, _R.R4, _R.R5
    asm.mov(sign, _R.R1)
    asm.alu(Alu.ARSH, sign, 63)
    asm.alu(Alu.XOR, _R.R1, sign)
    asm.alu(Alu.SUB, _R.R1, sign)
    asm.mov(count, 0)
    for power in reversed(range(6)):
        # R2 is the number of bits to shift by, if anything is left then.
        _set_if_not_zero(w, 1 << power)
        asm.alu(Alu.LSH, _R.R2, power)
        asm.alu(Alu.RSH, _R.R1, _R.R2)
        asm.alu(Alu.ADD, count, _R.R2)
    asm.alu(Alu.ADD, count, _R.R1)  # what is left is 0 or 1
    asm.alu(Alu.XOR, count, sign)
    asm.alu(Alu.SUB, count, sign)
    asm.alu(Alu.ADD, count, HIST_ZERO)
    asm.mov(_R.R1, count)


def _set_if_not_zero(w: Writer, shift: int) -> None:
    """Set R2 to 1 if R1 is not 0 without its low bits, else to 0; takes R3."""
    asm = w.asm
    asm.mov(_R.R2, _R.R1)
    asm.alu(Alu.RSH, _R.R2, shift)
    asm.mov(_R.R3, _R.R2)
    asm.neg(_R.R3)
    asm.alu(Alu.OR, _R.R2, _R.R3)
    asm.alu(Alu.RSH, _R.R2, 63)


def _find_step(w: Writer, bounds: Range) -> None:
    """Store the number of the bucket of the number in R1."""
    asm, known, below, above = w.asm, w.asm.label(), w.asm.label(), w.asm.label()
    asm.mov(_R.R2, bounds.low & (1 << 64) - 1)
    asm.jump_if(Jump.JSLT, _R.R1, _R.R2, below)
    asm.mov(_R.R3, bounds.high & (1 << 64) - 1)
    asm.jump_if(Jump.JSGE, _R.R1, _R.R3, above)
    asm.alu(Alu.SUB, _R.R1, _R.R2)
    asm.mov(_R.R2, bounds.step)
    asm.alu(Alu.DIV, _R.R1, _R.R2)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, w.work(_BUCKET), _R.R1)
    asm.jump(known)
    asm.place(below)
    asm.store(SCRATCH, w.work(_BUCKET), 0)
    asm.jump(known)
    asm.place(above)
    asm.store(SCRATCH, w.work(_BUCKET), 1 + bounds.buckets)
    asm.place(known)


def _offset(table: Table, cell: int) -> int:
    return 8 * (cell if table.keys else HEAD_CELLS + cell)


def write_value(w: Writer, table: Table, again: Label | None) -> None:
    """Change the value that R0 points to; go to ``again`` if somebody else has changed it meanwhile. Takes R0-R5."""
    asm = w.asm
    asm.mov(_R.R5, _R.R0)
    for cell, word in _GREATEST.get(table.kind, ()):
        assert again is not None
        _keep_greatest(w, _offset(table, cell), word, again)
    match table.kind:
        case TableKind.COUNT:
            _add(w, _offset(table, 0), 1)
        case TableKind.SUM:
            _add(w, _offset(table, 0), None)
        case TableKind.AVG | TableKind.STATS:
            _add(w, _offset(table, 0), 1)
            _add(w, _offset(table, 1), None)
        case TableKind.HIST | TableKind.LHIST:
            _count_in_bucket(w, table)
        case TableKind.LAST if table.keeps_bytes:
            asm.mov(_R.R2, SCRATCH)
            asm.alu(Alu.ADD, _R.R2, w.state.key + table.key_size)
            for place in range(0, table.kept_bytes, 8):
                asm.load(_R.R1, _R.R2, place)
                asm.store(_R.R5, _offset(table, 0) + place, _R.R1)
        case TableKind.LAST:
            asm.load(_R.R1, SCRATCH, w.work(_VALUE))
            asm.store(_R.R5, _offset(table, 0), _R.R1)


def _add(w: Writer, offset: int, amount: int | None) -> None:
    """Add a number, or the one that was tallied, to a cell of the value that R5 points to."""
    if amount is None:
        w.asm.load(_R.R1, SCRATCH, w.work(_VALUE))
    else:
        w.asm.mov(_R.R1, amount)
    w.asm.atomic(Atomic.ADD, _R.R5, offset, _R.R1)


def _count_in_bucket(w: Writer, table: Table) -> None:
    asm, beyond = w.asm, w.asm.label()
    asm.load(_R.R1, SCRATCH, w.work(_BUCKET))
    asm.jump_if(Jump.JGE, _R.R1, table.value_cells, beyond)  # for the verifier: there are no other numbers
    asm.alu(Alu.LSH, _R.R1, 3)
    asm.alu(Alu.ADD, _R.R5, _R.R1)
    asm.mov(_R.R1, 1)
    asm.atomic(Atomic.ADD, _R.R5, _offset(table, 0), _R.R1)
    asm.place(beyond)


def _keep_greatest(w: Writer, offset: int, word: int, again: Label) -> None:
    asm, kept = w.asm, w.asm.label()
    asm.load(_R.R1, SCRATCH, w.work(word))
    asm.load(_R.R0, _R.R5, offset)
    asm.jump_if(Jump.JGE, _R.R0, _R.R1, kept)
    asm.mov(_R.R2, _R.R0)
    asm.atomic(Atomic.CMPXCHG, _R.R5, offset, _R.R1)
    asm.jump_if(Jump.JEQ, _R.R0, _R.R2, kept)
    w.loops.goto(again)
    asm.place(kept)


def load_shown(w: Writer, table: Table) -> None:
    """Load the number that a value shows, which R0 points to, to R1. Takes R2-R4."""
    asm = w.asm
    asm.load(_R.R1, _R.R0, _offset(table, 0))
    match table.kind:
        case TableKind.MIN | TableKind.MAX:
            asm.mov(_R.R2, BIAS)
            asm.alu(Alu.XOR, _R.R1, _R.R2)
            if table.kind is TableKind.MIN:
                asm.alu(Alu.XOR, _R.R1, -1)
        case TableKind.AVG:
            asm.mov(_R.R4, _R.R1)
            asm.load(_R.R1, _R.R0, _offset(table, 1))
            asm.mov(_R.R3, _R.R1)
            asm.alu(Alu.ARSH, _R.R3, 63)
            asm.alu(Alu.XOR, _R.R1, _R.R3)
            asm.alu(Alu.SUB, _R.R1, _R.R3)
            asm.alu(Alu.DIV, _R.R1, _R.R4)  # which gives 0 where nothing was counted
            asm.alu(Alu.XOR, _R.R1, _R.R3)
            asm.alu(Alu.SUB, _R.R1, _R.R3)
        case TableKind.HIST | TableKind.LHIST:
            for cell in range(1, table.value_cells):
                asm.load(_R.R2, _R.R0, _offset(table, cell))
                asm.alu(Alu.ADD, _R.R1, _R.R2)
