"""Compressed frames of trace files, by the package zstandard. Sizes are known before memory is taken for them."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Protocol

from dprobes.errors import FormatError, SinkError
from dprobes.trace.frames import BODY_MAX, Frame, FrameKind, frame

if TYPE_CHECKING:
    import types

__all__ = ["Compressor", "compressor", "decompressed"]

_SIZE = struct.Struct("<I")
_LEVEL = 3
_HINT = "pip install 'dprobes[zstd]'"


class Compressor(Protocol):
    """Make one frame of many."""

    def __call__(self, frames: bytes) -> bytes:
        """Return a COMPRESSED frame that holds ``frames``."""


def compressor(method: str) -> Compressor:
    """Return the compressor of that name, of which there is "zstd"."""
    if method != "zstd":
        raise SinkError(f"there is no compression '{method}'", hint="write zstd")
    try:
        import zstandard
    except ImportError:
        raise SinkError("compressed trace files need the Python package zstandard", hint=_HINT) from None
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    return lambda frames: frame(FrameKind.COMPRESSED, _SIZE.pack(len(frames)) + compress(frames))


def decompressed(outer: Frame, name: str) -> bytes:
    """Return the frames in a COMPRESSED one of the file ``name``; raise ``FormatError`` if it does not hold them."""
    zstandard = _zstandard(name)
    if len(outer.body) < _SIZE.size:
        raise FormatError(f"a compressed frame of '{name}' does not say its size", offset=outer.position)
    (size,) = _SIZE.unpack_from(outer.body)
    if size > BODY_MAX:
        raise FormatError(
            f"a compressed frame of '{name}' is said to hold {size} bytes, at most {BODY_MAX} are allowed",
            offset=outer.position,
        )
    packed = outer.body[_SIZE.size :]
    content: bytes | None = None
    with contextlib.suppress(zstandard.ZstdError):
        # What the data says of its size decides about the memory that the library takes.
        if zstandard.get_frame_parameters(packed).content_size == size:
            content = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    if content is None or len(content) != size:
        raise FormatError(f"a compressed frame of '{name}' does not hold what it says", offset=outer.position)
    return content


def _zstandard(name: str) -> types.ModuleType:
    try:
        import zstandard
    except ImportError:
        raise FormatError(
            f"'{name}' is compressed: reading it needs the Python package zstandard", hint=_HINT
        ) from None
    return zstandard
