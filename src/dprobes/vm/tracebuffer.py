"""
The stack-trace buffer of one hit.

Its bytes are those of section 1.8 of the recovered reference::

    once       01 | u16 n | module name      s64 offset | u16 program id | u16 major | u16 minor
               02 | u16 number of traces
    per trace  word code | word handler or -1 | word parm1 | word parm2
               03 | u16 number of frames
    per frame  word called address | word return address          innermost first, the outermost one left out
               04 | u16 n | n RPN stack words
               05 | u16 n | n local variables
               06 | u16 n | n global variables

Numbers are in the target's byte order. ``stacktraces`` says what of a machine they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder

__all__ = ["FullError", "TraceBuffer"]


class FullError(Exception):
    """Report that something does not fit."""


class TraceBuffer:
    """Collect the stack traces of one hit; ``count_at`` is where their number stands, None before the first one."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.position = 0
        self.count_at: int | None = None
        self._count = 0

    def contents(self) -> bytes:
        """Return the bytes up to STP."""
        return bytes(self._data[: self.position])

    def purge(self) -> None:
        """Empty the buffer; the next trace starts with the header again."""
        self.position = 0
        self.count_at = None

    def move(self, position: int) -> None:
        """Set STP; bytes that nothing wrote are zero."""
        self._data.extend(bytes(max(0, position - len(self._data))))
        self.position = position

    def append(self, data: bytes, limit: int) -> None:
        """Write at STP and advance it; raise ``FullError`` if the buffer would be larger than ``limit``."""
        if self.position + len(data) > limit:
            raise FullError
        self._data[self.position : self.position + len(data)] = data
        self.position += len(data)

    def start_counting(self) -> None:
        """Note that the number of traces stands in the two bytes before STP, and that there are none yet."""
        self.count_at, self._count = self.position - 2, 0

    def count(self, byte_order: ByteOrder) -> None:
        """Count a trace."""
        self._count += 1
        at = self.count_at
        assert at is not None
        self._data[at : at + 2] = (self._count & 0xFFFF).to_bytes(2, byte_order)
