"""
Module that another process has described as far as the probe program needs it.

This process does not read the file, so a malicious file cannot exhaust its time and memory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import Dynamic, ElfFile
from dprobes.target.elf.elf_headers import Headers
from dprobes.target.elf.file_contents import KnownBytes
from dprobes.target.module_symbols import SymbolTable
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.elf.elf_headers import LoadSegment
    from dprobes.target.elf.file_contents import Contents

__all__ = [
    "Outline",
    "OutlinedModule",
    "cheap_sites_in",
    "first_executed",
    "first_executed_in",
    "last_executed",
    "last_executed_in",
    "return_address_user",
    "return_address_user_in",
    "stack_user",
]

# Files whose code must not have uretprobes, because code other than ``ret`` reads return addresses.
# A uretprobe replaces the return address of a running function by that of a page of the kernel's. Go's runtime finds an
# unknown address there when it moves or walks a stack. An exception or a panic that unwinds such a frame finds the end
# of the stack, and ends the program. When the program switches to another stack, the kernel takes the probed calls of
# the old one for abandoned, and a return from one of them gets SIGILL. A breakpoint at the function's return
# instructions (``function_exits``) does none of this; ``tests/integration/ebpf/test_uretprobes.py`` shows that.
# The marks are names that toolchains leave in a file, also when it is stripped.


_GO_SECTIONS = frozenset((".go.buildinfo", ".gopclntab", ".note.go.buildid", ".go.pltinit"))
_GO_MARK = b"\xff Go buildinf:"
"""Beginning of the build information that ``go version FILE`` reads."""

_ENDS_IT = "and what meets a uretprobe on its way up the stack ends the program"
_MARKS = (
    (b"__gxx_personality_v0\0", f"uses C++ exceptions, {_ENDS_IT}"),
    (b"St9exception\0", f"uses C++ exceptions, {_ENDS_IT}"),
    (b"rust_eh_personality\0", f"uses Rust panics, {_ENDS_IT}"),
    (b"/rustc/", f"uses Rust panics, {_ENDS_IT}"),
    (b"RUST_BACKTRACE", f"uses Rust panics, {_ENDS_IT}"),  # Debian's Rust builds in /usr/src/rustc-VERSION
    (b"__objc_personality_v0\0", f"uses Objective-C exceptions, {_ENDS_IT}"),
    (b"__gnat_personality_v0\0", f"uses Ada exceptions, {_ENDS_IT}"),
    (b"_d_eh_personality\0", f"uses D exceptions, {_ENDS_IT}"),
    (b"__gdc_personality_v0\0", f"uses D exceptions, {_ENDS_IT}"),
    (b"swapcontext\0", "switches stacks, and a return by way of a uretprobe on another stack ends the program"),
    (b"jump_fcontext\0", "switches stacks, and a return by way of a uretprobe on another stack ends the program"),
)
_C_LIBRARY = "libc.so.6"
"""Library that defines ``swapcontext``, and does not use it."""


def return_address_user(elf: ElfFile) -> str | None:
    """
    Return the reason why a file must not have uretprobes, or None if none is known.

    The reason is a clause with the subject "it".
    """
    if any(section.name in _GO_SECTIONS for section in elf.sections) or elf.data.find(_GO_MARK) >= 0:
        return "it is a Go program, and Go's runtime reads the return addresses on its stacks"
    if elf.soname == _C_LIBRARY:
        return None
    clause = stack_user(elf.data)
    return f"it {clause}" if clause else None


def stack_user(data: Contents) -> str | None:
    """
    Return the reason, a clause without its subject, if marks in a file show that it unwinds or switches stacks.

    Return None if there is no mark.
    """
    return next((clause for mark, clause in _MARKS if data.find(mark) >= 0), None)


# The first and the last of a module's own code that is executed in a process while it is mapped and relocated.
# A program starts at its entry. A library's initialisation functions are called, once it is relocated, before any other
# code of it (System V ABI, "Initialization and Termination Functions"). Exceptions are IFUNC resolvers, and libraries
# that depend on each other.


_DT_INIT, _DT_INIT_ARRAY, _DT_INIT_ARRAYSZ = 12, 25, 27
_DT_FINI, _DT_FINI_ARRAY, _DT_FINI_ARRAYSZ = 13, 26, 28
_DT_RELA, _DT_RELASZ = 7, 8
_RELATIVE, _ABSOLUTE = 8, 1
"""
Kinds of relocations of addresses.

