"""
The memory layout of a table's keys and values, and the effect of a new value: the definition for all engines.

A key is the bytes of its fields, each a multiple of 8, numbers in the machine's byte order::

    word, address   the cell as 64 bits, zero-extended
    str[N]          the string up to its NUL, at most N bytes, and zeros, at least one
    comm            16 bytes: the thread's name, and zeros
    ustack[N]       the process id, and N addresses, the innermost first, and zeros
    kstack[N]       N addresses, and zeros
    long            64 bits, unsigned
    slong           64 bits, signed
    cutstr[N]       as str[N]; one of N bytes is shown as N - 1 of them and a mark
    cuttext[N]      as text[N] and cutstr[N]
    text[N]         as str[N], the bytes of the cells unchanged
    frames[N]       as kstack[N]
    uframes[N]      as ustack[N]

A value consists of 64-bit cells, initially 0; the number to be added is a signed word ``v``::

    count           n                               n += 1
    sum             sum                             sum += v, modulo 2**64
    min             BIAS + ...                      see below
    avg             n | sum
    stats           n | sum | least | largest
    hist            128 counts: ... -3 to -2; -1; 0; 1; 2 to 3; 4 to 7; ...
    lhist           a count below ``low``, one for each bucket, one from ``high`` on
    last            v, or with ``value =`` the bytes of a string or a call stack, as a key's

``largest`` is stored as v + 2**63 and ``least`` as 2**63 - 1 - v: for both the greater unsigned number wins, and the 0
of a new cell never does. So cells of several CPUs are merged by one rule each: addition, or the maximum.
"""

from __future__ import annotations

import itertools
import struct
import sys
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

from dprobes.escapes import cut_text
from dprobes.rpn.instruction_set import StackEnd
from dprobes.rpn.keyed_tables import HIST_BUCKETS, KeyKind, TableKind
from dprobes.rpn.word_arithmetic import signed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.rpn.keyed_tables import Key, Range, Table

__all__ = [
    "BIAS",
    "HIST_ZERO",
    "NO_NAMES",
    "STACK_ENDS",
    "Bucket",
    "Change",
    "Names",
    "Part",
    "TableContents",
    "TableRow",
    "bucket_of",
    "buckets_of",
    "changed",
    "changes",
    "count_cells",
    "hist_bucket",
    "kept_part",
    "key_parts",
    "lhist_bucket",
    "merged",
    "parts_of",
    "quotient",
    "row_parts",
    "shown_value",
]

# The contents of a table at some time, for all outputs.


class TableRow(NamedTuple):
    """An entry of a keyed table: its key in binary form, and the cells of its value."""

    key: bytes
    cells: tuple[int, ...]


class TableContents(NamedTuple):
    """
    A keyed table with its rows, which are not sorted.

    ``lost`` is the number of tallies whose keys had no room, or that were not transferred.
    """

    table: Table
    rows: tuple[TableRow, ...] = ()
    lost: int = 0


BIAS = 1 << 63
_MASK = (1 << 64) - 1

HIST_ZERO = HIST_BUCKETS // 2
"""Index of the cell that counts zeros in a histogram by powers of two."""


RawPart = int | bytes | tuple[int, ...]
"""A field of a key: a number, a string, or the addresses of a stack."""


class Change(Enum):
    """The operations by which a number changes a cell."""

    ADD = "add"
    GREATEST = "the greater one, unsigned"
    SET = "set"


def hist_bucket(value: int) -> int:
    """Return the index of the cell that counts a signed number in a histogram by powers of two."""
    return HIST_ZERO + bucket_of(value)


def bucket_of(number: int) -> int:
    """
    Return the number of a signed number's bucket in a histogram by powers of two.

    Bucket 0 is for 0. Bucket n > 0 is for the numbers from 2**(n-1) to 2**n - 1, and bucket -n for their negatives.
    """
    return number.bit_length() if number >= 0 else -(-number).bit_length()


def lhist_bucket(value: int, bounds: Range) -> int:
    """Return the index of the cell that counts a signed number in a linear histogram with these bounds."""
    if value < bounds.low:
        return 0
    if value >= bounds.high:
        return 1 + bounds.buckets
    return 1 + (value - bounds.low) // bounds.step


def count_cells(table: Table) -> range:
    """
    Return the indices of those cells of a value whose sum is the number of tallies.

    The range is empty for a kind of table that does not count.
    """
    match table.kind:
        case TableKind.COUNT | TableKind.AVG | TableKind.STATS:
            return range(1)
        case TableKind.HIST | TableKind.LHIST:
            return range(table.value_cells)
        case TableKind.SUM | TableKind.MIN | TableKind.MAX | TableKind.LAST:
            return range(0)


