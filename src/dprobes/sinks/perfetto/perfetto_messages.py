"""
Messages of a trace, with the names in protos/perfetto/trace/perfetto_trace.proto.

A trace is a sequence of packets. The package ``perfetto`` has classes for them, which take twice as long. Tests use
them to decode the output of this module.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

__all__ = [
    "EventType",
    "Packets",
    "array",
    "counter",
    "counter_track",
    "dictionary",
    "dictionary_of",
    "entry",
    "event",
    "integer",
    "length_field",
    "named_track",
    "pointer",
    "process_track",
    "string",
    "text_field",
    "thread_track",
    "trace_uuid",
    "unsigned",
    "varint",
    "varint_field",
]

# The subset of protobuf's encoding that writing needs (protobuf.dev/programming-guides/encoding). A message is the
# concatenation of its fields. A field is a key, its number shifted left by 3 with the wire type below, and a varint
# (wire type 0), eight bytes (wire type 1) or, after their length, bytes (wire type 2): a string, or a message.

_MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 14)
def varint(value: int) -> bytes:
    """
    Return a number as a varint: groups of 7 bits, the lowest first.

    A negative number is in 64-bit two's complement.
    """
    value &= _MASK
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def varint_field(number: int, value: int) -> bytes:
    """Return an encoded protobuf field of wire type VARINT: its tag with field number ``number``, and ``value``."""
    return varint(number << 3) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """Return an encoded protobuf field of wire type I64: its tag with field number ``number``, and a double."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def length_field(number: int, data: bytes) -> bytes:
    """Return an encoded protobuf field of wire type LEN: tag, length, and ``data``, bytes or an encoded message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def text_field(number: int, text: str) -> bytes:
    """Return an encoded protobuf field of wire type LEN with a string in UTF-8."""
    return length_field(number, text.encode("utf-8", "backslashreplace"))


_PACKET = 1
"""The number of the field ``packet`` of Trace."""


class _TracePacket(enum.IntEnum):
    CLOCK_SNAPSHOT = 6
    TIMESTAMP = 8
    TRUSTED_PACKET_SEQUENCE_ID = 10
    TRACK_EVENT = 11
    SEQUENCE_FLAGS = 13
    PREVIOUS_PACKET_DROPPED = 42
    TIMESTAMP_CLOCK_ID = 58
    TRACK_DESCRIPTOR = 60
    FIRST_PACKET_ON_SEQUENCE = 87
    TRACE_UUID = 89


_SEQ_INCREMENTAL_STATE_CLEARED = 1
_TRACE_UUID_MSB, _TRACE_UUID_LSB = 1, 2


class _Clock(enum.IntEnum):
    """Numbers of clocks in Perfetto's BuiltinClock."""

    REALTIME = 1
    MONOTONIC = 3
    BOOTTIME = 6


_CLOCKS, _PRIMARY_TRACE_CLOCK = 1, 2
_CLOCK_ID, _CLOCK_TIMESTAMP = 1, 2


class _TrackDescriptor(enum.IntEnum):
    UUID = 1
    NAME = 2
    PROCESS = 3
    THREAD = 4
    PARENT_UUID = 5
    COUNTER = 8


_PROCESS_PID, _PROCESS_NAME = 1, 6
_THREAD_PID, _THREAD_TID, _THREAD_NAME = 1, 2, 5


class _TrackEvent(enum.IntEnum):
    DEBUG_ANNOTATIONS = 4
    TYPE = 9
    TRACK_UUID = 11
    CATEGORIES = 22
    NAME = 23
    COUNTER_VALUE = 30
    DOUBLE_COUNTER_VALUE = 44


class EventType(enum.IntEnum):
    """The type of a TrackEvent (TrackEvent.Type)."""

    SLICE_BEGIN = 1
    SLICE_END = 2
    INSTANT = 3
    COUNTER = 4


class _DebugAnnotation(enum.IntEnum):
    UINT_VALUE = 3
    INT_VALUE = 4
    STRING_VALUE = 6
    POINTER_VALUE = 7
    NAME = 10
    DICT_ENTRIES = 11
    ARRAY_VALUES = 12


def trace_uuid(uuid: UUID) -> bytes:
    """Return the encoded TracePacket with the TraceUuid of the trace."""
    most, least = divmod(uuid.int, 1 << 64)
    content = varint_field(_TRACE_UUID_MSB, most) + varint_field(_TRACE_UUID_LSB, least)
    return length_field(_PACKET, length_field(_TracePacket.TRACE_UUID, content))


