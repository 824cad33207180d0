"""
The modules that a kernel in a machine has loaded, by its own list, and their symbols.

::

    modules ─► list_head in a struct module ─► … ─► modules

A module that is just being loaded is listed before its code is complete; its state says so (``enum module_state``).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.kernel.runningkernel import LoadedModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.machine.guestmemory import GuestMemory
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout

__all__ = ["GuestModule", "listed_modules", "module_symbols"]

_LIVE = 0
_MODULES_MAX = 4096
_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, info, other, section index, value, size."""
_SYMBOLS_MAX = 1 << 17
_NAMES_MAX = 1 << 23
_NAME_MAX = 512
_UNDEFINED = 0


class GuestModule(NamedTuple):
    """A module, and where its structure is."""

    loaded: LoadedModule
    address: int


def listed_modules(memory: GuestMemory, layout: KernelLayout, head: int) -> Iterator[GuestModule]:
    """Iterate over the modules that are in use; ``head`` is where their list begins."""
    at = memory.word(head)
    for _ in range(_MODULES_MAX):
        if at in (head, 0):
            return
        module = at - layout.module_list
        name = memory.string(module + layout.module_name).decode("utf-8", "replace")
        size = memory.word(module + layout.module_size, 4)
        if memory.word(module + layout.module_state, 4) == _LIVE:
            yield GuestModule(LoadedModule(name, memory.word(module + layout.module_base), size), module)
        at = memory.word(at)


def module_symbols(memory: GuestMemory, layout: KernelLayout, module: GuestModule) -> bytes:
    """Return the symbols of a module as ``/proc/kallsyms`` lists them."""
    symbols = memory.word(module.address + layout.module_symbols)
    count = memory.word(symbols + layout.symbol_count, 4)
    if not symbols or not 0 < count <= _SYMBOLS_MAX:
        return b""
    table = memory.read(memory.word(symbols + layout.symtab), count * _SYMBOL.size)
    kinds = memory.read(memory.word(symbols + layout.typetab), count)
    listed = list(_SYMBOL.iter_unpack(table[: len(table) // _SYMBOL.size * _SYMBOL.size]))
    last = max((name for name, *_ in listed), default=0)
    names = memory.read(memory.word(symbols + layout.strtab), min(last + _NAME_MAX, _NAMES_MAX))
    owner = module.loaded.name.encode()
    lines = []
    for (name, _, _, section, value, _), kind in zip(listed[1:], kinds[1:], strict=False):
        text = names[name : names.find(b"\0", name)]
        if text and section != _UNDEFINED:
            lines.append(b"%016x %c %b\t[%b]\n" % (value, kind, text, owner))
    return b"".join(lines)
