"""The stored data about each kernel, or each build of a kernel's module: areas, symbols, and instructions."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from dprobes.ppdf.ppdf_model import EbpfCode, EbpfMap
from dprobes.target.carried_symbols import CarriedBuild, CarriedPlace
from dprobes.target.kernel.kernel_symbols import CarriedKernel, KernelArea, KernelPlace, KernelSymbol
from dprobes.target.module_symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.ppdf_sections import Reader, Writer

__all__ = [
    "BINDINGS",
    "KINDS",
    "read_builds",
    "read_ebpf",
    "read_kernels",
    "write_builds",
    "write_ebpf",
    "write_kernels",
]

KINDS = ("func", "object", "ifunc", "tls", "common", "notype")
BINDINGS = ("local", "global", "weak")
"""Kinds and bindings of symbols; their indices are their numbers in the file."""

_BUILD_SIZE, _SYMBOL_SIZE, _PLACE_SIZE = 20, 23, 18


def write_builds(out: Writer, builds: Sequence[CarriedBuild]) -> None:
    """Write the builds of the module: for each, build ID, path, processor, symbols, and places of definitions."""
    out.u32(len(builds))
    for build in builds:
        out.row("sssI", build.identity, build.path, build.machine, len(build.symbols))
        for symbol in build.symbols:
            kind, binding = KINDS.index(symbol.kind), BINDINGS.index(symbol.binding)
            out.row("sQQBBB", symbol.name, symbol.address, symbol.size, kind, binding, symbol.default_version)
        out.u32(len(build.places))
        for place in build.places:
            out.row("IQsBB", place.definition, place.offset, place.where, place.is_exit, len(place.raw))
            out.data += place.raw


def read_builds(reader: Reader, definitions: int) -> tuple[CarriedBuild, ...]:
    """Return all builds; ``definitions`` is the number of definitions in the program."""
    builds: dict[str, CarriedBuild] = {}
    for _ in range(reader.count(_BUILD_SIZE, "builds of the module")):
        at = reader.offset
        identity, path, machine = (reader.string(what) for what in ("a build", "a path", "a processor"))
        if identity in builds:
            reader.fail(f"there are two builds {identity}", at)
        symbols = tuple(_symbol(reader) for _ in range(reader.count(_SYMBOL_SIZE, "symbols")))
        places = tuple(_place(reader, definitions) for _ in range(reader.count(_PLACE_SIZE, "places")))
        builds[identity] = CarriedBuild(identity, path, machine, symbols, places)
    reader.end()
    return tuple(builds.values())


def _symbol(reader: Reader) -> Symbol:
    name, address, size = reader.string("a symbol"), reader.u64("an address"), reader.u64("a size")
    kind = _choice(reader, KINDS, "the kind of a symbol")
    binding = _choice(reader, BINDINGS, "the binding of a symbol")
    return Symbol(name, address, size, kind, binding, reader.flag("the default version"))


def _choice(reader: Reader, names: tuple[str, ...], what: str) -> str:
    at = reader.offset
    number = reader.u8(what)
    if number >= len(names):
        reader.fail(f"expected {what} below {len(names)}, found {number}", at)
    return names[number]


def _place(reader: Reader, definitions: int) -> CarriedPlace:
    definition = reader.below(definitions, "the number of a probe definition")
    offset, where, is_exit = reader.u64("an offset"), reader.string("a place"), reader.flag("an exit")
    raw = bytes(reader.take(reader.u8("the length of an instruction"), "an instruction"))
    return CarriedPlace(definition, offset, raw, where, is_exit)


_KERNEL_SIZE, _AREA_SIZE, _KERNEL_SYMBOL_SIZE, _KERNEL_PLACE_SIZE = 24, 20, 13, 17

_NAME = re.compile(r"[^\s/]+\Z")
"""
A valid name of a symbol, a section or a module.

