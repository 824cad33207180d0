"""
The modules that a kernel in a machine has loaded, by its own list, and their symbols.

::

    modules ─► list_head in a struct module ─► … ─► modules

A module that is just being loaded is listed before its code is complete; its state says so (``enum module_state``).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.kernel.runningkernel import LoadedModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.gdb.machine.guestmemory import GuestMemory
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout

__all__ = ["GuestModule", "ModuleList", "ModuleSymbols", "listed_modules", "symbols_of_modules"]

_LIVE = 0
_MODULES_MAX = 4096
_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, info, other, section index, value, size."""
_SYMBOLS_MAX = 1 << 17
_NAMES_MAX = 1 << 23
_NAME_MAX = 512
_READ_MAX = 1 << 27
"""Bytes that are read for symbols of modules; what a distribution's kernel can load has a third of it in all."""
_LISTING_MAX = 1 << 26
"""Bytes of the list of them."""
_UNDEFINED = 0
_GRAPHIC = re.compile(rb"[!-~]+")  # noqa: TID251 - only machines need this module
_KIND = re.compile("[A-Za-z?]")  # noqa: TID251 - as above


class GuestModule(NamedTuple):
    """A module, and where its structure is."""

    loaded: LoadedModule
    address: int


class ModuleList(NamedTuple):
    """The modules that were found; ``is_whole`` says if there were no more than are looked at."""

    found: Sequence[GuestModule]
    is_whole: bool


class ModuleSymbols(NamedTuple):
    """
    The symbols of modules as ``/proc/kallsyms`` lists them, and how many are left out, ``first`` of which module.

    Left out is what is too much, cannot be read, or could not stand in such a list.
    """

    lines: bytes
    left_out: int
    first: str


def listed_modules(memory: GuestMemory, layout: KernelLayout, head: int) -> ModuleList:
    """Return the modules that are in use; ``head`` is where their list begins."""
    at = memory.word(head)
    found = []
    for _ in range(_MODULES_MAX):
        if at in (head, 0):
            break
        module = at - layout.module_list
        name = memory.string(module + layout.module_name).decode("utf-8", "replace")
        size = memory.word(module + layout.module_size, 4)
        if memory.word(module + layout.module_state, 4) == _LIVE:
            found.append(GuestModule(LoadedModule(name, memory.word(module + layout.module_base), size), module))
        at = memory.word(at)
    return ModuleList(found, is_whole=at in (head, 0))


def symbols_of_modules(memory: GuestMemory, layout: KernelLayout, modules: ModuleList) -> ModuleSymbols:
    """Return the symbols of modules, until they are more than any kernel has."""
    lines, left_out, first = bytearray(), 0, ""
    room = _READ_MAX
    for module in modules.found:
        count, symbols = _count_of(memory, layout, module)
        if 0 < count <= _SYMBOLS_MAX and room > 0 and len(lines) <= _LISTING_MAX:
            listed = _symbols_of(memory, layout, module, symbols, count)
            lines += listed.lines
            room -= listed.read
            count = listed.left_out
        if count and not left_out:
            first = module.loaded.name
        left_out += count
    return ModuleSymbols(bytes(lines), left_out, first)


class _Listed(NamedTuple):
    """The symbols of a module in the form of ``/proc/kallsyms``, and how many bytes were read for them."""

    lines: bytes
    left_out: int
    read: int


def _count_of(memory: GuestMemory, layout: KernelLayout, module: GuestModule) -> tuple[int, int]:
    """Return how many symbols a module has, the one without a name included, and where they are described."""
    symbols = memory.word(module.address + layout.module_symbols)
    return (memory.word(symbols + layout.symbol_count, 4) if symbols else 0), symbols


def _symbols_of(memory: GuestMemory, layout: KernelLayout, module: GuestModule, symbols: int, count: int) -> _Listed:
    table = memory.read(memory.word(symbols + layout.symtab), count * _SYMBOL.size)
    kinds = memory.read(memory.word(symbols + layout.typetab), count)
    rows = list(_SYMBOL.iter_unpack(table[: len(table) // _SYMBOL.size * _SYMBOL.size]))
    last = max((name for name, *_ in rows), default=0)
    names = memory.read(memory.word(symbols + layout.strtab), min(last + _NAME_MAX, _NAMES_MAX))
    read = len(table) + len(kinds) + len(names)
    owner = module.loaded.name.encode()
    if not _GRAPHIC.fullmatch(owner):
        return _Listed(b"", count, read)
    lines, left_out = [], count - min(len(rows), len(kinds))
    for (name, _, _, section, value, _), kind in zip(rows[1:], kinds[1:], strict=False):
        if section == _UNDEFINED:
            continue
        text, end, _ = names[name : name + _NAME_MAX].partition(b"\0")
        # One symbol a line: what a name could not have in it would be read as another.
        if end and _GRAPHIC.fullmatch(text) and _KIND.fullmatch(chr(kind)):
            lines.append(b"%016x %c %b\t[%b]\n" % (value, kind, text, owner))
        elif not end or text:
            left_out += 1
    return _Listed(b"".join(lines), left_out, read)
