"""
Templates of keyed tables: ``tally``, ``push table`` and ``delete``.

The key is built in the state. A value is changed by atomic instructions, so that no handler undoes another one's
change. A maximum is retried until no other handler interferes. ``table_layout`` defines the changes. A table without
keys is memory that is addressed directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dprobes.bpf.bpf_instructions import EXISTS, NO_OVERWRITE, Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import KEY_HEAD, SCRATCH, Field
from dprobes.bpf.lower.templates.flow_templates import invalid_opcode
from dprobes.bpf.lower.templates.world_templates import clear, read_string, throw_fault
from dprobes.bpf.map_layouts import ENTRY_HEAD, HEAD_CELLS, KIND_SHIFT, Entry, MapName, power_of_two, table_map
from dprobes.keyed.table_layout import BIAS, HIST_ZERO
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX, KeyKind, TableKind, operated_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction
    from dprobes.rpn.keyed_tables import Key, Range, Table

__all__ = ["TABLE_TEMPLATES", "retries"]

# The key of a table, built in the state of a handler (``StateLayout.key``) in the format of ``keyed.table_layout``.


_R = Register

_ADDRESS, _READ, _POSITION, _SNAPSHOT = 1, 9, 10, 14
"""
Indices of work words.

From ``_ADDRESS`` on, the words have the addresses of up to 8 strings and byte sequences of keys and of the value. The
others are the number of bytes read of a string, the address of its next byte, and four words for a snapshot.
"""

_POSITION_MASK = power_of_two(STRING_SIZE_MAX + 1) - 1


def pop_keys(w: Writer, keys: Sequence[Key]) -> None:
    """
    Pop the cells of keys and build the key. No register is live after it. Work word 0 is unchanged.

    The last key may be a value that the table keeps; it comes after the key.
    """
    places: list[int] = []
    end = 0
    for key in keys:
        places.append(w.state.key + end)
        end += key.bytes
    parts = list(zip(keys, places, strict=True))
    addresses = [place for key, place in parts if key.kind is KeyKind.BYTES or key.kind.is_string_in_memory]
    words = {place: w.work(_ADDRESS + number) for number, place in enumerate(addresses)}
    _pop_cells(w, parts, words)
    has_strings = any(key.kind.is_string_in_memory for key in keys)
    if has_strings:
        w.open_loop()
    else:
        w.stack.settle()
    for key, place in parts:
        _put_together(w, key, place, words.get(place, 0), in_loop=has_strings)
    if has_strings:
        w.close_loop()


def _pop_cells(w: Writer, parts: Sequence[tuple[Key, int]], words: Mapping[int, int]) -> None:
    """Pop the cells of keys to their places, or, for data in memory, to the words for addresses."""
    asm, word_size = w.asm, w.word_size
    for key, place in reversed(parts):
        for number in range(key.popped(word_size)):
            cell = w.stack.pop_register()
            if place in words:
                asm.store(SCRATCH, words[place], cell)
            else:
                asm.add(_R.R9, SCRATCH, place)
                whole = key.kind in (KeyKind.WORD, KeyKind.SIGNED, KeyKind.ADDRESS)
                if key.kind is KeyKind.SIGNED and not w.wide:
                    asm.alu(Alu.LSH, cell, 32)
                    asm.alu(Alu.ARSH, cell, 32)
                asm.store(_R.R9, word_size * number, cell, Size.DW if whole else Size.of(word_size))
            w.stack.release()


def _put_together(w: Writer, key: Key, place: int, address: int, *, in_loop: bool) -> None:
    """Write the part of the key that is not popped. ``address`` is the field with its address in memory."""
    asm = w.asm
    if key.kind in (KeyKind.STRING, KeyKind.CUT_STRING, KeyKind.BYTES, KeyKind.USER_STACK, KeyKind.KERNEL_STACK):
        clear(w, place, key.bytes)
    match key.kind:
        case KeyKind.STRING | KeyKind.CUT_STRING:
            read_string(w, place, key.size, address, w.work(_READ), w.work(_POSITION), mask=_POSITION_MASK, nul=0)
        case KeyKind.BYTES:
            _read_bytes(w, place, key.size, address, in_loop=in_loop)
        case KeyKind.COMM:
            w.point_to(_R.R1, place)
            w.host.process_name()
        case KeyKind.USER_STACK:
            w.host.pid()
            w.point_to(_R.R1, place)
            asm.store(_R.R1, 0, _R.R0)
            w.point_to(_R.R1, place + 8)
            asm.mov(_R.R2, key.bytes - 8)
            w.host.user_stack(w.state.snapshot, w.work(_SNAPSHOT), w.state.log_mask, place + 8)
        case KeyKind.KERNEL_STACK:
            w.point_to(_R.R1, place)
            asm.mov(_R.R2, key.bytes)
            w.host.kernel_stack()


def _read_bytes(w: Writer, place: int, size: int, address: int, *, in_loop: bool) -> None:
    """Read ``size`` bytes at the address in a field. The zeros after them are already there."""
    fault = w.asm.label()
    w.read_to(place, size, address)
    w.asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: throw_fault(w, size, address, in_loop=in_loop), fault)


# The change of the value of a table's key, and the number that a value shows (``keyed.table_layout``).
#
# Work word 0 holds the number; results that are computed before the look-up of the value go to the words after it. The
# bucket is computed without branches, so that the verifier has one path.


_VALUE, _LEAST, _LARGEST, _BUCKET = 0, 11, 12, 13
"""Indices of work words: the number, the candidates for the least and the largest number, the bucket."""

_GREATEST = {
    TableKind.MIN: ((0, _LEAST),),
    TableKind.MAX: ((0, _LARGEST),),
    TableKind.STATS: ((2, _LEAST), (3, _LARGEST)),
}
"""The cells that keep the greatest number, each with the work word of the candidate."""


def retries(table: Table) -> bool:
    """Return whether updates of a table's values may have to be retried: those that keep a least or greatest number."""
    return table.kind in _GREATEST


