"""Encode and decode the records of ``layout``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dprobes.errors import FormatError
from dprobes.record.layout import FIXED_ITEMS, PROCESS_NAME_MAX, Item, LogRecord, header_struct

if TYPE_CHECKING:
    import struct

    from dprobes.record.layout import ByteOrder

__all__ = ["decode_record", "encode_record"]

_KNOWN = sum(Item)


def encode_record(record: LogRecord) -> bytes:
    """Return the bytes of a record; items that are None are left out."""
    flags = Item.WIDE if record.word_size == 8 else Item(0)
    if record.is_stack_trace:
        flags |= Item.STACK_TRACE
    values = []
    for item, name in FIXED_ITEMS:
        if (value := getattr(record, name)) is not None:
            flags |= item
            values.append(value)
    tail = b""
    if record.process_name is not None:
        flags |= Item.PROCESS_NAME
        tail = record.process_name.encode("utf-8", "surrogateescape")[:PROCESS_NAME_MAX] + b"\0"
    if record.tid is not None:
        flags |= Item.TID
        tail += record.tid.to_bytes(4, record.byte_order)
    return header_struct(int(flags), record.byte_order).pack(int(flags), *values) + tail + record.data


def decode_record(data: bytes) -> LogRecord:
    """Return the record in ``data``; raise ``FormatError`` if it is none."""
    if len(data) < 4:
        raise FormatError(f"a record of {len(data)} bytes has no flag word", offset=0)
    # Only 16 bits are used: the zero half of the word tells the byte order.
    byte_order: ByteOrder = "little" if data[2:4] == b"\0\0" else "big"
    shape = _shape(int.from_bytes(data[:4], byte_order), byte_order)
    position = shape.layout.size
    if len(data) < position:
        raise FormatError(f"a record needs {position} bytes, found {len(data)}", offset=len(data))
    fields: dict[str, Any] = dict(zip(shape.names, shape.layout.unpack_from(data)[1:], strict=True))
    if shape.has_process_name:
        end = data.find(b"\0", position, position + PROCESS_NAME_MAX + 1)
        if end < 0:
            raise FormatError("the process name of a record has no end", offset=position)
        fields["process_name"] = data[position:end].decode("utf-8", "surrogateescape")
        position = end + 1
    if shape.has_tid:
        if position + 4 > len(data):
            raise FormatError("a record ends in its thread id", offset=position)
        fields["tid"] = int.from_bytes(data[position : position + 4], byte_order)
        position += 4
    return LogRecord(
        **fields,
        data=data[position:],
        word_size=shape.word_size,
        byte_order=byte_order,
        is_stack_trace=shape.is_stack_trace,
    )


class _Shape(NamedTuple):
    """What a flag word says; worked out once for each flag word that occurs."""

    layout: struct.Struct
    names: tuple[str, ...]
    has_process_name: bool
    has_tid: bool
    word_size: Literal[4, 8]
    is_stack_trace: bool


@cache
def _shape(flags: int, byte_order: ByteOrder) -> _Shape:
    if flags & ~_KNOWN:
        raise FormatError(f"unknown flags {flags & ~_KNOWN:#x} in a record", offset=0)
    return _Shape(
        header_struct(flags, byte_order),
        tuple(name for item, name in FIXED_ITEMS if flags & item),
        bool(flags & Item.PROCESS_NAME),
        bool(flags & Item.TID),
        8 if flags & Item.WIDE else 4,
        bool(flags & Item.STACK_TRACE),
    )
