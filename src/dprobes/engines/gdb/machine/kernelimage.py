"""
The image of a Linux kernel in the memory of a machine that stands still: where it is, and what it says of itself.

A kernel of x86-64 lies somewhere between two addresses, wherever it has chosen to (KASLR). Nothing else is mapped
there, so its page tables say where it begins, and which part of it is data that nobody writes. There the symbols are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.kallsymstables import SearchEffort, end_of, find_tables, listed_symbols
from dprobes.engines.gdb.machine.pagetables import Paging, Region, regions, translate
from dprobes.errors import EngineError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.registers import Registers

__all__ = ["KernelImage", "find_image", "symbols_in_memory"]

_IMAGES_START, _IMAGES_END = 0xFFFFFFFF80000000, 0xFFFFFFFFC0000000
"""Where the kernel's image lies somewhere, below all modules (Documentation/arch/x86/x86_64/mm.rst)."""
_STEP = 1 << 21
"""The kernel begins at a multiple of this (CONFIG_PHYSICAL_ALIGN)."""
_USER_TABLES = 1 << 12
"""Bit of cr3 by which the tables for programs differ from those for the kernel (PTI_USER_PGTABLE_BIT)."""
_PIECE = 1 << 18
"""Bytes that are read at once."""
_TABLES_MAX = 1 << 24


class KernelImage(NamedTuple):
    """The page tables by which a kernel sees itself, and the first address of its image."""

    root: int
    paging: Paging
    start: int


def find_image(target: MachineTarget, registers: Registers) -> KernelImage:
    """
    Find the kernel in the page tables of the running process; raise ``EngineError`` if there is none.

    While a program runs, its processor may have tables that show of the kernel its entries only (page table isolation).
    """
    name = target.stub.name
    if not target.can_walk:
        raise EngineError(
            f"the stub {name} shows neither page tables nor physical memory",
            hint="a kernel can be probed behind QEMU's stub (-gdb tcp::1234), on x86-64",
        )
    paging = target.paging(registers)
    if paging in (Paging.FOUR_LEVELS, Paging.FIVE_LEVELS):
        for root in (registers["cr3"] & ~_USER_TABLES, registers["cr3"]):
            for address in range(_IMAGES_START, _IMAGES_END, _STEP):
                if translate(target.entry_at, root, paging, address) is not None:
                    return KernelImage(root, paging, address)
    raise EngineError(
        f"no kernel of Linux is in the memory behind the stub {name}",
        hint="wait until it has booted; a machine without one has addresses only: write 'name = machine'",
    )


def symbols_in_memory(target: MachineTarget, image: KernelImage) -> bytes:
    """Return the kernel's symbols as ``/proc/kallsyms`` lists them; raise ``EngineError`` if it has no such list."""
    root, paging, start = image
    parts = list(regions(target.entry_at, root, paging, start, _IMAGES_END, _STEP))
    constant = [region for region in parts if not region.is_writable and not region.is_executable]
    effort = SearchEffort()
    for region in (*constant, *(region for region in parts if region not in constant)):
        if (found := _symbols(lambda *place: target.read_large(root, paging, *place), region, effort)) is not None:
            return found
    raise EngineError(
        f"the kernel behind the stub {target.stub.name} has no list of its symbols that could be read",
        hint="a kernel of Linux 4.6 or later with CONFIG_KALLSYMS is needed",
    )


def _symbols(read: Callable[[int, int], bytes], region: Region, effort: SearchEffort) -> bytes | None:
    """Read a part of memory until the tables have been found and are complete; return what they contain."""
    data = bytearray()
    tables = None
    while region.start + len(data) < region.end and len(data) < _TABLES_MAX:
        piece = read(region.start + len(data), min(_PIECE, region.end - region.start - len(data)))
        if not piece:
            break
        searched = max(0, len(data) - _PIECE)
        data += piece
        if tables is None:
            tables = find_tables(data, searched, effort)
        if tables is not None and len(data) >= min(end_of(tables), region.end - region.start):
            return listed_symbols(data, tables)
    return None