class Packets:
    """An encoder of the packets of a sequence, those of one writer. Times are CLOCK_MONOTONIC in nanoseconds."""

    def __init__(self, sequence: int) -> None:
        self._end = varint_field(_TracePacket.TRUSTED_PACKET_SEQUENCE_ID, sequence)
        self._event_end = varint_field(_TracePacket.TIMESTAMP_CLOCK_ID, _Clock.MONOTONIC) + self._end
        self._timestamp = varint(_TracePacket.TIMESTAMP << 3)
        self._track_event = varint(_TracePacket.TRACK_EVENT << 3 | 2)
        self._packet = varint(_PACKET << 3 | 2)

    def clocks(self, monotonic: int, realtime: int, boottime: int, *, is_first: bool) -> bytes:
        """
        Return the encoded TracePacket with a ClockSnapshot: the values of three clocks at one moment, in nanoseconds.

        ``is_first`` is true for the first snapshot of the trace.
        """
        clocks = ((_Clock.MONOTONIC, monotonic), (_Clock.REALTIME, realtime), (_Clock.BOOTTIME, boottime))
        snapshot = b"".join(
            length_field(_CLOCKS, varint_field(_CLOCK_ID, clock) + varint_field(_CLOCK_TIMESTAMP, time))
            for clock, time in clocks
        ) + varint_field(_PRIMARY_TRACE_CLOCK, _Clock.MONOTONIC)
        content = length_field(_TracePacket.CLOCK_SNAPSHOT, snapshot) + self._end
        if is_first:
            content += varint_field(_TracePacket.SEQUENCE_FLAGS, _SEQ_INCREMENTAL_STATE_CLEARED)
            content += varint_field(_TracePacket.FIRST_PACKET_ON_SEQUENCE, 1)
        return length_field(_PACKET, content)

    def track(self, descriptor: bytes) -> bytes:
        """Return the encoded TracePacket with ``descriptor``, the encoded TrackDescriptor of a track."""
        return length_field(_PACKET, length_field(_TracePacket.TRACK_DESCRIPTOR, descriptor) + self._end)

    def event(self, time: int, event: bytes) -> bytes:
        """Return the packet of an event at ``time``, CLOCK_MONOTONIC in nanoseconds."""
        content = b"".join(
            (self._timestamp, varint(time), self._track_event, varint(len(event)), event, self._event_end)
        )
        return self._packet + varint(len(content)) + content

    def loss(self, time: int, event: bytes) -> bytes:
        """Return the packet of an event before which events were lost; ``time`` is as in ``event``."""
        lost = varint_field(_TracePacket.PREVIOUS_PACKET_DROPPED, 1)
        lost += varint_field(_TracePacket.SEQUENCE_FLAGS, _SEQ_INCREMENTAL_STATE_CLEARED)
        content = varint_field(_TracePacket.TIMESTAMP, time) + length_field(_TracePacket.TRACK_EVENT, event)
        return length_field(_PACKET, content + self._event_end + lost)


# Tracks


def named_track(uuid: int, name: str) -> bytes:
    """Return the encoded TrackDescriptor of a track that belongs to no process; ``uuid`` identifies the track."""
    return varint_field(_TrackDescriptor.UUID, uuid) + text_field(_TrackDescriptor.NAME, name)


def counter_track(uuid: int, parent: int, name: str) -> bytes:
    """Return the encoded TrackDescriptor of a counter's track; ``parent`` is the UUID of the track above it."""
    ids = varint_field(_TrackDescriptor.UUID, uuid) + varint_field(_TrackDescriptor.PARENT_UUID, parent)
    return ids + text_field(_TrackDescriptor.NAME, name) + length_field(_TrackDescriptor.COUNTER, b"")


def process_track(uuid: int, pid: int, name: str | None) -> bytes:
    """Return the encoded TrackDescriptor of a process's track; None as ``name`` omits the process name."""
    process = varint_field(_PROCESS_PID, pid)
    if name is not None:
        process += text_field(_PROCESS_NAME, name)
    return varint_field(_TrackDescriptor.UUID, uuid) + length_field(_TrackDescriptor.PROCESS, process)


