"""
How deep the stack is at an instruction, from the unwind table (``.eh_frame``), read through pyelftools.

Of each description only what one question needs is parsed: the table of a large library takes seconds as a whole.
Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, 6.4.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dprobes.target.elf import ElfFile

__all__ = ["CallFrames"]

_STACK_POINTER = {"i386": 4, "x86_64": 7}  # DWARF's numbers, in the ABI supplements of the two processors


class CallFrames:
    """Answer questions about the call frames of one file."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._tables: dict[int, list[dict[Any, Any]] | None] = {}
        self._readers: dict[int, Any] = {}

    def is_at_entry(self, address: int) -> bool | None:
        """
        Return whether the return address is on top of the stack at ``address``, as it is when a function begins.

        None if the file does not say.
        """
        description = self._elf.frames.description_of(self._elf, address)
        if description is None:
            return None
        if description not in self._tables:
            self._tables[description] = self._rows(description)
        rows = self._tables[description]
        row = None if rows is None else next((row for row in reversed(rows) if row["pc"] <= address), None)
        if row is None or row["cfa"].reg is None:
            return None
        return bool(
            row["cfa"].reg == _STACK_POINTER.get(self._elf.machine) and row["cfa"].offset == self._elf.word_size
        )

    def _rows(self, description: int) -> list[dict[Any, Any]] | None:
        segment = next((s for s in self._elf.load_segments if 0 <= description - s.vaddr < s.filesz), None)
        if segment is None:
            return None
        if segment.vaddr not in self._readers:
            from elftools.dwarf.callframe import CallFrameInfo
            from elftools.dwarf.structs import DWARFStructs

            data = self._elf.data[segment.offset : segment.offset + segment.filesz]
            structs = DWARFStructs(
                little_endian=self._elf.byte_order == "little", dwarf_format=32, address_size=self._elf.word_size
            )
            stream = io.BytesIO(data)
            self._readers[segment.vaddr] = CallFrameInfo(stream, len(data), segment.vaddr, structs, for_eh_frame=True)
        try:
            # There is no public way to read a single entry.
            entry = self._readers[segment.vaddr]._parse_entry_at(description - segment.vaddr)  # noqa: SLF001
            table: list[dict[Any, Any]] = entry.get_decoded().table
        except Exception:  # noqa: BLE001 - pyelftools lets through whatever its helpers meet
            return None
        return table