It has no blanks, which separate the fields of the list of symbols, and no slashes, because sysfs has a directory of
that name.
"""


def write_kernels(out: Writer, kernels: Sequence[CarriedKernel]) -> None:
    """Write the builds of the kernel for which the program was compiled: for each, its identity and places."""
    out.u32(len(kernels))
    for kernel in kernels:
        out.row("sssI", kernel.identity, kernel.path, kernel.module, len(kernel.areas))
        for area in kernel.areas:
            out.row("sQQ", area.name, area.address, area.size)
        out.u32(len(kernel.symbols))
        for symbol in kernel.symbols:
            out.row("sQB", symbol.name, symbol.address, ord(symbol.letter))
        out.u32(len(kernel.places))
        for place in kernel.places:
            out.row("IQsB", place.definition, place.address, place.where, len(place.raw))
            out.data += place.raw


def read_kernels(reader: Reader, definitions: int) -> tuple[CarriedKernel, ...]:
    """Return all kernels; ``definitions`` is the number of definitions in the program."""
    kernels: dict[str, CarriedKernel] = {}
    for _ in range(reader.count(_KERNEL_SIZE, "kernels")):
        at = reader.offset
        identity, path = reader.string("a build"), reader.string("a path")
        if identity in kernels:
            reader.fail(f"there are two kernels {identity}", at)
        module = _name(reader, "a module", or_none=True)
        areas = tuple(
            KernelArea(_name(reader, "an area"), reader.u64("an address"), reader.u64("a size"))
            for _ in range(reader.count(_AREA_SIZE, "areas"))
        )
        if not areas:
            reader.fail("expected an area, found none")
        symbols = tuple(_kernel_symbol(reader, module) for _ in range(reader.count(_KERNEL_SYMBOL_SIZE, "symbols")))
        places = tuple(_kernel_place(reader, definitions) for _ in range(reader.count(_KERNEL_PLACE_SIZE, "places")))
        kernels[identity] = CarriedKernel(identity, path, module, areas, symbols, places)
    reader.end()
    return tuple(kernels.values())


def _name(reader: Reader, what: str, *, or_none: bool = False) -> str:
    at = reader.offset
    name = reader.string(what)
    if not (_NAME.match(name) or (or_none and not name)) or name in (".", ".."):
        reader.fail(f"expected the name of {what} without blanks and slashes, found {name!a}", at)
    return name


def _kernel_symbol(reader: Reader, module: str) -> KernelSymbol:
    name, address = _name(reader, "a symbol"), reader.u64("an address")
    at = reader.offset
    letter = chr(reader.u8("the kind of a symbol"))
    if not (letter.isascii() and letter.isalpha()):
        reader.fail(f"expected a letter for the kind of a symbol, found {letter!a}", at)
    return KernelSymbol(name, address, letter, module)


def _kernel_place(reader: Reader, definitions: int) -> KernelPlace:
    definition = reader.below(definitions, "the number of a probe definition")
    address, where = reader.u64("an address"), reader.string("a place")
    raw = bytes(reader.take(reader.u8("the length of an instruction"), "an instruction"))
    return KernelPlace(definition, address, raw, where)


_INSN_SIZE = 8
"""Size in bytes of an instruction slot (``linux/bpf.h``, ``struct bpf_insn``)."""

_CODE_SIZE, _MAP_SIZE = 29, 9


def write_ebpf(out: Writer, codes: Sequence[EbpfCode]) -> None:
    """Write the section with the eBPF code of all handlers."""
    out.u32(len(codes))
    for code in codes:
        out.row("sIssI", code.machine, code.definition, code.loops, code.problem, code.scratch)
        out.row("Bb", code.sleepable, code.code)
        out.data += struct.pack(f"<{len(code.origins)}i", *code.origins)
        out.u32(len(code.maps))
        for reference in code.maps:
            out.row("IsB", reference.index, reference.name, reference.is_value)


def read_ebpf(reader: Reader, definitions: int) -> tuple[EbpfCode, ...]:
    """Return the code of all handlers; ``definitions`` is the number of definitions in the program."""
    codes = []
    for _ in range(reader.count(_CODE_SIZE, "eBPF programs")):
        machine = reader.string("a processor")
        definition = reader.below(definitions, "the number of a probe definition")
        loops, problem = reader.string("a form of loops"), reader.string("a problem")
        scratch, sleepable = reader.u32("a size"), reader.flag("whether it may sleep")
        at = reader.offset
        code = reader.block("bytes of eBPF")
        count, odd = divmod(len(code), _INSN_SIZE)
        if odd:
            reader.fail(f"expected eBPF of {_INSN_SIZE} bytes for each instruction, found {len(code)} bytes", at)
        origins = struct.unpack(f"<{count}i", reader.take(4 * count, "the origins of instructions"))
        maps = tuple(
            EbpfMap(
                reader.below(count, "the number of an instruction"),
                reader.string("a map"),
                reader.flag("whether it is an address in a map"),
            )
            for _ in range(reader.count(_MAP_SIZE, "maps"))
        )
        codes.append(EbpfCode(machine, definition, loops, code, maps, origins, scratch, sleepable, problem))
    reader.end()
    return tuple(codes)
