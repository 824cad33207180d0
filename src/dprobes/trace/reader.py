"""Read trace files, also those that are being written."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Self

from dprobes.errors import FormatError, reason_of
from dprobes.trace.content import LostRecords
from dprobes.trace.frames import FrameKind, FrameSplitter, number_in, split_json
from dprobes.trace.parser import TraceParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.trace.content import Damage, TraceOrigin, TraceRecord, TraceTables
    from dprobes.trace.mixedblock import Block

__all__ = ["TraceReader"]

_PIECE = 1 << 20


class TraceReader:
    """
    Read a trace file; ``position`` is behind the last whole frame that was read.

    ``read`` and ``blocks`` give what there is, and may be called again for what has come since. With ``on_damage``, to
    which it is told, damage is skipped.
    """

    def __init__(self, path: Path, on_damage: Callable[[Damage], None] | None = None) -> None:
        self.path = path
        self._skips = on_damage is not None
        self._parser = TraceParser(str(path), on_damage)
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise FormatError(f"'{path}': {reason_of(error)}") from error
        self._is_seekable = self._file.seekable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Where in the file reading goes on."""
        return self._parser.position

    @property
    def origin(self) -> TraceOrigin:
        """What the last HEADER that was read says."""
        return self._parser.origin

    @property
    def tables(self) -> Sequence[TraceTables]:
        """The latest keyed tables of each program, as far as the file was read."""
        return self._parser.tables

    @property
    def was_replaced(self) -> bool:
        """Whether the path leads to another file now, as after a limited writer has begun another one."""
        try:
            return not os.path.samestat(self.status, self.path.stat())
        except OSError:
            return True

    @property
    def part(self) -> int:
        """Which part of a trace the file begins with, 0 if that cannot be read; needs a file that can be sought in."""
        frames = FrameSplitter()
        with contextlib.suppress(OSError, FormatError, ValueError):
            frames.push(os.pread(self._file.fileno(), _PIECE, 0))
            if (frame := frames.pull()) is not None and frame.kind == FrameKind.HEADER:
                return number_in(split_json(frame, str(self.path)), "part")
        return 0

    @property
    def status(self) -> os.stat_result:
        """The status of the file, wherever it is now."""
        return os.fstat(self._file.fileno())

    def close(self) -> None:
        """Give up the file."""
        self._file.close()

    def read(self) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the records that are there; raise ``FormatError`` at damage, which a torn tail is not."""
        for found in self.blocks():
            if isinstance(found, LostRecords):
                yield found
            else:
                yield from found

    def blocks(self) -> Iterator[Block | LostRecords]:
        """Iterate over the same in blocks."""
        failed_at = -1
        while True:
            self._go_back()
            try:
                yield from self._parser.feed(b"")
                while data := self._next():
                    yield from self._parser.feed(data)
                self._parser.check_end()
            except FormatError as error:
                if error.offset != self.position:
                    raise
                # What is no frame may become one: a writer whose disk is full takes back what it wrote meanwhile.
                if failed_at != self.position and self._is_seekable:
                    failed_at = self.position
                    continue
                if not self._skips:
                    raise
                if self._skip():
                    continue
            return

    def _skip(self) -> bool:
        """Skip damage, and return whether something sound follows."""
        while not self._parser.skip(at_end=False):
            if data := self._next():
                self._parser.push(data)
                continue
            return self._parser.skip(at_end=True)
        return True

    def _go_back(self) -> None:
        """Go back behind the last whole frame: what followed it may have been cut off, and written anew."""
        if self._is_seekable:
            self._parser.forget()
            self._file.seek(self.position)

    def _next(self) -> bytes:
        try:
            return self._file.read(_PIECE) or b""
        except OSError as error:
            raise FormatError(f"'{self.path}': {reason_of(error)}") from error
