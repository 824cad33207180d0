"""
Binary form of tables' contents, for trace files and for clients of the manager.

::

    u32 count of tables; for each of them:
        u32 size of the text of the statement | that text, as after ``table =``
        u64 lost | u32 rows
        for each row: the key | the value, u64 each (``table_layout``)

Numbers are little-endian, and so are the words of keys.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.keyed.table_layout import TableContents, TableRow
from dprobes.rpn.keyed_tables import Key, Range, Table, TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["decode_tables", "encode_tables", "parse_statement"]

_COUNT = struct.Struct("<I")
_HEAD = struct.Struct("<QI")

_NUMBER = r"-?[0-9]{1,20}"
_STATEMENT = re.compile(
    rf"(?P<name>[a-z_][a-z0-9_]*), (?P<kind>[a-z]+)(\((?P<range>{_NUMBER}, {_NUMBER}, {_NUMBER})\))?"
    r"(?P<keys>(, [a-z]+(\[[0-9]{1,3}\])?)*?)(, room = (?P<room>[0-9]{1,7}))?(, unit = (?P<unit>[a-z]+))?"
    r"(, value = (?P<value>[a-z]+(\[[0-9]{1,3}\])?))?"
)


def encode_tables(contents: Sequence[TableContents]) -> bytes:
    """Return keyed tables with their rows in the binary form of trace files."""
    parts = [_COUNT.pack(len(contents))]
    for each in contents:
        text = str(each.table).encode()
        parts += [_COUNT.pack(len(text)), text, _HEAD.pack(each.lost, len(each.rows))]
        cells = struct.Struct(f"<{each.table.value_cells}Q")
        for row in each.rows:
            parts += [_swapped(row.key, each.table.keys), _swapped_value(cells.pack(*row.cells), each.table)]
    return b"".join(parts)


def decode_tables(data: bytes) -> tuple[TableContents, ...]:
    """Return the tables in their binary form; raise ``FormatError`` if the bytes are invalid."""
    try:
        return _decoded(data)
    except (struct.error, ValueError, KeyError) as error:
        raise FormatError(f"the bytes are not keyed tables: {error}") from None


def _decoded(data: bytes) -> tuple[TableContents, ...]:
    (count,), position = _COUNT.unpack_from(data), _COUNT.size
    found = []
    for _ in range(count):
        (size,), position = _COUNT.unpack_from(data, position), position + _COUNT.size
        table = parse_statement(data[position : position + size].decode())
        position += size
        (lost, rows), position = _HEAD.unpack_from(data, position), position + _HEAD.size
        cells = struct.Struct(f"<{table.value_cells}Q")
        size = table.key_size + cells.size
        if rows * size > len(data) - position:
            raise ValueError(f"{rows} rows of {size} bytes are announced, and {len(data) - position} bytes are left")
        kept = []
        for start in range(position, position + rows * size, size):
            end = start + table.key_size
            value = _swapped_value(data[end : start + size], table)
            kept.append(TableRow(_swapped(data[start:end], table.keys), cells.unpack(value)))
        position += rows * size
        found.append(TableContents(table, tuple(kept), lost))
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes are left")
    return tuple(found)


def _swapped_value(value: bytes, table: Table) -> bytes:
    """Return the cells of a value, byte-swapped on a big-endian machine if they contain a string in memory order."""
    if sys.byteorder == "little" or table.value is None or not table.value.kind.is_in_memory_order:
        return value
    return b"".join(value[n : n + 8][::-1] for n in range(0, len(value), 8))


def _swapped(key: bytes, keys: Sequence[Key]) -> bytes:
    """Return a key with its words byte-swapped on a big-endian machine."""
    if sys.byteorder == "little":
        return key
    parts, position = [], 0
    for each in keys:
        part = key[position : position + each.bytes]
        position += each.bytes
        if not each.kind.is_in_memory_order:
            part = b"".join(part[n : n + 8][::-1] for n in range(0, len(part), 8))
        parts.append(part)
    return b"".join(parts)


def parse_statement(text: str) -> Table:
    """Return the table that a statement declares (its ``str``); raise ``ValueError`` if the statement is invalid."""
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text[:40]}' describes no table")
    keys = [Key.parsed(word) for word in match["keys"].split(", ")[1:]]
    value = Key.parsed(match["value"]) if match["value"] is not None else None
    bounds = Range(*map(int, match["range"].split(", "))) if match["range"] is not None else None
    kind_of_table = TableKind(match["kind"])
    if (bounds is not None) != (kind_of_table is TableKind.LHIST) or (bounds is not None and bounds.step < 1):
        raise ValueError(f"'{text[:40]}' describes no table")
    if value is not None and not value.can_be_kept_by(kind_of_table):
        raise ValueError(f"'{text[:40]}' describes no table")
    table = Table(match["name"], kind_of_table, tuple(keys), bounds, unit=Unit(match["unit"] or ""), value=value)
    if match["room"] is not None:
        from dataclasses import replace

        table = replace(table, room=int(match["room"]))
    return table
