r"""
Go programs: the version of Go that built a file, and the calling convention of its functions.

Since Go 1.17, functions take and return values in registers on amd64 (ABIInternal; cmd/compile/abi-internal.md in Go's
source). Functions in assembly keep the older convention ABI0, with all values on the stack. If a name has both, the
linker names the ABI0 function ``NAME.abi0`` (``mangleABIName`` in cmd/link). Functions that cgo links follow the
convention of C.

The section ``.go.buildinfo`` begins as follows (debug/buildinfo in Go's source)::

     0  14  "\xff Go buildinf:"
    14   1  size of a pointer
    15   1  flags; 2: the version is here, since Go 1.18
    16   8  without that flag: address of a string, which is an address and a length
    32      with it: length of the version as a varint, then the version
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.module_symbols import is_clone

if TYPE_CHECKING:
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["Convention", "convention_of", "go_version", "passes_in_registers"]

_SECTION = ".go.buildinfo"
_MAGIC = b"\xff Go buildinf:"
_POINTER_SIZE_AT, _FLAGS_AT, _POINTER_AT, _INLINE_AT = 14, 15, 16, 32
_IS_INLINE = 2
_SEARCHED = 64 << 10
"""Size in bytes of the part of a data segment that Go itself searches for the mark."""

_VERSION = re.compile(r"go(\d{1,3})\.(\d{1,3})")
_REGISTERS_SINCE = (1, 17)


class Convention(Enum):
    """The conventions by which functions of a Go program take their arguments."""

    GO = "Go's registers (ABIInternal)"
    ABI0 = "the stack (Go's ABI0)"
    C = "C's registers (System V ABI)"


def go_version(elf: ElfFile) -> tuple[int, int] | None:
    """Return the version of Go that built a file, such as (1, 19), or None if Go did not build it, or is unknown."""
    try:
        return _version_in(elf)
    except TargetError:
        return None


def passes_in_registers(elf: ElfFile) -> bool:
    """Return whether Go functions of a file take arguments in registers (ABIInternal), and not on the stack."""
    version = go_version(elf) if elf.machine == "x86_64" else None
    return version is not None and version >= _REGISTERS_SINCE


def convention_of(name: str | None) -> Convention:
    """
    Return the calling convention of a function of a Go program, by its symbol.

    Return GO for None, a function without a symbol.
    """
    if name is None:
        return Convention.GO
    if name.endswith(".abi0"):
        return Convention.ABI0
    # Names of Go's functions have the package before a dot.
    return Convention.C if "." not in name.lstrip(".") or is_clone(name) else Convention.GO


def _version_in(elf: ElfFile) -> tuple[int, int] | None:
    start = _information(elf)
    if start is None:
        return None
    head = elf.bytes_at(start, _INLINE_AT, f"the section {_SECTION}")
    if head[_FLAGS_AT] & _IS_INLINE:
        text = elf.data[start + _INLINE_AT + 1 : start + _INLINE_AT + 33]
    else:
        size = head[_POINTER_SIZE_AT]
        if size != elf.word_size:
            return None
        string = elf.read(int.from_bytes(head[_POINTER_AT : _POINTER_AT + size], elf.byte_order), 2 * size)
        length = min(int.from_bytes(string[size:], elf.byte_order), 32)
        text = elf.read(int.from_bytes(string[:size], elf.byte_order), length)
    match = _VERSION.match(text.decode("ascii", "replace"))
    return (int(match[1]), int(match[2])) if match is not None else None


def _information(elf: ElfFile) -> int | None:
    """
    Return the file offset of the contents of ``.go.buildinfo``, or None if there are none.

    They are searched only in a file without section headers.
    """
    if (section := elf.section(_SECTION)) is not None:
        return section.offset if elf.data[section.offset : section.offset + len(_MAGIC)] == _MAGIC else None
    if elf.sections:
        return None
    for segment in elf.load_segments:  # a file without section headers
        at = elf.data.find(_MAGIC, segment.offset, segment.offset + min(segment.filesz, _SEARCHED))
        if at >= 0:
            return at
    return None
