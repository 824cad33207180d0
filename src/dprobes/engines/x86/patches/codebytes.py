"""
The code of a module where a process has mapped it: as it is in the file, as it is with jumps, and who needs which byte.

A byte is *written* by one jump at most. A punned jump *relies* on bytes behind it: those must stay as they are, be they
the file's or those of another jump.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.engines.x86.patches.branchtargets import CodeRange, code_ranges, control_flow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.x86.patches.branchtargets import ControlFlow
    from dprobes.target.location import Module

__all__ = ["CodeBytes", "ModuleCode"]


class CodeBytes:
    """The bytes from one run-time address to another (excluded)."""

    __slots__ = ("current", "end", "original", "relied", "start", "written")

    def __init__(self, start: int, original: bytes) -> None:
        self.start = start
        self.end = start + len(original)
        self.original = original
        self.current = bytearray(original)
        self.written = bytearray(len(original))
        self.relied = bytearray(len(original))
        """How many jumps rely on each byte: those of the four bytes before it at most, with the one that wrote it."""

    def is_written(self, address: int, size: int) -> bool:
        """Return whether one of the bytes is a jump's."""
        place = address - self.start
        return any(self.written[place : place + size])

    def is_relied_on(self, address: int, size: int) -> bool:
        """Return whether a jump relies on one of the bytes."""
        place = address - self.start
        return any(self.relied[place : place + size])

    def is_free(self, address: int, size: int) -> bool:
        """Return whether bytes may be written."""
        return not self.is_written(address, size) and not self.is_relied_on(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Write bytes that nobody has written or relies on."""
        place = address - self.start
        self.current[place : place + len(data)] = data
        self.written[place : place + len(data)] = b"\x01" * len(data)

    def rely(self, address: int, end: int, change: int = 1) -> None:
        """Note that one jump more relies on bytes, or with ``change`` -1 that one relies on them no more."""
        for place in range(address - self.start, end - self.start):
            self.relied[place] += change

    def restore(self, address: int, size: int) -> None:
        """Give bytes that nobody relies on their original content."""
        assert not self.is_relied_on(address, size)
        place = address - self.start
        self.current[place : place + size] = self.original[place : place + size]
        self.written[place : place + size] = bytes(size)


class ModuleCode:
    """
    The code of a module that is mapped ``bias`` bytes above its link addresses, with its control flow.

    ``size`` is that of the whole image: no farther is what code names in its own module.
    """

    def __init__(self, ranges: Iterable[CodeRange], flow: ControlFlow, bias: int, size: int) -> None:
        self.bias = bias
        self.flow = flow
        self.size = size
        self.ranges = [CodeBytes(code.start + bias, code.data) for code in ranges]
        self._starts = [code.start for code in self.ranges]

    @classmethod
    def of(cls, module: Module, bias: int) -> ModuleCode:
        """Return the code of a module."""
        ranges, segments = code_ranges(module), module.elf.load_segments
        size = max(s.vaddr + s.memsz for s in segments) - min(s.vaddr for s in segments)
        return cls(ranges, control_flow(module, ranges), bias, size)

    def unchanged(self) -> ModuleCode:
        """Return the same code without any jump in it."""
        return self.mapped_at(self.bias)

    def mapped_at(self, bias: int) -> ModuleCode:
        """Return the code of the same module where it is mapped elsewhere, without any jump in it."""
        ranges = [CodeRange(code.start - self.bias, code.end - self.bias, code.original) for code in self.ranges]
        return ModuleCode(ranges, self.flow, bias, self.size)

    def around(self, address: int) -> CodeBytes | None:
        """Return the code that holds an address."""
        i = bisect_right(self._starts, address) - 1
        return self.ranges[i] if i >= 0 and address < self.ranges[i].end else None
