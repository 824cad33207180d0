"""What is known of each kernel, or of each build of a kernel's module: areas, symbols, and the probed instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazypattern import lazy_pattern
from dprobes.target.kernel.carriedkernel import CarriedKernel, KernelArea, KernelPlace
from dprobes.target.kernel.kallsyms import KernelSymbol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.fieldcodec import Reader, Writer

__all__ = ["read_kernels", "write_kernels"]

_KERNEL_SIZE, _AREA_SIZE, _SYMBOL_SIZE, _PLACE_SIZE = 24, 20, 13, 17

_NAME = lazy_pattern(r"[^\s/]+\Z")
"""What names a symbol, a section or a module: the list of symbols has blanks between its fields, sysfs a directory."""


def write_kernels(out: Writer, kernels: Sequence[CarriedKernel]) -> None:
    """Write all kernels."""
    out.u32(len(kernels))
    for kernel in kernels:
        out.string(kernel.identity)
        out.string(kernel.path)
        out.string(kernel.module)
        out.u32(len(kernel.areas))
        for area in kernel.areas:
            out.string(area.name)
            out.u64(area.address)
            out.u64(area.size)
        out.u32(len(kernel.symbols))
        for symbol in kernel.symbols:
            out.string(symbol.name)
            out.u64(symbol.address)
            out.u8(ord(symbol.letter))
        out.u32(len(kernel.places))
        for place in kernel.places:
            out.u32(place.definition)
            out.u64(place.address)
            out.string(place.where)
            out.u8(len(place.raw))
            out.data += place.raw


def read_kernels(reader: Reader, definitions: int) -> tuple[CarriedKernel, ...]:
    """Return all kernels; ``definitions`` is how many definitions the program has."""
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
        symbols = tuple(_symbol(reader, module) for _ in range(reader.count(_SYMBOL_SIZE, "symbols")))
        places = tuple(_place(reader, definitions) for _ in range(reader.count(_PLACE_SIZE, "places")))
        kernels[identity] = CarriedKernel(identity, path, module, areas, symbols, places)
    reader.end()
    return tuple(kernels.values())


def _name(reader: Reader, what: str, *, or_none: bool = False) -> str:
    at = reader.offset
    name = reader.string(what)
    if not (_NAME.match(name) or (or_none and not name)) or name in (".", ".."):
        reader.fail(f"expected the name of {what} without blanks and slashes, found {name!a}", at)
    return name


def _symbol(reader: Reader, module: str) -> KernelSymbol:
    name, address = _name(reader, "a symbol"), reader.u64("an address")
    at = reader.offset
    letter = chr(reader.u8("the kind of a symbol"))
    if not (letter.isascii() and letter.isalpha()):
        reader.fail(f"expected a letter for the kind of a symbol, found {letter!a}", at)
    return KernelSymbol(name, address, letter, module)


def _place(reader: Reader, definitions: int) -> KernelPlace:
    definition = reader.below(definitions, "the number of a probe definition")
    address, where = reader.u64("an address"), reader.string("a place")
    raw = bytes(reader.take(reader.u8("the length of an instruction"), "an instruction"))
    return KernelPlace(definition, address, raw, where)