def prepare_value(w: Writer, table: Table) -> None:
    """Prepare the number in work word 0 for ``write_value``. Clobbers R0-R5."""
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
    """Replace the number in R1 by the index of its bucket, for buckets by powers of two."""
    asm, sign, count = w.asm, _R.R4, _R.R5
    asm.derive(Alu.ARSH, sign, _R.R1, 63)
    asm.alu(Alu.XOR, _R.R1, sign)
    asm.alu(Alu.SUB, _R.R1, sign)
    asm.mov(count, 0)
    for power in reversed(range(6)):
        # R2 is the number of bits to shift by, if the result is not 0.
        _set_if_not_zero(w, 1 << power)
        asm.alu(Alu.LSH, _R.R2, power)
        asm.alu(Alu.RSH, _R.R1, _R.R2)
        asm.alu(Alu.ADD, count, _R.R2)
    asm.alu(Alu.ADD, count, _R.R1)  # the rest is 0 or 1
    asm.alu(Alu.XOR, count, sign)
    asm.alu(Alu.SUB, count, sign)
    asm.alu(Alu.ADD, count, HIST_ZERO)
    asm.mov(_R.R1, count)


def _set_if_not_zero(w: Writer, shift: int) -> None:
    """Set R2 to 1 if R1 without its low ``shift`` bits is not 0, else to 0. Clobbers R3."""
    asm = w.asm
    asm.derive(Alu.RSH, _R.R2, _R.R1, shift)
    asm.mov(_R.R3, _R.R2)
    asm.neg(_R.R3)
    asm.alu(Alu.OR, _R.R2, _R.R3)
    asm.alu(Alu.RSH, _R.R2, 63)


def _find_step(w: Writer, bounds: Range) -> None:
    """Store the index of the bucket of the number in R1."""
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
    """Update the value at R0; go to ``again`` if another handler has changed it meanwhile. Clobbers R0-R5."""
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
            asm.add(_R.R2, SCRATCH, w.state.key + table.key_size)
            for place in range(0, table.kept_bytes, 8):
                asm.copy_from(_R.R2, place, _R.R5, _offset(table, 0) + place)
        case TableKind.LAST:
            asm.copy_from(SCRATCH, w.work(_VALUE), _R.R5, _offset(table, 0))
        case TableKind.MIN | TableKind.MAX:
            pass  # the greatest number is kept already
        case other:
            assert_never(other)