def changes(table: Table, value: int) -> Iterator[tuple[int, Change, int]]:
    """Iterate over the changes that a signed number makes to a value: index of a cell, operation, operand."""
    match table.kind:
        case TableKind.COUNT:
            yield 0, Change.ADD, 1
        case TableKind.SUM:
            yield 0, Change.ADD, value
        case TableKind.MIN:
            yield 0, Change.GREATEST, BIAS - 1 - value
        case TableKind.MAX:
            yield 0, Change.GREATEST, BIAS + value
        case TableKind.AVG | TableKind.STATS:
            yield 0, Change.ADD, 1
            yield 1, Change.ADD, value
            if table.kind is TableKind.STATS:
                yield 2, Change.GREATEST, BIAS - 1 - value
                yield 3, Change.GREATEST, BIAS + value
        case TableKind.HIST:
            yield hist_bucket(value), Change.ADD, 1
        case TableKind.LHIST:
            assert table.range is not None
            yield lhist_bucket(value, table.range), Change.ADD, 1
        case TableKind.LAST:
            yield 0, Change.SET, value & _MASK
        case other:
            assert_never(other)


def changed(table: Table, cells: Sequence[int], value: int) -> list[int]:
    """Return the cells of a value after tallying a number. A 64-bit pattern is interpreted as signed."""
    found = list(cells)
    for cell, change, number in changes(table, value):
        match change:
            case Change.ADD:
                found[cell] = found[cell] + number & _MASK
            case Change.GREATEST:
                found[cell] = max(found[cell], number)
            case Change.SET:
                found[cell] = number
    return found


def merges_by_adding(table: Table, cell: int) -> bool:
    """Return True if the cells of several CPUs are merged by addition. Otherwise, the result is their maximum."""
    match table.kind:
        case TableKind.MIN | TableKind.MAX:
            return False
        case TableKind.STATS:
            return cell < 2
        case TableKind.COUNT | TableKind.SUM | TableKind.AVG | TableKind.HIST | TableKind.LHIST | TableKind.LAST:
            return True
    assert_never(table.kind)


