"""
The keyed tables of a program (``table =``), as the value of that statement in a file.

::

    u32 how many; for each of them: name, kind (strings), u32 room, unit (string), u32 span
        behind the kind stands what is kept if that is no word: "last str[64]"
        u8 whether there is a range; if so, low, high and step as wide numbers
        u32 how many keys; for each of them: kind (string), u32 size
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, TypeVar

from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.tables import (
    BUCKETS_MAX,
    KEYS_MAX,
    ROOM_MAX,
    TABLES_MAX,
    Key,
    KeyKind,
    Range,
    Table,
    TableKind,
    Unit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.fieldcodec import Reader, Writer
    from dprobes.ppdf.sources import Spans
    from dprobes.source import Span

__all__ = ["read_tables", "write_tables"]

_NAME = lazy_pattern(r"[a-z_][a-z0-9_]*", re.ASCII)
_TABLE_SIZE, _KEY_SIZE = 25, 8

WordT = TypeVar("WordT", bound=enum.Enum)


def write_tables(out: Writer, tables: Sequence[Table], spans: Spans) -> None:
    """Write the tables of a program."""
    out.u32(len(tables))
    for table in tables:
        out.string(table.name)
        out.string(table.kind.value if table.value is None else f"{table.kind.value} {table.value}")
        out.u32(table.room)
        out.string(table.unit.value)
        out.u32(spans.number(table.span))
        out.u8(table.range is not None)
        if table.range is not None:
            for number in (table.range.low, table.range.high, table.range.step):
                out.wide(number)
        out.u32(len(table.keys))
        for key in table.keys:
            out.string(key.kind.value)
            out.u32(key.size)


def read_tables(reader: Reader, spans: Sequence[Span]) -> tuple[Table, ...]:
    """Return the tables of a program; each is one that a statement can say."""
    tables: dict[str, Table] = {}
    for _ in range(reader.count(_TABLE_SIZE, "tables", TABLES_MAX)):
        at = reader.offset
        table = _read_table(reader, spans)
        if table.name in tables or not _NAME.fullmatch(table.name):
            reader.fail(f"expected the name of a table that is not there yet, found '{table.name}'", at)
        tables[table.name] = table
    return tuple(tables.values())


def _read_table(reader: Reader, spans: Sequence[Span]) -> Table:
    name = reader.string("the name of a table")
    kind, value = _read_kind(reader)
    at = reader.offset
    room = reader.u32("the room of a table")
    if not 1 <= room <= ROOM_MAX:
        reader.fail(f"expected a table with room for 1 to {ROOM_MAX} keys, found {room}", at)
    unit = _word(reader, Unit, "the unit of a table")
    number = reader.below_or_none(len(spans), "the number of a span")
    at = reader.offset
    found = None
    if reader.flag("whether a table has a range"):
        found = Range(reader.wide("a bound"), reader.wide("a bound"), reader.wide("a step"))
        if found.step < 1 or not found.low < found.high or found.buckets > BUCKETS_MAX:
            reader.fail(f"expected a range of at most {BUCKETS_MAX} buckets for a table, found another one", at)
    if (found is None) == (kind is TableKind.LHIST):
        reader.fail(f"expected a range for 'lhist' only, found kind '{kind.value}'", at)
    keys = tuple(_read_key(reader) for _ in range(reader.count(_KEY_SIZE, "keys", KEYS_MAX)))
    return Table(name, kind, keys, found, room, unit, None if number is None else spans[number], value)


def _read_kind(reader: Reader) -> tuple[TableKind, Key | None]:
    at = reader.offset
    text = reader.string("the kind of a table")
    word, blank, kept = text.partition(" ")
    kind = _known(reader, TableKind, word, "the kind of a table", at)
    if not blank:
        return kind, None
    try:
        value = Key.parsed(kept)
    except ValueError:
        value = None
    if value is None or not value.can_be_kept_by(kind):
        reader.fail(f"expected a kind of value that '{word}' keeps, found '{kept}'", at)
    return kind, value


def _read_key(reader: Reader) -> Key:
    kind = _word(reader, KeyKind, "the kind of a key")
    at, largest = reader.offset, kind.sizes[1] if kind.sizes is not None else 0
    size = reader.u32("the size of a key")
    if not (kind.sizes is not None) <= size <= largest:
        reader.fail(f"expected a size up to {largest} for the key '{kind.value}', found {size}", at)
    return Key(kind, size)


def _word(reader: Reader, words: type[WordT], what: str) -> WordT:
    at = reader.offset
    return _known(reader, words, reader.string(what), what, at)


def _known(reader: Reader, words: type[WordT], text: str, what: str, at: int) -> WordT:
    try:
        return words(text)
    except ValueError:
        expected = ", ".join(str(each.value) for each in words if each.value)
        reader.fail(f"expected one of {expected} for {what}, found '{text}'", at)
