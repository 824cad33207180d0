"""
Columns of the items of many records.

A block of records is cut into ``BlockRows``, whose records have the same flag words. For a table, these are its parts.
An item has the same offset in all rows; in records that are stored one after the other, it has the same distance from
the data. Reading one item of all records is much faster than decoding the records.
"""

from __future__ import annotations

import operator
import struct
from functools import cached_property
from typing import TYPE_CHECKING, Self

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.record.log_record import PROCESS_NAME_MAX, Item, decode_record, flag_word, header_struct
from dprobes.record.record_rows import ITEM_COLUMNS, NAME_SPACE, PROBE_SIZE, PackedRows, Rows, RowShape, mapped
from dprobes.trace.trace_content import RecordBlock, TraceRecord
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.record.log_record import ByteOrder
    from dprobes.record.record_origin import Place
    from dprobes.record.record_rows import Column, Strings
    from dprobes.trace.packed_blocks import Block

__all__ = ["ITEM_COLUMNS", "TEXT_COLUMNS", "BlockRows", "RaggedRows", "ragged_rows_of", "rows_of"]

TEXT_COLUMNS = ("name", "module", "program", "host", "symbol", "function")
"""
Columns of strings: the process name, then the file's attributes of the program and the probepoint.

All output formats print these items like this, with the same escapes.
"""

_RAGGED = 4096
"""Maximum number of rows of various sizes that are processed together."""

_HEAD = RECORD_HEAD.size
_FLAGS = 4
_ROW = struct.Struct("<4xII")
"""The structure of size and flag word, the flag word read as little-endian."""


