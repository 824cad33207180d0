"""
Templates of keyed tables: ``tally``, ``push table`` and ``delete``.

The key is put together in the state. A value is changed by atomic instructions, so that no handler undoes what another
one does; where the greatest number is kept, that is tried again until nobody was in between. ``keyed.layout`` says what
is changed. A table without keys is memory that is addressed directly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import NO_OVERWRITE, Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import ENTRY_HEAD, HEAD_CELLS, KIND_SHIFT, Entry, MapName, table_map
from dprobes.bpf.lower.rows.flow import invalid_opcode
from dprobes.bpf.lower.state.handlerstate import KEY_HEAD, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.bpf.lower.state.stackcopy import write_stack_copy
from dprobes.bpf.lower.tablekeys import clear, pop_keys
from dprobes.bpf.lower.tablevalues import load_shown, prepare_value, retries, write_value
from dprobes.rpn.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction
    from dprobes.rpn.tables import Table

__all__ = ["TEMPLATES"]

_R = Register

_COPY = 14
"""The first of the work words for a copy of the stack."""

_EXISTS = -17
"""What the kernel answers if a key is there already (-EEXIST)."""


def _of_table(write: Callable[[Writer, Table, int], None]) -> Template:
    """Return a template for the table that the operand numbers."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        number = int(i.operand)
        table = table_of(number, w.flow.tables)
        if table is None:
            assert i.row is not None
            invalid_opcode(w, replace(i, operand=i.row.opcode))
            return
        write(w, table, number)

    return template


def _tally(w: Writer, table: Table, number: int) -> None:
    asm, lost, done = w.asm, w.asm.label(), w.asm.label()
    if not table.keeps_bytes:
        for cell in range(table.tallied_cells(8 if w.wide else 4)):
            size = Size.DW if w.wide or table.value is None else Size.W
            asm.store(SCRATCH, w.work(0) + 4 * cell, w.stack.pop_register(), size)
            w.stack.release()
    pop_keys(w, table.parts if table.keeps_bytes else table.keys)
    if table.has_user_stack:
        _send(w, table, number, Entry.TALLY)
        return
    prepare_value(w, table)
    again = None
    if retries(table):
        w.open_loop()
        again = asm.label()
        w.loops.head(again)
    _point_to_value(w, table, number, lost)
    write_value(w, table, again)
    asm.place(done)
    if again is not None:
        w.close_loop()
    if not table.keys:
        return

    def count_lost() -> None:
        asm.place(lost)
        _count_lost(w, number)
        asm.jump(done)

    w.defer(count_lost)


def _send(w: Writer, table: Table, number: int, kind: Entry) -> None:
    """Put key and value into the ring: the reader follows the stack, and takes the value in, or the key out."""
    asm, done = w.asm, w.asm.label()
    entry = w.state.key - KEY_HEAD

    def point_to_entry() -> None:
        asm.mov(_R.R2, SCRATCH)
        asm.alu(Alu.ADD, _R.R2, entry)

    has_number = kind is Entry.TALLY and table.kind.takes_value and not table.keeps_bytes
    if has_number:
        asm.load(_R.R1, SCRATCH, w.work(0))
        if not w.wide and table.value is None:
            asm.alu(Alu.LSH, _R.R1, 32)
            asm.alu(Alu.ARSH, _R.R1, 32)
    point_to_entry()
    asm.store(_R.R2, 0, kind << KIND_SHIFT, Size.W)
    asm.store(_R.R2, 4, 0, Size.W)
    asm.store(_R.R2, ENTRY_HEAD.size, number, Size.W)
    asm.store(_R.R2, ENTRY_HEAD.size + 8, _R.R1 if has_number else 0)
    asm.load(_R.R1, SCRATCH, Field.NUMBER)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(_R.R2, ENTRY_HEAD.size + 4, _R.R1, Size.W)
    asm.mov(_R.R3, KEY_HEAD + table.key_size + (table.kept_bytes if kind is Entry.TALLY else 0))
    if w.state.stack_copy:
        write_stack_copy(asm, w.host, entry, w.work(_COPY), None)
        point_to_entry()
    w.host.output()
    asm.jump_if(Jump.JEQ, _R.R0, 0, done)
    _count_lost(w, number)
    asm.place(done)


def _count_lost(w: Writer, number: int) -> None:
    w.asm.load_value(_R.R1, MapName.TABLES_LOST, 8 * number)
    w.asm.mov(_R.R2, 1)
    w.asm.atomic(Atomic.ADD, _R.R1, 0, _R.R2)


