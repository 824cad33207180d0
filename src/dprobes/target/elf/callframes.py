"""
How deep the stack is at an instruction, from the unwind table (``.eh_frame``) of a file.

Bytes that are not as they should be count as no answer.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.unwind.framerules import FrameAddress, Row

__all__ = ["CallFrames"]


class CallFrames:
    """Answer questions about the call frames of one file."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._tables: dict[int, list[Row] | None] = {}

    def is_at_entry(self, address: int) -> bool | None:
        """
        Return whether the return address is on top of the stack at ``address``, as it is when a function begins.

        None if the file does not say.
        """
        from dprobes.target.unwind.stackwalk import COLUMNS  # few programs ask

        frame = self.frame_address(address)
        columns = COLUMNS.get(self._elf.machine)
        if frame is None or frame.register is None or columns is None:
            return None
        return frame.register == columns.sp and frame.offset == self._elf.word_size

    def frame_address(self, address: int) -> FrameAddress | None:
        """Return where the canonical frame address is at a link address; None if the file does not say."""
        description = self._elf.frames.description_of(self._elf, address)
        if description is None:
            return None
        if description not in self._tables:
            self._tables[description] = _rows(self._elf, description)
        rows = self._tables[description]
        if rows is None:
            return None
        number = bisect_right([row.start for row in rows], address) - 1
        return rows[number].frame if number >= 0 else None


def _rows(elf: ElfFile, description: int) -> list[Row] | None:
    """Return the rows of a function in order; None if its description cannot be read."""
    from dprobes.target.unwind.frameentries import read_description
    from dprobes.target.unwind.framerules import rows_of

    try:
        return rows_of(read_description(elf, description), elf.word_size)
    except (TargetError, struct.error, IndexError, ValueError):
        return None