def _add(w: Writer, offset: int, amount: int | None) -> None:
    """Add a number, or the tallied one, to a cell of the value at R5."""
    if amount is None:
        w.asm.load(_R.R1, SCRATCH, w.work(_VALUE))
    else:
        w.asm.mov(_R.R1, amount)
    w.asm.atomic(Atomic.ADD, _R.R5, offset, _R.R1)


def _count_in_bucket(w: Writer, table: Table) -> None:
    asm, beyond = w.asm, w.asm.label()
    # This test is for the verifier: the bucket always exists.
    asm.jump_if_word(Jump.JGE, SCRATCH, w.work(_BUCKET), table.value_cells, beyond)
    asm.alu(Alu.LSH, _R.R1, 3)
    asm.alu(Alu.ADD, _R.R5, _R.R1)
    asm.count(_R.R5, _offset(table, 0), by=_R.R1)
    asm.place(beyond)


def _keep_greatest(w: Writer, offset: int, word: int, again: Label) -> None:
    asm, kept = w.asm, w.asm.label()
    asm.load(_R.R1, SCRATCH, w.work(word))
    asm.jump_if_word(Jump.JGE, _R.R5, offset, _R.R1, kept, by=_R.R0)
    asm.mov(_R.R2, _R.R0)
    asm.atomic(Atomic.CMPXCHG, _R.R5, offset, _R.R1)
    asm.jump_if(Jump.JEQ, _R.R0, _R.R2, kept)
    w.loops.goto(again)
    asm.place(kept)


def load_shown(w: Writer, table: Table) -> None:
    """Load the number that ``push table`` pushes for the value at R0 to R1. Clobbers R2-R4."""
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
            asm.derive(Alu.ARSH, _R.R3, _R.R1, 63)
            asm.alu(Alu.XOR, _R.R1, _R.R3)
            asm.alu(Alu.SUB, _R.R1, _R.R3)
            asm.alu(Alu.DIV, _R.R1, _R.R4)  # the result is 0 where nothing was counted
            asm.alu(Alu.XOR, _R.R1, _R.R3)
            asm.alu(Alu.SUB, _R.R1, _R.R3)
        case TableKind.HIST | TableKind.LHIST:
            for cell in range(1, table.value_cells):
                asm.load(_R.R2, _R.R0, _offset(table, cell))
                asm.alu(Alu.ADD, _R.R1, _R.R2)
        case TableKind.COUNT | TableKind.SUM | TableKind.STATS | TableKind.LAST:
            pass  # the first cell is the number
        case other:
            assert_never(other)


_COPY = 14
"""The first of the work words for a copy of the stack."""


