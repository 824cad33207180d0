"""What is known of each build of the module: its symbols as far as they are needed, and the probed instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.target.carriedsymbols import CarriedBuild, CarriedPlace
from dprobes.target.symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.fieldcodec import Reader, Writer

__all__ = ["BINDINGS", "KINDS", "read_builds", "write_builds"]

KINDS = ("func", "object", "ifunc", "tls", "common", "notype")
BINDINGS = ("local", "global", "weak")
"""The kinds and bindings of symbols by their numbers."""

_BUILD_SIZE, _SYMBOL_SIZE, _PLACE_SIZE = 20, 23, 18


def write_builds(out: Writer, builds: Sequence[CarriedBuild]) -> None:
    """Write all builds."""
    out.u32(len(builds))
    for build in builds:
        out.string(build.identity)
        out.string(build.path)
        out.string(build.machine)
        out.u32(len(build.symbols))
        for symbol in build.symbols:
            out.string(symbol.name)
            out.u64(symbol.address)
            out.u64(symbol.size)
            out.u8(KINDS.index(symbol.kind))
            out.u8(BINDINGS.index(symbol.binding))
            out.u8(symbol.default_version)
        out.u32(len(build.places))
        for place in build.places:
            out.u32(place.definition)
            out.u64(place.offset)
            out.string(place.where)
            out.u8(place.is_exit)
            out.u8(len(place.raw))
            out.data += place.raw


def read_builds(reader: Reader, definitions: int) -> tuple[CarriedBuild, ...]:
    """Return all builds; ``definitions`` is how many definitions the program has."""
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
