"""
Real modules as targets of jumps to trampolines: their files, their instructions, and simulated mappings.

Results are reproducible: the module is at an address that the kernel could have chosen, with the heap, stack and
libraries of a large process around it.
"""

from __future__ import annotations

import ctypes.util
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from iced_x86 import Decoder

from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.module_lookup import read_ld_cache
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iced_x86 import Instruction

__all__ = ["MODULES", "address_space", "code_of", "entries", "instructions", "mappings_around", "module_of"]

MODULES = ("libc.so.6", "libcrypto.so.3", "libsqlite3.so.0", "python3")
"""The planned modules: two libraries with hand-written code, one without, and a program linked to fixed addresses."""

LIBRARY_AT, PROGRAM_AT = 0x7F3A_1C20_0000, 0x5581_6D40_0000
_LIBRARIES = 60
_LIBRARY_SIZE, _STEP = 0x20_0000, 0x23_1000
_PAGE = 0x1000


def path_of(name: str) -> Path:
    """Return the file of a module; skip the test if this machine does not have it."""
    if name == "python3":
        path = Path("/usr/bin/python3")
    else:
        found = [
            library.path for library in read_ld_cache() if library.name == name and library.architecture == "x86_64"
        ]
        path = Path(found[0] if found else ctypes.util.find_library(name) or name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return path.resolve()


@functools.cache
def module_of(name: str) -> Module:
    """Return the module ``name`` of this machine with its symbols; skip the test if it is missing."""
    return Module.load(path_of(name))


@functools.cache
def _analysed(name: str) -> ModuleCode:
    module = module_of(name)
    return ModuleCode.of(module, LIBRARY_AT if module.elf.is_pie_or_shared else 0)


def code_of(name: str) -> ModuleCode:
    """Return the unchanged code of a module at its address in the simulated process."""
    made = _analysed(name)
    return made.unchanged()


def mappings_around(name: str) -> list[Mapping]:
    """Return the mappings of a simulated process: the module, a program, heap, stack, and other libraries."""
    elf = module_of(name).elf
    first = min(segment.vaddr for segment in elf.load_segments) & -_PAGE
    size = (max(segment.vaddr + segment.memsz for segment in elf.load_segments) - first + _PAGE) & -_PAGE
    if elf.is_pie_or_shared:
        own, program = (LIBRARY_AT + first, LIBRARY_AT + first + size), (PROGRAM_AT, PROGRAM_AT + 0x8000)
    else:
        own, program = (first, first + size), (first, first + size)
    ranges = {own: f"/{name}", program: "/program"} if own != program else {own: f"/{name}"}
    position = (LIBRARY_AT + size + _PAGE) & -_PAGE
    for n in range(_LIBRARIES):
        start = LIBRARY_AT - (n + 1) * _STEP if n % 2 else position + n * _STEP
        ranges[start, start + _LIBRARY_SIZE] = f"/lib{n}"
    heap = program[1] + 0x15F_3000
    ranges[heap, heap + 0x40_0000] = "[heap]"
    ranges[0x7FFD_0EB0_0000, 0x7FFD_0EB2_1000] = "[stack]"
    return [Mapping(start, end, "r-xp", 0, 0, 0, path, False) for (start, end), path in sorted(ranges.items())]


def address_space(name: str, *, regions_max: int = 30_000) -> AddressSpace:
    """
    Return the free address ranges around a module in the simulated process.

    ``regions_max`` is the maximum number of regions for trampolines in them.
    """
    mappings = mappings_around(name)
    own = next(mapping for mapping in mappings if mapping.path == f"/{name}")
    return AddressSpace(mappings, own.start, own.end, regions_max=regions_max)


def entries(name: str) -> list[int]:
    """Return the function starts in symbols and unwind tables, as addresses in the simulated process."""
    module, code = module_of(name), _analysed(name)
    starts = {*module.elf.frames.starts, *(symbol.address for symbol in module.symbols.functions())}
    return sorted(start + code.bias for start in starts if code.around(start + code.bias) is not None)


def instructions(name: str) -> Iterator[Instruction]:
    """Iterate over the instructions of the functions in a module's unwind table, as the simulated process has them."""
    elf, code = module_of(name).elf, _analysed(name)
    for start in elf.frames.starts:
        extent, around = elf.frames.extent(elf, start), code.around(start + code.bias)
        if extent is not None and around is not None:
            first = start + code.bias - around.start
            data = around.original[first : first + extent[1] - extent[0]]
            yield from (found for found in Decoder(64, data, ip=start + code.bias) if not found.is_invalid)