R_X86_64_RELATIVE has the address as its addend; R_X86_64_64 adds the value of a symbol. On i386, addresses are in the
relocated words themselves.
"""
_DT_SYMTAB = 6
_SYMBOL = struct.Struct("=IBBHQQ")
"""Elf64_Sym: u32 name, u8 info, u8 other, u16 section, u64 value, u64 size."""


def first_executed(elf: ElfFile) -> tuple[int, ...]:
    """
    Return the link addresses of code that may be executed first: the entry and initialisation functions.

    Return an empty tuple if they are unknown.
    """
    values = elf.dynamic.values
    found = {elf.entry: None, values.get(_DT_INIT, 0): None}
    array = values.get(_DT_INIT_ARRAY, 0)
    if array and values.get(_DT_INIT_ARRAYSZ, 0) >= elf.word_size:
        found[_pointer(elf, array)] = None
    return tuple(address for address in found if address and elf.code_range(address) is not None)


def last_executed(elf: ElfFile) -> tuple[int, ...]:
    """
    Return the link address of the last function that is called before a library is unmapped.

    Return an empty tuple if it is unknown.
    """
    if elf.soname is None and elf.entry:
        return ()  # a program stays mapped until its process ends
    values = elf.dynamic.values
    address = values.get(_DT_FINI, 0)
    array = values.get(_DT_FINI_ARRAY, 0)
    if not address and array and values.get(_DT_FINI_ARRAYSZ, 0) >= elf.word_size:
        address = _pointer(elf, array)  # they are called in reverse order, and before the other one
    return (address,) if address and elf.code_range(address) is not None else ()


def _pointer(elf: ElfFile, place: int) -> int:
    """Return the link address in the pointer at the link address ``place``, or 0 if unknown."""
    try:
        value = int.from_bytes(elf.read(place, elf.word_size), elf.byte_order)
    except TargetError:
        return 0
    return value or (_relocated(elf, place) if elf.word_size == 8 else 0)


def _relocated(elf: ElfFile, place: int) -> int:
    values = elf.dynamic.values
    table, size = values.get(_DT_RELA, 0), values.get(_DT_RELASZ, 0)
    entry = struct.Struct(f"{elf.struct_prefix}QQq")
    try:
        data = elf.read(table, size - size % entry.size) if table else b""
        for offset, info, addend in entry.iter_unpack(data):
            if offset == place and info & 0xFFFF_FFFF == _RELATIVE:
                return int(addend)
            if offset == place and info & 0xFFFF_FFFF == _ABSOLUTE:
                symbol = elf.read(values.get(_DT_SYMTAB, 0) + _SYMBOL.size * (info >> 32), _SYMBOL.size)
                return int.from_bytes(symbol[8:16], elf.byte_order) + int(addend)
    except TargetError:
        pass
    return 0


class Outline(NamedTuple):
    """
    Description of a file of ``size`` bytes.

    ``pieces`` has the bytes of instructions by file offset. ``starts`` has the requested file offsets at which
    functions start, and ``moves`` the distances in bytes by which a uprobe may move there (``uprobe_sites``).
    ``own_places`` has the file offsets of functions that an engine requested by name. The other attributes are results
    of the functions with the same names in this module.
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
    """Module created from an outline. It has no symbols; ``path`` is for messages."""

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
        """Return the link address of a place if a function starts there, else None."""
        return self.elf.link_address(file_offset) if file_offset in self.outline.starts else None


def cheap_sites_in(module: Module, instructions: Sequence[DecodedInstruction]) -> list[int]:
    """
    Return for each instruction the distance in bytes by which a uprobe may move to be faster.

    See ``uprobe_sites``.
    """
    if isinstance(module, OutlinedModule):
        return [module.outline.moves.get(instruction.offset, 0) for instruction in instructions]
    from dprobes.target.code.uprobe_sites import cheap_sites

    return cheap_sites(module, instructions)


def first_executed_in(module: Module) -> tuple[int, ...]:
    """Return the link addresses of code that may be executed first, as ``first_executed`` does."""
    return module.outline.first_executed if isinstance(module, OutlinedModule) else first_executed(module.elf)


def last_executed_in(module: Module) -> tuple[int, ...]:
    """Return the link address of the function that is executed last, as ``last_executed`` does."""
    return module.outline.last_executed if isinstance(module, OutlinedModule) else last_executed(module.elf)


def return_address_user_in(module: Module) -> str | None:
    """Return the reason why a file must not have uretprobes, as ``return_address_user`` does."""
    if isinstance(module, OutlinedModule):
        return module.outline.return_address_user
    return return_address_user(module.elf)
