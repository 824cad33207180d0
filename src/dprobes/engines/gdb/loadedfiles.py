"""
The files that a process behind a stub has loaded, and where: from its own memory.

The kernel tells a program of itself in the auxiliary vector (getauxval(3)), and the dynamic linker keeps a list of what
it has loaded for debuggers (``struct r_debug`` and ``struct link_map`` in glibc's elf/link.h)::

    auxv ─► AT_PHDR ─► PT_DYNAMIC ─► DT_DEBUG ─► r_debug: version │ r_map │ r_brk │ r_state
                                                            │
                                                            └─► link_map: l_addr │ l_name │ l_ld │ l_next │ l_prev

``l_addr`` is by how much a file is above its link addresses. The linker calls ``r_brk``, an empty function, before and
after each change of the list; ``r_state`` says which one that is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import EngineError
from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.engines.gdb.target import StubTarget

__all__ = ["LoadedFile", "ProcessImage", "process_image"]

_AT_NULL, _AT_PHDR, _AT_PHENT, _AT_PHNUM, _AT_ENTRY, _AT_UID, _AT_EXECFN = 0, 3, 4, 5, 9, 11, 31
_PT_DYNAMIC, _PT_PHDR = 2, 6
_DT_NULL, _DT_DEBUG = 0, 21
_RT_DELETE = 2
_FILES_MAX = 4096
_DYNAMIC_MAX = 4096
_NAME_MAX = 4096
_PAGE = 4096


class LoadedFile(NamedTuple):
    """A file by its path in the target, "" for the program itself, and how far above its link addresses it is."""

    path: str
    bias: int


@dataclass(frozen=True, slots=True)
class ProcessImage:
    """
    Hold what a process has been told by its kernel: where its program is, and where it begins.

    ``path`` is what the program was started as, "" if that is not told. ``debug_place`` is where the address of r_debug
    is, None in a program without a dynamic linker.
    """

    bias: int
    header: int
    """Where the ELF header of the program is."""
    entry: int
    uid: int
    debug_place: int | None
    word_size: int
    path: str = ""
    has_descriptors: bool = False
    """Whether a function's address is that of a descriptor (64-bit PowerPC), whose first word is that of the code."""

    def code_of(self, target: StubTarget, function: int) -> int | None:
        """Return where the code of a function is; one of the program that the linker has not relocated is moved."""
        if not self.has_descriptors:
            return function
        code = target.word(function, self.word_size)
        return code + self.bias if code is not None and code < self.bias else code

    def loaded_files(self, target: StubTarget) -> tuple[LoadedFile, ...]:
        """Return the files that are loaded by now, the program first."""
        entries = (LoadedFile(_text(target, name), bias) for _, bias, name in self.linker_entries(target))
        return (LoadedFile("", self.bias), *(each for each in entries if each.path))

    def linker_entries(self, target: StubTarget) -> Iterator[tuple[int, int, int]]:
        """Iterate over the entries of the dynamic linker's list: where each is, its ``l_addr``, and its ``l_name``."""
        at = self._debug(target, 1)
        seen: set[int] = set()
        while at and at not in seen and len(seen) < _FILES_MAX:
            seen.add(at)
            bias, name, _, following = (target.word(at + n * self.word_size, self.word_size) for n in range(4))
            if bias is None or following is None:
                break
            yield at, bias, name or 0
            at = following

    def headers(self, target: StubTarget) -> tuple[int, ...]:
        """Return where the ELF headers of the program and of the files that are loaded by now are."""
        return (self.header, *(file.bias for file in self.loaded_files(target) if file.path))

    def linker_breakpoint(self, target: StubTarget) -> int | None:
        """Return the address of ``r_brk``, None as long as the dynamic linker has not set it."""
        function = self._debug(target, 2)
        return self.code_of(target, function) if function else None

    def is_unloading(self, target: StubTarget) -> bool:
        """Return whether the dynamic linker is about to take files away."""
        return self._debug(target, 3) & 0xFFFF_FFFF == _RT_DELETE

    def _debug(self, target: StubTarget, field: int) -> int:
        """Return a word of r_debug, 0 if there is none yet."""
        if self.debug_place is None:
            return 0
        start = target.word(self.debug_place, self.word_size)
        return (target.word(start + field * self.word_size, self.word_size) or 0) if start else 0


def _text(target: StubTarget, address: int) -> str:
    data = bytearray()
    while address and len(data) < _NAME_MAX:
        piece = target.read(address + len(data), 64 - (address + len(data)) % 64)
        end = piece.find(b"\0")
        data += piece if end < 0 else piece[:end]
        if end >= 0 or not piece:
            break
    return data.decode("utf-8", "surrogateescape")


def process_image(target: StubTarget, word_size: int, *, has_descriptors: bool = False) -> ProcessImage | None:
    """Return what is known of a process, None if the stub has no auxiliary vector: it is no process of Linux."""
    data = target.stub.read_object("auxv")
    if data is None:
        return None
    order = "<" if target.byte_order == "little" else ">"
    entry = struct.Struct(f"{order}{'QQ' if word_size == 8 else 'II'}")
    vector: dict[int, int] = {}
    for key, value in entry.iter_unpack(data[: len(data) // entry.size * entry.size]):
        if key == _AT_NULL:
            break
        vector[key] = value
    headers = _program_headers(target, vector, word_size, order)
    bias = next((vector[_AT_PHDR] - address for kind, address in headers if kind == _PT_PHDR), 0)
    dynamic = next((bias + address for kind, address in headers if kind == _PT_DYNAMIC), None)
    place = None if dynamic is None else _place_of_debug(target, dynamic, entry)
    header = vector.get(_AT_PHDR, 0) & -_PAGE  # program headers are in the first page, behind it
    path = _text(target, vector.get(_AT_EXECFN, 0))
    return ProcessImage(
        bias, header, vector.get(_AT_ENTRY, 0), vector.get(_AT_UID, 0), place, word_size, path, has_descriptors
    )


def _program_headers(
    target: StubTarget, vector: Mapping[int, int], word_size: int, order: str
) -> list[tuple[int, int]]:
    """Return the type and the link address of each program header (gABI, chapter 5)."""
    start, size, count = (vector.get(key, 0) for key in (_AT_PHDR, _AT_PHENT, _AT_PHNUM))
    if not start:
        return []
    form = struct.Struct(f"{order}I4xQQ" if word_size == 8 else f"{order}III")
    data = target.read(start, size * count)
    if size < form.size or len(data) < size * count:
        raise EngineError(f"the program headers at {start:#x} cannot be read through the stub {target.stub.name}")
    return [(kind, address) for kind, _, address in (form.unpack_from(data, n * size) for n in range(count))]


def _place_of_debug(target: StubTarget, dynamic: int, entry: struct.Struct) -> int | None:
    for at in range(dynamic, dynamic + _DYNAMIC_MAX * entry.size, entry.size):
        data = target.read(at, entry.size)
        if len(data) < entry.size:
            return None
        tag, _ = entry.unpack(data)
        if tag == _DT_NULL:
            return None
        if tag == _DT_DEBUG:
            return at + entry.size // 2
    return None
