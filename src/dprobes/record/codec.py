"""Encode and decode the records of ``layout``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.record.layout import FIXED_ITEMS, PROCESS_NAME_MAX, Item, LogRecord, header_struct

if TYPE_CHECKING:
    import struct

    from dprobes.record.layout import ByteOrder
    from dprobes.record.probeinfo import Place

__all__ = ["decode_record", "encode_record", "flag_word", "time_of"]

_KNOWN = sum(Item)


def encode_record(record: LogRecord) -> bytes:
    """Return the bytes of a record; items that are None are left out."""
    flags = Item.WIDE if record.word_size == 8 else Item(0)
    if record.is_stack_trace:
        flags |= Item.STACK_TRACE
    if record.is_cut:
        flags |= Item.CUT
    values = []
    for item, name in FIXED_ITEMS:
        if (value := getattr(record, name)) is not None:
            flags |= item
            values.append(value)
    tail = b""
    if record.process_name is not None:
        flags |= Item.PROCESS_NAME
        encoded = record.process_name.encode("utf-8", "surrogateescape").partition(b"\0")[0]
        tail = encoded[:PROCESS_NAME_MAX] + b"\0"
    if record.tid is not None:
        flags |= Item.TID
        tail += record.tid.to_bytes(4, record.byte_order)
    return header_struct(int(flags), record.byte_order).pack(int(flags), *values) + tail + record.data


def decode_record(data: bytes, place: Place | None = None) -> LogRecord:
    """Return the record in ``data``, which is of the probepoint at ``place``; raise ``FormatError`` if it is none."""
    if len(data) < 4:
        raise FormatError(f"a record of {len(data)} bytes has no flag word", offset=0)
    flags, byte_order = flag_word(data)
    shape = _shape(flags, byte_order)
    position = shape.layout.size
    if len(data) < position:
        raise FormatError(f"a record needs {position} bytes, found {len(data)}", offset=len(data))
    values = shape.template.copy()
    for field, value in zip(shape.fields, shape.layout.unpack_from(data)[1:], strict=True):
        values[field] = value
    if shape.has_process_name:
        end = data.find(b"\0", position, position + PROCESS_NAME_MAX + 1)
        if end < 0:
            raise FormatError("the process name of a record has no end", offset=position)
        values[_PROCESS_NAME] = data[position:end].decode("utf-8", "surrogateescape")
        position = end + 1
    if shape.has_tid:
        if position + 4 > len(data):
            raise FormatError("a record ends in its thread id", offset=position)
        values[_TID] = int.from_bytes(data[position : position + 4], byte_order)
        position += 4
    values[_DATA] = data[position:]
    values[_PLACE] = place
    return LogRecord._make(values)


_PROCESS_NAME, _TID, _DATA, _PLACE = (
    LogRecord._fields.index(name) for name in ("process_name", "tid", "data", "place")
)


def flag_word(data: bytes) -> tuple[int, ByteOrder]:
    """Return the flag word of a record, and the byte order that it tells."""
    # Only 16 bits are used: the zero half of the word tells the byte order.
    byte_order: ByteOrder = "little" if data[2:4] == b"\0\0" else "big"
    return int.from_bytes(data[:4], byte_order), byte_order


def time_of(data: bytes) -> int | None:
    """Return the time of an encoded record without decoding the rest; None if it carries none, or is no record."""
    flags, byte_order = flag_word(data)
    if not flags & Item.TIME or flags & ~_KNOWN:
        return None
    end = header_struct(flags, byte_order).size  # the last of the fixed items
    return int.from_bytes(data[end - 8 : end], byte_order) if len(data) >= end else None


class _Shape(NamedTuple):
    """
    What a flag word says; worked out once for each flag word that occurs.

    ``fields`` are the indices in a LogRecord of what ``layout`` unpacks; ``template`` holds all its other values.
    """

    layout: struct.Struct
    fields: tuple[int, ...]
    has_process_name: bool
    has_tid: bool
    template: list[Any]


@cache
def _shape(flags: int, byte_order: ByteOrder) -> _Shape:
    if flags & ~_KNOWN:
        raise FormatError(f"unknown flags {flags & ~_KNOWN:#x} in a record", offset=0)
    record = LogRecord(
        word_size=8 if flags & Item.WIDE else 4,
        byte_order=byte_order,
        is_stack_trace=bool(flags & Item.STACK_TRACE),
        is_cut=bool(flags & Item.CUT),
    )
    return _Shape(
        header_struct(flags, byte_order),
        tuple(LogRecord._fields.index(name) for item, name in FIXED_ITEMS if flags & item),
        bool(flags & Item.PROCESS_NAME),
        bool(flags & Item.TID),
        list(record),
    )
