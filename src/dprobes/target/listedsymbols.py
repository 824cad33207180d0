"""
Symbols from text: ``System.map``, the output of ``nm``, and the map file of the GNU linker.

All three list link addresses. They carry no build-id, so nothing can show that they belong to a module; names in them
may contain spaces (demangled C++). Formats: nm(1), ``ld -Map`` (binutils ldlang.c).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazypattern import lazy_pattern
from dprobes.target.symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ListedSymbols", "parse_linker_map", "parse_nm"]

_NM_LINE = lazy_pattern(r"^([0-9a-fA-F]{4,16}) (?:([0-9a-fA-F]{4,16}) )?([A-Za-z?-]) (\S[^\t\n]*)", re.MULTILINE)
_NM_UNDEFINED = lazy_pattern(r"^ {8,16} [Uwv] (\S+)", re.MULTILINE)
_NM_KINDS = dict.fromkeys("tTwW", "func") | {"i": "ifunc"} | dict.fromkeys("bBdDrRgGsSvVuC", "object")

_MAP_START = "Linker script and memory map"
# " .text.name  0xADDRESS  0xSIZE file.o"; a long name stands on a line of its own before the rest.
_MAP_SECTION = lazy_pattern(r"^ ?([._A-Za-z]\S*)(?: +0x([0-9a-f]+) +0x([0-9a-f]+)(?: (.*))?)?$")
_MAP_REST = lazy_pattern(r"^ +0x([0-9a-f]+) +0x([0-9a-f]+)(?: (.*))?$")
_MAP_SYMBOL = lazy_pattern(r"^ {8,}0x([0-9a-f]+) {8,}(\S.*)$")
_MAP_ASSIGNED = lazy_pattern(r"^(?:(?:PROVIDE|PROVIDE_HIDDEN|HIDDEN) \()?([A-Za-z_$][\w$.]*) = ")
_MAP_THREAD_LOCAL = lazy_pattern(r"^\.(?:tdata|tbss)\b")
_MAP_CODE = lazy_pattern(r"^\.(?:text|init|fini)\b")


class ListedSymbols:
    """Hold symbols that were listed, with the names that were listed as undefined."""

    complete = True

    def __init__(self, symbols: Iterable[Symbol], undefined: Iterable[str] = ()) -> None:
        self._symbols = list(symbols)
        self._undefined = frozenset(undefined)
        self._by_name: dict[str, list[Symbol]] = {}
        for symbol in self._symbols:
            self._by_name.setdefault(symbol.name, []).append(symbol)

    def __len__(self) -> int:
        return len(self._symbols)

    def find(self, name: str) -> list[Symbol]:
        """Return the symbols called ``name``."""
        return list(self._by_name.get(name, ()))

    def in_files(self, _name: str) -> list[tuple[str, Symbol]]:
        """Return none: what lists symbols does not tell their files."""
        return []

    def imports(self, name: str) -> bool:
        """Return whether ``name`` was listed, and only as undefined."""
        return name in self._undefined and name not in self._by_name

    def names(self) -> Iterable[str]:
        """Return the names of all symbols."""
        return self._by_name.keys()

    def beginning(self, start: str) -> list[Symbol]:
        """Return the symbols whose names begin with some characters."""
        return [symbol for symbol in self._symbols if symbol.name.startswith(start)]

    def code(self) -> Iterator[tuple[int, int, int]]:
        """Give link address, size and index of each function."""
        return ((s.address, s.size, i) for i, s in enumerate(self._symbols) if s.is_code)

    def symbol(self, index: int) -> Symbol:
        """Return the symbol with an index from ``code``."""
        return self._symbols[index]

    def starting(self, _address: int) -> list[Symbol]:
        """Return none: all would have to be looked at."""
        return []


def parse_nm(text: str) -> ListedSymbols | None:
    """Return the symbols of a ``System.map`` or the output of ``nm``; None if ``text`` is neither."""
    symbols = []
    for address, size, letter, listed in _NM_LINE.findall(text):
        name, at, version = listed.partition("@")
        kind = _NM_KINDS.get(letter, "notype")
        binding = "weak" if letter in "wWvV" else "local" if letter.islower() and letter not in "iu" else "global"
        default = not at or version.startswith("@")
        symbols.append(Symbol(name, int(address, 16), int(size or "0", 16), kind, binding, default))
    if not symbols:
        return None
    return ListedSymbols(symbols, (name.partition("@")[0] for name in _NM_UNDEFINED.findall(text)))


def parse_linker_map(text: str) -> ListedSymbols | None:
    """
    Return the symbols of a map file of the GNU linker; None if ``text`` is none.

    It lists global symbols only; sections that ``-ffunction-sections`` made name the static functions too.
    """
    start = text.find(_MAP_START)
    if start < 0:
        return None
    reader = _MapReader()
    for line in text[start + len(_MAP_START) :].split("\n"):
        reader.read(line)
    return ListedSymbols(reader.symbols())


class _MapReader:
    """Follow the lines of a linker map, knowing the section that each symbol stands in."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Symbol] = {}
        self._static: list[Symbol] = []
        self._section = ""
        self._pending: str | None = None

    def symbols(self) -> list[Symbol]:
        """Return everything found; a section names a function only where no symbol does."""
        taken = {symbol.address for symbol in self._found.values()}
        return [*self._found.values(), *(symbol for symbol in self._static if symbol.address not in taken)]

    def read(self, line: str) -> None:
        """Take the next line."""
        if self._pending is not None and (rest := _MAP_REST.match(line)):
            self._add_section(self._pending, int(rest[1], 16), int(rest[2], 16), rest[3])
        elif symbol := _MAP_SYMBOL.match(line):
            self._add_symbol(int(symbol[1], 16), symbol[2])
        elif section := _MAP_SECTION.match(line):
            if section[2] is None:
                self._pending = section[1]
                return
            self._add_section(section[1], int(section[2], 16), int(section[3], 16), section[4])
        self._pending = None

    def _add_section(self, name: str, address: int, size: int, file: str | None) -> None:
        self._section = name
        function = name.removeprefix(".text.")
        if file and size and function != name and function.isidentifier():
            self._static.append(Symbol(function, address, size, "func", "local"))

    def _add_symbol(self, address: int, text: str) -> None:
        if self._section.startswith(".plt"):
            return  # the name of an imported function, at the place where calls to it are relayed
        assigned = _MAP_ASSIGNED.match(text)
        if assigned is None and (" = " in text or text.startswith(("0x", "ASSERT", "[!provide]", "PROVIDE"))):
            return
        name = assigned[1] if assigned is not None else text
        kind = "object"
        if assigned is None and _MAP_CODE.match(self._section):
            kind = "func"
        elif assigned is None and _MAP_THREAD_LOCAL.match(self._section):
            kind = "tls"
        self._found.setdefault((name, address), Symbol(name, address, 0, kind, "global"))