def thread_track(uuid: int, parent: int, pid: int, tid: int, name: str | None) -> bytes:
    """
    Return the encoded TrackDescriptor of a thread's track; ``parent`` is the UUID of the process's track.

    None as ``name`` omits the thread name.
    """
    thread = varint_field(_THREAD_PID, pid) + varint_field(_THREAD_TID, tid)
    if name is not None:
        thread += text_field(_THREAD_NAME, name)
    ids = varint_field(_TrackDescriptor.UUID, uuid) + varint_field(_TrackDescriptor.PARENT_UUID, parent)
    return ids + length_field(_TrackDescriptor.THREAD, thread)


# Events


@lru_cache(maxsize=4096)
def _event_start(kind: EventType, track: int, category: str, name: str) -> bytes:
    start = varint_field(_TrackEvent.TYPE, kind) + varint_field(_TrackEvent.TRACK_UUID, track)
    if kind is EventType.SLICE_END:
        return start
    return start + text_field(_TrackEvent.CATEGORIES, category) + text_field(_TrackEvent.NAME, name)


_ANNOTATION = varint(_TrackEvent.DEBUG_ANNOTATIONS << 3 | 2)


def event(kind: EventType, track: int, category: str, name: str, annotations: Sequence[bytes] = ()) -> bytes:
    """
    Return an encoded TrackEvent on the track with UUID ``track``; a SLICE_END event has no category and name.

    ``annotations`` are encoded DebugAnnotation messages.
    """
    parts = [_event_start(kind, track, category, name)]
    for annotation in annotations:
        parts += (_ANNOTATION, varint(len(annotation)), annotation)
    return b"".join(parts)


def counter(track: int, value: float) -> bytes:
    """Return the encoded TrackEvent that sets the counter whose track has UUID ``track`` to ``value``."""
    start = varint_field(_TrackEvent.TYPE, EventType.COUNTER) + varint_field(_TrackEvent.TRACK_UUID, track)
    if isinstance(value, int):
        return start + varint_field(_TrackEvent.COUNTER_VALUE, value)
    return start + double_field(_TrackEvent.DOUBLE_COUNTER_VALUE, value)


# Debug annotations: named values, or unnamed values in an array


@lru_cache(maxsize=4096)
def _name(name: str) -> bytes:
    return text_field(_DebugAnnotation.NAME, name) if name else b""


_UINT, _INT, _POINTER = (
    varint(field << 3)
    for field in (_DebugAnnotation.UINT_VALUE, _DebugAnnotation.INT_VALUE, _DebugAnnotation.POINTER_VALUE)
)


def unsigned(name: str, value: int) -> bytes:
    """Return an encoded DebugAnnotation with a uint64; an empty ``name`` omits the name."""
    return _name(name) + _UINT + varint(value)


def integer(name: str, value: int) -> bytes:
    """Return an encoded DebugAnnotation with an int64; an empty ``name`` omits the name."""
    return _name(name) + _INT + varint(value)


def pointer(name: str, value: int) -> bytes:
    """Return an encoded DebugAnnotation with an address, displayed in hexadecimal; an empty ``name`` omits the name."""
    return _name(name) + _POINTER + varint(value)


def string(name: str, value: str) -> bytes:
    """Return an encoded DebugAnnotation with a string in UTF-8; an empty ``name`` omits the name."""
    return _name(name) + text_field(_DebugAnnotation.STRING_VALUE, value)


def array(name: str, values: Sequence[bytes]) -> bytes:
    """Return an encoded DebugAnnotation with an array of ``values``, encoded annotations without names."""
    return _name(name) + b"".join([length_field(_DebugAnnotation.ARRAY_VALUES, value) for value in values])


def dictionary(name: str, values: Sequence[bytes]) -> bytes:
    """Return an encoded DebugAnnotation with a dictionary of ``values``, encoded annotations with names."""
    return dictionary_of(name, [entry(value) for value in values])


def entry(value: bytes) -> bytes:
    """Return an encoded annotation with a name as an encoded dictionary entry of a DebugAnnotation."""
    return length_field(_DebugAnnotation.DICT_ENTRIES, value)


def dictionary_of(name: str, entries: Sequence[bytes]) -> bytes:
    """Return an encoded DebugAnnotation with a dictionary of ``entries``, results of ``entry``."""
    return _name(name) + b"".join(entries)