def _point_to_value(w: Writer, table: Table, number: int, lost: Label) -> None:
    """Let R0 point to the value under the key, which is made if it is not there yet; go to ``lost`` without room."""
    asm = w.asm
    if not table.keys:
        _point_to_cells(w, table, number)
        asm.store(_R.R0, 0, 1)
        return
    there, made = asm.label(), asm.label()
    _call(w, number, Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JNE, _R.R0, 0, there)
    asm.load_value(_R.R3, MapName.ZEROS)
    asm.mov(_R.R4, NO_OVERWRITE)
    _call(w, number, Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JEQ, _R.R0, 0, made)
    asm.jump_if(Jump.JNE, _R.R0, _EXISTS, lost)
    asm.place(made)
    _call(w, number, Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, _R.R0, 0, lost)
    asm.place(there)


def _call(w: Writer, number: int, helper: Helper) -> None:
    """Call a helper with the map and the key; R3 and R4 are the caller's."""
    w.asm.load_map(_R.R1, table_map(number))
    w.asm.mov(_R.R2, SCRATCH)
    w.asm.alu(Alu.ADD, _R.R2, w.state.key)
    w.asm.call(helper)


def _point_to_cells(w: Writer, table: Table, number: int) -> None:
    """Let R0 point to the memory of a table without keys."""
    asm = w.asm
    if number in w.request.shared_tables:
        asm.load_value(_R.R0, table_map(number))
        return
    w.host.cpu()
    asm.mov(_R.R1, _R.R0)
    asm.alu(Alu.AND, _R.R1, w.request.tables.cpus - 1)
    asm.alu(Alu.MUL, _R.R1, 8 * (HEAD_CELLS + table.value_cells))
    asm.load_value(_R.R0, table_map(number))
    asm.alu(Alu.ADD, _R.R0, _R.R1)


def _push_table(w: Writer, table: Table, number: int) -> None:
    if table.keeps_bytes:
        _push_kept(w, table, number)
        return
    asm, shown, nothing = w.asm, w.work(0), w.asm.label()
    pop_keys(w, table.keys)
    asm.store(SCRATCH, shown, 0)
    if table.keys:
        _call(w, number, Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, nothing)
    else:
        _point_to_cells(w, table, number)
        asm.load(_R.R1, _R.R0, 0)
        asm.jump_if(Jump.JEQ, _R.R1, 0, nothing)
    load_shown(w, table)
    asm.store(SCRATCH, shown, _R.R1)
    asm.place(nothing)
    for place in reversed(range(0, 8 if table.value is not None else 1, 8 if w.wide else 4)):
        value = w.stack.take()
        asm.load(value, SCRATCH, shown + place, Size.DW if w.wide else Size.W)
        w.stack.push(value)


def _push_kept(w: Writer, table: Table, number: int) -> None:
    """Push what is kept, which is copied to the place of the key, so that there are zeros where nothing is."""
    asm, nothing, known, place = w.asm, w.asm.label(), w.asm.label(), w.state.key
    pop_keys(w, table.keys)
    head = 0
    if table.keys:
        _call(w, number, Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, nothing)
    else:
        head = 8 * HEAD_CELLS
        _point_to_cells(w, table, number)
    asm.mov(_R.R2, SCRATCH)
    asm.alu(Alu.ADD, _R.R2, place)
    for offset in range(0, table.kept_bytes, 8):
        asm.load(_R.R1, _R.R0, head + offset)
        asm.store(_R.R2, offset, _R.R1)
    if table.keys:
        asm.jump(known)
        asm.place(nothing)
        clear(w, place, table.kept_bytes)
        asm.place(known)
    asm.mov(_R.R9, SCRATCH)
    asm.alu(Alu.ADD, _R.R9, place)
    size = 8 if w.wide else 4
    for offset in reversed(range(0, table.kept_bytes, size)):
        value = w.stack.take()
        asm.load(value, _R.R9, offset, Size.of(size))
        w.stack.push(value)
        w.stack.release()


def _delete(w: Writer, table: Table, number: int) -> None:
    pop_keys(w, table.keys)
    if table.has_user_stack:
        _send(w, table, number, Entry.UNTALLY)
        return
    if table.keys:
        _call(w, number, Helper.MAP_DELETE_ELEM)
        return
    _point_to_cells(w, table, number)
    for cell in range(HEAD_CELLS + table.value_cells):
        w.asm.store(_R.R0, 8 * cell, 0)


TEMPLATES: dict[str, Template] = {
    "tally <table>": _of_table(_tally),
    "push table, <table>": _of_table(_push_table),
    "delete <table>": _of_table(_delete),
}