def _of_table(write: Callable[[Writer, Table, int], None]) -> Template:
    """Return a template for the table whose number is the operand."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        number = int(i.operand)
        assert i.row is not None
        table = operated_table(i.row, i.operand, w.flow.tables)
        if table is None:
            invalid_opcode(w, i._replace(operand=i.row.opcode))
            return
        write(w, table, number)

    return template


def _pop_number(w: Writer, table: Table) -> None:
    """Pop the cells of a tallied number, and store it in work word 0."""
    for cell in range(table.tallied_cells(8 if w.wide else 4)):
        size = Size.DW if w.wide or table.value is None else Size.W
        w.asm.store(SCRATCH, w.work(_VALUE) + 4 * cell, w.stack.pop_register(), size)
        w.stack.release()


def _add_to_table(w: Writer, table: Table, number: int) -> None:
    asm, lost, done = w.asm, w.asm.label(), w.asm.label()
    _pop_number(w, table)
    pop_keys(w, table.keys)
    prepare_value(w, table)
    _point_to_value(w, table, number, lost)
    asm.mov(_R.R5, _R.R0)
    _add(w, _offset(table, 0), None)
    asm.place(done)
    _defer_loss(w, table, number, lost, done)


def _defer_loss(w: Writer, table: Table, number: int, lost: Label, done: Label) -> None:
    """Write the code at ``lost``, which counts a change without room, and goes to ``done``."""
    if not table.keys:
        return

    def count_lost() -> None:
        _count_lost(w, number)
        w.asm.jump(done)

    w.defer(count_lost, lost)


def _tally(w: Writer, table: Table, number: int) -> None:
    asm, lost, done = w.asm, w.asm.label(), w.asm.label()
    if not table.keeps_bytes:
        _pop_number(w, table)
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
    _defer_loss(w, table, number, lost, done)


def _send(w: Writer, table: Table, number: int, kind: Entry) -> None:
    """Put key and value into the ring: the reader unwinds the stack, and adds the value, or removes the key."""
    asm, done = w.asm, w.asm.label()
    entry = w.state.key - KEY_HEAD

    def point_to_entry() -> None:
        asm.add(_R.R2, SCRATCH, entry)

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
        from dprobes.bpf.lower.state.stack_snapshot import write_stack_copy

        write_stack_copy(asm, w.host, entry, w.work(_COPY), None)
        point_to_entry()
    w.host.output()
    asm.jump_if(Jump.JEQ, _R.R0, 0, done)
    _count_lost(w, number)
    asm.place(done)


def _count_lost(w: Writer, number: int) -> None:
    w.asm.load_value(_R.R1, MapName.TABLES_LOST, 8 * number)
    w.asm.count(_R.R1, 0)


def _point_to_value(w: Writer, table: Table, number: int, lost: Label) -> None:
    """Set R0 to the value under the key, and create it if necessary; go to ``lost`` if there is no room."""
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
    asm.jump_if(Jump.JNE, _R.R0, EXISTS, lost, wide=False)
    asm.place(made)
    _call(w, number, Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, _R.R0, 0, lost)
    asm.place(there)


def _call(w: Writer, number: int, helper: Helper) -> None:
    """Call a helper with the map and the key. The caller has set R3 and R4 if the helper takes them."""
    w.asm.ask_map(helper, table_map(number), SCRATCH, w.state.key)


def _point_to_cells(w: Writer, table: Table, number: int) -> None:
    """Set R0 to the memory of a table without keys."""
    asm = w.asm
    if number in w.request.shared_tables:
        asm.load_value(_R.R0, table_map(number))
        return
    w.host.cpu()
    asm.derive(Alu.AND, _R.R1, _R.R0, w.request.tables.cpus - 1)
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
        asm.jump_if_word(Jump.JEQ, _R.R0, 0, 0, nothing)
    load_shown(w, table)
    asm.store(SCRATCH, shown, _R.R1)
    asm.place(nothing)
    for place in reversed(range(0, 8 if table.value is not None else 1, 8 if w.wide else 4)):
        value = w.stack.take()
        asm.load(value, SCRATCH, shown + place, Size.DW if w.wide else Size.W)
        w.stack.push(value)


def _push_kept(w: Writer, table: Table, number: int) -> None:
    """Copy the kept value to the place of the key and push it; push zeros if there is none."""
    asm, nothing, known, place = w.asm, w.asm.label(), w.asm.label(), w.state.key
    pop_keys(w, table.keys)
    head = 0
    if table.keys:
        _call(w, number, Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, nothing)
    else:
        head = 8 * HEAD_CELLS
        _point_to_cells(w, table, number)
    asm.add(_R.R2, SCRATCH, place)
    for offset in range(0, table.kept_bytes, 8):
        asm.copy_from(_R.R0, head + offset, _R.R2, offset)
    if table.keys:
        asm.jump(known)
        asm.place(nothing)
        clear(w, place, table.kept_bytes)
        asm.place(known)
    asm.add(_R.R9, SCRATCH, place)
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


TABLE_TEMPLATES: dict[str, Template] = {
    "tally <table>": _of_table(_tally),
    "push table, <table>": _of_table(_push_table),
    "add table, <table>": _of_table(_add_to_table),
    "delete <table>": _of_table(_delete),
}