class BlockRows:
    """Records of a block with the same flag word: their ``rows``, with the attributes of the program and the place."""

    def __init__(self, block: Block, rows: Rows) -> None:
        self.block = block
        self.rows = rows
        self._columns: dict[str, Column | Strings | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> TraceRecord:
        """Return the record in row ``row``, with its probepoint and time of writing."""
        block = self.block
        probe, record = self.rows.pair(row)
        written = self.rows.written_at(row) if isinstance(self.rows, RaggedRows) else block.written
        return TraceRecord(block.program, probe, record, block.wall_offset, written)

    def written(self) -> list[int] | int:
        """Return the time of writing of each record, or a single number if it is the same for all."""
        if not isinstance(self.rows, RaggedRows) or self.rows.block.joints is None:
            return self.block.written
        return list(map(self.rows.written_at, range(len(self))))

    def place(self, probe: int) -> Place:
        """Return the place of a probepoint, with the program's current module."""
        program = self.block.program
        return program.place(probe).in_module(program.source.module)

    def column(self, name: str) -> Column | Strings | None:
        """
        Return the column of an item, with unprintable characters escaped, or None if no record has it.

        Raise ``FormatError`` if a record is too short for the item.
        """
        if name not in self._columns:
            self._columns[name] = self._make(name)
        return self._columns[name]

    def _make(self, name: str) -> Column | Strings | None:
        program = self.block.program
        match name:
            case "program":
                return escaped(program.name)
            case "module":
                return escaped(program.source.module)
            case "host":
                return escaped(program.origin.host)
            case "symbol" | "function":
                return self._places(is_symbol=name == "symbol")
            case "name":
                names = self.rows.strings()
                shown: Strings | None = None if names is None else mapped(names, escaped)
                return shown
        return self.rows.column(name)

    def _places(self, *, is_symbol: bool) -> Strings:
        def shown(probe: int) -> str:
            place = self.block.program.place(probe)
            return escaped(place.where if is_symbol else place.routine)

        return mapped(self.rows.probes(), shown)


class RaggedRows(Rows):
    """Records of a block, of one flag word and any sizes, from ``starts`` to ``ends`` in ``block.body``."""

    def __init__(
        self, block: RecordBlock, starts: list[int], ends: list[int], flags: int, byte_order: ByteOrder
    ) -> None:
        self.block = block
        self.starts = starts
        self.ends = ends
        try:
            self.shape = RowShape.of(flags, byte_order)
        except FormatError:
            self._refuse()
            raise
        self._names_at = _HEAD + header_struct(flags, byte_order).size
        self._tid_size = 4 if flags & Item.TID else 0
        if min(map(operator.sub, ends, starts)) < self._names_at:
            self._refuse()

    def __len__(self) -> int:
        return len(self.starts)

    def pair(self, row: int) -> tuple[int, bytes]:
        """Return the probepoint number and the encoded record with number ``row``."""
        probe, begin, end = self.block.bounds(self.starts[row])
        return probe, self.block.body[begin:end]

    def written_at(self, row: int) -> int:
        """Return the time at which the record with number ``row`` was written, CLOCK_MONOTONIC in nanoseconds."""
        return self.block.written_at(self.starts[row])

    def probes(self) -> list[int]:
        """Return the probepoint number of each record."""
        return self._numbers("<I", self.starts, 0)

    def item(self, item: Item) -> list[int] | None:
        """
        Return the column of a header item, or None if records lack it.

        Raise ``FormatError`` if a record is too short.
        """
        if (place := self.shape.place(item)) is None:
            return None
        offset, size = place
        code = ("<" if self.shape.byte_order == "little" else ">") + ("Q" if size == 8 else "I")
        if item is Item.TID:
            return self._numbers(code, self.data_bounds()[1], -size)
        return self._numbers(code, self.starts, _HEAD - PROBE_SIZE + offset)

    def _numbers(self, code: str, starts: list[int], at: int) -> list[int]:
        unpack, body = struct.Struct(code).unpack_from, self.block.body
        return [unpack(body, start + at)[0] for start in starts]

    def names(self) -> list[bytes] | None:
        """Return the process name of each record, or None if records lack them."""
        if self.shape.name is None:
            return None
        body, data, _ = self.data_bounds()
        first, after = self._names_at, self._tid_size + 1
        return [body[start + first : end - after] for start, end in zip(self.starts, data, strict=True)]

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return the bytes of the block, and the offsets in them where the data of each record start and end."""
        return self._bounds

    @cached_property
    def _bounds(self) -> tuple[bytes, list[int], list[int]]:
        body, ends = self.block.body, self.ends
        data = [start + self._names_at for start in self.starts]
        if self.shape.name is not None:
            find = body.find
            names, data = data, [find(0, start) + 1 for start in data]
            if any(not 0 < end - start <= PROCESS_NAME_MAX + 1 for start, end in zip(names, data, strict=True)):
                self._refuse()
        if self._tid_size:
            data = [start + self._tid_size for start in data]
        if any(map(operator.gt, data, ends)):
            self._refuse()
        return body, data, ends

    def chosen(self, wanted: Sequence[int]) -> Self:
        """Return the rows whose indices are in ``wanted``."""
        starts, ends = ([offsets[row] for row in wanted] for offsets in (self.starts, self.ends))
        return type(self)(self.block, starts, ends, self.shape.flags, self.shape.byte_order)

    def headers(self) -> PackedRows:
        """Return the headers of the records as packed rows without data."""
        body, data, _ = self.data_bounds()
        tid, names_at = self._tid_size, self._names_at
        space = 0 if self.shape.name is None else NAME_SPACE
        rows: list[bytes] = []
        for start, end in zip(self.starts, data, strict=True):
            name = body[start + names_at : end - tid].ljust(space, b"\0")
            rows += (
                body[start : start + PROBE_SIZE],
                body[start + _HEAD : start + names_at],
                name,
                body[end - tid : end],
            )
        size = self.shape.data
        return PackedRows.of_table(b"".join(rows), size, range(size))

    def _refuse(self) -> None:
        """Raise ``FormatError``, as decoding the first invalid record does."""
        for start in self.starts:
            _check_record(self.block, start)


def rows_of(block: Block) -> Iterator[BlockRows]:
    """
    Iterate over a block's adjacent records of one shape, or over a table's parts.

    Raise ``FormatError`` if a record is invalid.
    """
    if isinstance(block, RecordBlock):
        return (BlockRows(block, rows) for rows in ragged_rows_of(block))
    return (BlockRows(block, part) for part in block.records.parts if part)


def ragged_rows_of(block: RecordBlock) -> Iterator[RaggedRows]:
    """
    Iterate over sequences of consecutive records with the same flag word, in order and of limited length.

    Raise ``FormatError`` at an invalid record.
    """
    body, at, last = block.body, block.start, len(block.body) - _ROW.size
    while at < len(body):
        _, begin, end = block.bounds(at)
        if end - begin < _FLAGS:
            _check_record(block, at)
        flags, byte_order = flag_word(body[begin : begin + _FLAGS])
        _, first = _ROW.unpack_from(body, at)
        joints, at = [at, end], end
        while at <= last and len(joints) <= _RAGGED:
            size, word = _ROW.unpack_from(body, at)
            end = at + _HEAD + size
            if word != first or size < _FLAGS or end > len(body):
                break  # the next rows report the damage
            joints.append(at := end)
        yield RaggedRows(block, joints[:-1], joints[1:], flags, byte_order)


def _check_record(block: RecordBlock, at: int) -> None:
    _, begin, end = block.bounds(at)
    try:
        decode_record(block.body[begin:end])
    except FormatError as error:
        file = block.program.origin.file
        raise FormatError(
            f"a frame of '{file}' holds a damaged record: {error.message}", offset=block.position_at(at)
        ) from None