def merged(table: Table, parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the cells of a value, merged from ``parts``, the cells that each CPU has written."""
    columns = zip(*parts, strict=True)
    return tuple(
        sum(column) & _MASK if merges_by_adding(table, cell) else max(column) for cell, column in enumerate(columns)
    )


def quotient(total: int, count: int) -> int:
    """Return the average of ``count`` numbers whose sum is ``total``, rounded towards zero, or 0 if there are none."""
    if not count:
        return 0
    return -(-total // count) if total < 0 else total // count


def shown_value(table: Table, cells: Sequence[int]) -> int:
    """
    Return the signed number that ``push table`` pushes for a value, or 1 for a string or a call stack.

    For ``stats`` this is the count.
    """
    if table.keeps_bytes:
        return 1
    match table.kind:
        case TableKind.COUNT | TableKind.STATS:
            return cells[0]
        case TableKind.SUM | TableKind.LAST:
            return signed(cells[0], 64)
        case TableKind.MIN:
            return BIAS - 1 - cells[0]
        case TableKind.MAX:
            return cells[0] - BIAS
        case TableKind.AVG:
            return quotient(signed(cells[1], 64), cells[0])
        case TableKind.HIST | TableKind.LHIST:
            return sum(cells)
    assert_never(table.kind)


class Bucket(NamedTuple):
    """Bucket of a histogram, from ``low`` (included) to ``high`` (excluded). None is an open end."""

    low: int | None
    high: int | None


@cache
def buckets_of(table: Table) -> tuple[Bucket, ...]:
    """Return the buckets of a histogram, in the order of their cells, or an empty tuple for other tables."""
    match table.kind:
        case TableKind.HIST:
            above = [Bucket(1 << n, 2 << n) for n in range(HIST_BUCKETS - HIST_ZERO - 1)]
            below = [Bucket(1 - (2 << n), 1 - (1 << n)) for n in range(HIST_ZERO)]
            return *reversed(below), Bucket(0, 1), *above
        case TableKind.LHIST:
            assert table.range is not None
            low, high, step = table.range.low, table.range.high, table.range.step
            edges = [*range(low, high, step), high]
            return Bucket(None, low), *(Bucket(a, b) for a, b in itertools.pairwise(edges)), Bucket(high, None)
    return ()


def row_parts(table: Table, key: bytes, cells: Sequence[int]) -> tuple[RawPart, ...]:
    """
    Return the fields of a row's key, followed by the stored value if it is a string or a call stack.

    ``cells`` are the value.
    """
    found = key_parts(table.keys, key)
    if table.value is None or not table.keeps_bytes:
        return found
    return *found, *key_parts((table.value,), struct.pack(f"{len(cells)}Q", *cells))


_SIGNED = (KeyKind.SIGNED, KeyKind.SIGNED_LONG)


def key_parts(keys: Sequence[Key], data: bytes) -> tuple[RawPart, ...]:
    """
    Return the fields of a key in binary form: numbers, bytes, or the addresses of a call stack.

    The first element of a ``ustack`` or ``uframes`` is its process id.
    """
    parts: list[RawPart] = []
    position = 0
    for key in keys:
        field = data[position : position + key.bytes]
        position += key.bytes
        match key.kind:
            case KeyKind.STRING | KeyKind.COMM | KeyKind.TEXT:
                parts.append(field.partition(b"\0")[0])
            case KeyKind.CUT_STRING | KeyKind.CUT_TEXT:
                text = field[: key.size].partition(b"\0")[0]
                parts.append(text if len(text) < key.size else cut_text(text, key.size - 1))
            case KeyKind.BYTES:
                parts.append(field[: key.size])
            case KeyKind.USER_STACK | KeyKind.USER_FRAMES | KeyKind.KERNEL_STACK | KeyKind.FRAMES:
                words = list(memoryview(field).cast("Q"))
                while words and not words[-1]:
                    words.pop()
                parts.append(tuple(words))
            case KeyKind.WORD | KeyKind.SIGNED | KeyKind.ADDRESS | KeyKind.LONG | KeyKind.SIGNED_LONG:
                parts.append(int.from_bytes(field, sys.byteorder, signed=key.kind in _SIGNED))
            case other:
                assert_never(other)
    return tuple(parts)


_BACKSLASH = 0x5C

Part = int | str | list[str]

STACK_ENDS = {
    StackEnd.NO_TABLE: "[cut: no unwind table]",
    StackEnd.BAD_TABLE: "[cut: unwind table]",
    StackEnd.UNREADABLE: "[cut: stack not copied]",
    StackEnd.NOT_RISING: "[cut: stack not rising]",
    StackEnd.GONE: "[cut: process gone]",
    StackEnd.NO_COPY: "[cut: no copy]",
}
"""Markers at the end of a displayed stack whose unwinding did not reach the outermost frame."""


class Names(Protocol):
    """A provider of symbolic names for the addresses in keyed tables."""

    def name_of(self, address: int, pid: int | None) -> str | None:
        """
        Return the name of an address in a process, or None if it is unknown.

        Without ``pid``, the address is in the kernel or the module.
        """

    def caller_name(self, address: int, pid: int | None) -> str | None:
        """Return the name of the code that contains the call before a return address, or None if it is unknown."""

    def inlined_at(self, address: int, pid: int | None) -> Sequence[str]:
        """Return the names of the functions whose inlined code is at an address, the innermost first."""


class _NoNames:
    def name_of(self, address: int, pid: int | None) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def caller_name(self, address: int, pid: int | None) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def inlined_at(self, address: int, pid: int | None) -> Sequence[str]:  # noqa: ARG002 - the protocol's
        return ()


NO_NAMES: Names = _NoNames()
"""A provider that knows no names."""


def parts_of(table: Table, key: bytes, names: Names = NO_NAMES) -> tuple[Part, ...]:
    """Return the displayed fields of a key. A call stack is a list of frame names, innermost first."""
    return _parts(table.keys, key, names)


def kept_part(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> str | list[str]:
    """
    Return the string or call stack that a table keeps as a value, in its displayed form.

    ``cells`` has the value. A call stack is a list of frame names, innermost first; ``names`` has the names of its
    addresses.
    """
    assert table.value is not None
    found = _parts((table.value,), struct.pack(f"{len(cells)}Q", *cells), names)[0]
    assert not isinstance(found, int)
    return found


def _parts(keys: Sequence[Key], key: bytes, names: Names) -> tuple[Part, ...]:
    found: list[Part] = []
    for each, part in zip(keys, key_parts(keys, key), strict=True):
        match each.kind, part:
            case KeyKind.BYTES, bytes():
                found.append(shown_bytes(part))
            case _, bytes():
                found.append(part.decode("utf-8", "backslashreplace"))
            case KeyKind.ADDRESS, int():
                found.append(names.name_of(part, None) or hex(part))
            case ((KeyKind.USER_STACK | KeyKind.USER_FRAMES), tuple()):
                pid = part[0] if part else None
                found.append(_frames(part[1:], pid, names))
            case ((KeyKind.KERNEL_STACK | KeyKind.FRAMES), tuple()):
                found.append(_frames(part, None, names))
            case _, int():
                found.append(part)
    return tuple(found)


def shown_bytes(data: bytes) -> str:
    """Return bytes as text: printable ASCII unchanged, a backslash and other bytes as hexadecimal escapes of Python."""
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != _BACKSLASH else f"\\x{byte:02x}" for byte in data)


def _frames(stack: Sequence[int], pid: int | None, names: Names) -> list[str]:
    found: list[str] = []
    for number, address in enumerate(stack):
        if address in STACK_ENDS:
            found.append(STACK_ENDS[StackEnd(address)])
            continue
        # All but the first address are return addresses, which may be at the start of the next function.
        name = names.caller_name(address, pid) if number else names.name_of(address, pid)
        found += (*names.inlined_at(address - (number > 0), pid), name or hex(address))
    return found
