"""The state of an existing trace file for a writer that continues it, and how much of its end is to be cut off."""

from __future__ import annotations

import os

from dprobes.errors import FormatError, SinkError
from dprobes.lazydataclass import dataclass
from dprobes.trace.frames import READABLE, VERSION, Frame, FrameKind, FrameSplitter, number_in, split_json, torn_head

__all__ = ["Sound", "sound_part"]

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sound:
    """Say up to where a file is sound, and which part of a trace it is."""

    end: int
    part: int


def sound_part(file: int, name: str) -> Sound:
    """
    Return what of a trace file can be kept; the rest is torn.

    Torn is what a killed writer leaves, the beginning of a frame, and what a power failure leaves: zeros, or a last
    frame with a wrong check sum. Raise ``SinkError`` if there is anything else, which nobody wants to lose.
    """
    frames = FrameSplitter()
    part = at = 0
    try:
        while data := os.pread(file, _PIECE, at):
            at += len(data)
            frames.push(data)
            while (frame := frames.pull()) is not None:
                if frame.kind == FrameKind.HEADER:
                    part = _part_of(frame, name)
                elif frame.position == 0:
                    raise _refusal(name, "is not a trace file")
        is_torn = frames.position > 0 or torn_head(os.pread(file, _PIECE, 0), at) == FrameKind.HEADER
    except (FormatError, ValueError):
        is_torn = frames.position > 0 and _is_torn(file, frames.position, os.fstat(file).st_size)
    if at and not is_torn:
        raise _refusal(name, f"is damaged at byte {frames.position}" if frames.position else "is not a trace file")
    return Sound(frames.position, part)


def _part_of(header: Frame, name: str) -> int:
    said = split_json(header, name)
    if (version := number_in(said, "version")) not in READABLE:
        raise _refusal(name, f"has version {version} of the trace format, expected {VERSION}")
    return number_in(said, "part") if "part" in said else 0


def _refusal(name: str, what: str) -> SinkError:
    return SinkError(
        f"'{name}' {what}: records cannot be appended to it", hint="move it away, or write to another file"
    )


def _is_torn(file: int, position: int, size: int) -> bool:
    """Return whether what is at ``position``, which is no sound frame, is the torn end of a file."""
    return torn_head(os.pread(file, _PIECE, position), size - position) is not None or _are_zeros(file, position)


def _are_zeros(file: int, position: int) -> bool:
    while data := os.pread(file, _PIECE, position):
        if data.strip(b"\0"):
            return False
        position += len(data)
    return True
