"""
The pipes between client and tracer: frames, and the messages in them.

A frame is ``u32 length | u8 kind | payload``, in host byte order. Records are the only frequent ones and are packed by
hand; all other payloads are pickled dataclasses, those of ``requests`` and ``reports``. Both ends are our own
processes, on pipes that nobody else can reach.
"""

from __future__ import annotations

import enum
import pickle
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "FrameReader",
    "Kind",
    "load_message",
    "pack_message",
    "pack_record",
    "unpack_record",
]

_FRAME = struct.Struct("=IB")
_RECORD = struct.Struct("=II")
_RECORD_FRAME = struct.Struct("=IBII")


class Kind(enum.IntEnum):
    """What a frame holds."""

    MESSAGE = 0
    RECORD = 1


def pack_message(message: object) -> bytes:
    """Return the frame of a message."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _FRAME.pack(len(payload), Kind.MESSAGE) + payload


def pack_record(program: int, probe: int, record: bytes) -> bytes:
    """Return the frame of a record of a program's probepoint."""
    return _RECORD_FRAME.pack(len(record) + _RECORD.size, Kind.RECORD, program, probe) + record


def unpack_record(payload: bytes) -> tuple[int, int, bytes]:
    """Return the program, its probepoint and the record in the payload of a RECORD frame."""
    program, probe = _RECORD.unpack_from(payload)
    return program, probe, payload[_RECORD.size :]


class FrameReader:
    """The frames in a byte stream, however it is split."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Add bytes and iterate over the frames that they complete."""
        pending = self._pending
        pending += data
        while len(pending) >= _FRAME.size:
            length, kind = _FRAME.unpack_from(pending)
            end = _FRAME.size + length
            if len(pending) < end:
                break
            payload = bytes(pending[_FRAME.size : end])
            # At once: whoever stops iterating gets the next frame the next time.
            del pending[:end]
            yield Kind(kind), payload


def load_message(payload: bytes) -> Any:
    """Return the message in the payload of a MESSAGE frame."""
    return pickle.loads(payload)  # noqa: S301 - both ends are ours
