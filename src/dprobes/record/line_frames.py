r"""
Records as a stream of frames, for lines without files: ``--log-format binary``.

The original sent a header that begins with facility id and header length to COM1 and COM2, then the data, then CR LF
(recovered reference, 3.2 and 3.3). Its reader could not find the end of data that contains a CR LF. A frame has the
same parts, preceded by the length of the data. Header and data are those of the record (``log_record``)::

    offset  size
    0       2    facility id, 1
    2       2    h, the length of the header
    4       4    d, the length of the data
    8       h    the header: the record's flag word and the items that it announces
    8+h     d    the data: the log buffer
    8+h+d   2    CR LF (13, 10)

Lengths are in the record's byte order, which the facility id indicates: 01 00 is little endian, 00 01 big. A frame with
h = 0 has no record. Its data is a u32, the number of records that were lost at this place.

The decoder skips and counts bytes that are not part of a frame, such as those after a loss on the line, and
resynchronizes at the next frame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import FormatError
from dprobes.record.log_record import PROCESS_NAME_MAX, ByteOrder, Item, decode_record, flag_word, header_struct

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DATA_MAX", "Frame", "FrameDecoder", "Garbage", "Lost", "lost_frame", "record_frame"]

_FACILITY = 1
_PREFIX = {"little": struct.Struct("<HHI"), "big": struct.Struct(">HHI")}
_ORDERS: dict[bytes, ByteOrder] = {b"\x01\x00": "little", b"\x00\x01": "big"}
_PREFIX_SIZE = 8
_END = b"\r\n"
_LOST_SIZE = 4

DATA_MAX = 1 << 16
"""Maximum size of a log buffer in bytes: ``logmax`` and ``ex_logmax`` are 16-bit numbers."""

_HEADER_MIN, _HEADER_MAX = 4, 128
"""Limits of the header's length in bytes: the flag word alone, and more than all items together."""

_KNOWN = sum(Item)


class Frame(NamedTuple):
    """A record found in a stream, still encoded."""

    record: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A number of records that were lost at this position of the stream."""

    count: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """A number of skipped bytes that are not part of a frame."""

    count: int


def record_frame(record: bytes) -> bytes:
    """Return the frame of an encoded record; raise ``FormatError`` if ``record`` is not a valid record."""
    size = len(decode_record(record).data)
    _, order = flag_word(record)
    return _PREFIX[order].pack(_FACILITY, len(record) - size, size) + record + _END


def lost_frame(count: int) -> bytes:
    """Return the frame that reports ``count`` lost records, of which at most 2**32 - 1 are reported."""
    return _PREFIX["little"].pack(_FACILITY, 0, _LOST_SIZE) + min(count, 0xFFFF_FFFF).to_bytes(4, "little") + _END


class FrameDecoder:
    """
    A decoder of a stream that arrives in pieces of any size.

    It buffers at most one frame. ``finish`` decodes the rest when the stream ends.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._garbage = 0

    def feed(self, data: bytes) -> Iterator[Frame | Lost | Garbage]:
        """Iterate over the frames that ``data`` completes. The caller must exhaust the iterator."""
        self._data += data
        return self._decode(is_end=False)

    def finish(self) -> Iterator[Frame | Lost | Garbage]:
        """Iterate over the items in the buffered bytes at the end of the stream. An incomplete frame is ``Garbage``."""
        yield from self._decode(is_end=True)
        yield from self._passed_over()

    def _decode(self, *, is_end: bool) -> Iterator[Frame | Lost | Garbage]:
        position = 0
        try:
            while position < len(self._data):
                found = self._frame_at(position)
                if found is None and not is_end:
                    break
                what, size = found or (None, 1)  # an incomplete frame at the end is garbage
                position += size
                if what is None:
                    self._garbage += size
                    continue
                yield from self._passed_over()
                yield what
        finally:
            del self._data[:position]

    def _passed_over(self) -> Iterator[Garbage]:
        if self._garbage:
            count, self._garbage = self._garbage, 0
            yield Garbage(count)

    def _frame_at(self, start: int) -> tuple[Frame | Lost | None, int] | None:
        """
        Return the frame at ``start`` and its size in bytes, or None if more bytes are needed to decide.

        If no frame begins there, return ``(None, size)`` with the number of bytes to skip.
        """
        data = self._data
        if len(data) - start < _PREFIX_SIZE:
            return None
        order = _ORDERS.get(bytes(data[start : start + 2]))
        if order is None:
            return None, self._next_candidate(start) - start
        _, header, size = _PREFIX[order].unpack_from(data, start)
        begin = start + _PREFIX_SIZE
        end = begin + header + size
        if size > DATA_MAX or (size != _LOST_SIZE if header == 0 else not _HEADER_MIN <= header <= _HEADER_MAX):
            return None, 1
        # A false start of a frame must not make the decoder wait for all the data that its length announces.
        if header and len(data) >= begin + 4 and not _is_header(bytes(data[begin : begin + 4]), order, header):
            return None, 1
        if len(data) < end + len(_END):
            return None
        if data[end : end + len(_END)] != _END:
            return None, 1
        body, whole = bytes(data[begin:end]), end + len(_END) - start
        if header == 0:
            return Lost(int.from_bytes(body, order)), whole
        try:
            is_record = len(decode_record(body).data) == size
        except FormatError:
            is_record = False
        return (Frame(body), whole) if is_record else (None, 1)

    def _next_candidate(self, start: int) -> int:
        """Return the next offset at which a frame may begin. The last byte may be the first byte of a frame."""
        found = [place for mark in _ORDERS if (place := self._data.find(mark, start + 1)) >= 0]
        return min(found, default=max(len(self._data) - 1, start + 1))


def _is_header(word: bytes, order: ByteOrder, size: int) -> bool:
    """Return whether a record header of ``size`` bytes can begin with this flag word in byte order ``order``."""
    flags, its_order = flag_word(word)
    if its_order != order or flags & ~_KNOWN:
        return False
    most = least = header_struct(flags, order).size + (4 if flags & Item.TID else 0)
    if flags & Item.PROCESS_NAME:
        least, most = least + 1, most + PROCESS_NAME_MAX + 1
    return least <= size <= most
