"""
A module of which another process has said what a program needs to know; the file itself is not read.

So whoever uses it spends no time and no memory on a file that may have been made to take both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dprobes.lazydataclass import dataclass
from dprobes.target.code.returnsafety import return_address_user
from dprobes.target.code.starts import first_executed, last_executed
from dprobes.target.elf.contents import KnownBytes
from dprobes.target.elf.file import Dynamic, ElfFile
from dprobes.target.elf.headers import Headers
from dprobes.target.location import Module
from dprobes.target.symbols import SymbolTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.elf.headers import LoadSegment

__all__ = [
    "Outline",
    "OutlinedModule",
    "cheap_sites_in",
    "first_executed_in",
    "last_executed_in",
    "return_address_user_in",
]


@dataclass(frozen=True, slots=True)
class Outline:
    """
    Hold what is known of a file of ``size`` bytes.

    ``pieces`` are the bytes of instructions by file offset. ``starts`` are the file offsets, of those that were asked
    about, at which functions start, ``moves`` by how many bytes a uprobe may move there (``cheapsites``).
    ``own_places`` are the file offsets of functions that an engine asked for by name. The others are what the methods
    of ``Module`` of these names return.
    """

    size: int
    word_size: Literal[4, 8]
    machine: str
    type: str
    entry: int
    build_id: str | None
    soname: str | None
    segments: tuple[LoadSegment, ...]
    pieces: Mapping[int, bytes]
    starts: frozenset[int]
    moves: Mapping[int, int]
    first_executed: tuple[int, ...]
    last_executed: tuple[int, ...]
    return_address_user: str | None
    own_places: Mapping[str, int]


class OutlinedModule(Module):
    """Answer for a module from its outline, at ``path`` for people; it has no symbols."""

    def __init__(self, path: Path, outline: Outline) -> None:
        headers = Headers(
            word_size=outline.word_size,
            byte_order="little",
            machine=outline.machine,
            type=outline.type,
            entry=outline.entry,
            sections=(),
            load_segments=outline.segments,
            is_debug_only=False,
            build_id=outline.build_id,
            interpreter=None,
            dynamic=None,
            eh_frame_header=None,
        )
        elf = ElfFile(path, KnownBytes(outline.size, outline.pieces), headers)
        elf.dynamic = Dynamic({}, (), outline.soname)
        super().__init__(elf, SymbolTable((), code_range=elf.code_range))
        self.outline = outline

    def function_start(self, file_offset: int) -> int | None:
        """Return the link address of a place if a function starts there."""
        return self.elf.link_address(file_offset) if file_offset in self.outline.starts else None


def cheap_sites_in(module: Module, instructions: Sequence[DecodedInstruction]) -> list[int]:
    """Return for each instruction by how many bytes a uprobe there may move to be cheaper; see ``cheapsites``."""
    if isinstance(module, OutlinedModule):
        return [module.outline.moves.get(instruction.offset, 0) for instruction in instructions]
    from dprobes.target.code.cheapsites import cheap_sites

    return cheap_sites(module, instructions)


def first_executed_in(module: Module) -> tuple[int, ...]:
    """Return the link addresses of the instructions of which one is executed first; see ``starts``."""
    return module.outline.first_executed if isinstance(module, OutlinedModule) else first_executed(module.elf)


def last_executed_in(module: Module) -> tuple[int, ...]:
    """Return the link address of the last function that is called before a library is unmapped; see ``starts``."""
    return module.outline.last_executed if isinstance(module, OutlinedModule) else last_executed(module.elf)


def return_address_user_in(module: Module) -> str | None:
    """Return what in the file looks at return addresses, as a clause about ``it``; see ``returnsafety``."""
    if isinstance(module, OutlinedModule):
        return module.outline.return_address_user
    return return_address_user(module.elf)
