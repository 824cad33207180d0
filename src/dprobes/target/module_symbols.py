"""
Symbols of one module from several sources: its own tables, its debug file, or a list from the user.

A *source* finds names and lists the addresses of code. ``SymbolTable`` selects among the results of several sources.
This module is independent of file formats.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.diagnostics import first_of, near_names
from dprobes.errors import TargetError
from dprobes.globs import compile_glob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.target.readable_names import ReadableName

__all__ = [
    "CodeRange",
    "Symbol",
    "SymbolSource",
    "SymbolTable",
    "clones_among",
    "clones_in",
    "familiarity",
    "is_clone",
    "is_cold_part",
    "name_matcher",
    "only_clones",
    "split_file",
]

_SUFFIXES = r"(?:\.(?:constprop|part|isra|cold|lto_priv|localalias|llvm|clone)(?:\.\d+)?)+"
"""Suffixes that GCC and Clang append to the name of a function."""

_CLONE = re.compile(rf"(?P<original>[A-Za-z_][\w$]*){_SUFFIXES}", re.ASCII)
_COLD = re.compile(r".*\.cold(\.\d+)?")
_LISTED = 4


def is_clone(name: str) -> bool:
    """Return True if a name is that of a clone or of a part of a function."""
    return _CLONE.fullmatch(name) is not None


def is_cold_part(name: str) -> bool:
    """Return True if a name is that of a function's cold part: rarely executed code to which the function jumps."""
    return _COLD.fullmatch(name) is not None


def clones_in(symbols: SymbolTable, original: str) -> list[str]:
    """Return the sorted names of clones of a function in a table of symbols. Cold parts are last."""
    return clones_among((symbol.name for symbol in symbols.functions_beginning(f"{original}.")), original)


def clones_among(names: Iterable[str], original: str) -> list[str]:
    """Return the sorted names of clones of a function. Cold parts are last."""
    found = {name for name in names if (match := _CLONE.fullmatch(name)) is not None and match["original"] == original}
    return sorted(found, key=lambda name: (is_cold_part(name), name))


def only_clones(where: str, name: str, clones: list[str]) -> TargetError:
    """Return the error for a function that has no symbol in ``where``, a name of a module, but symbols of clones."""
    listed = first_of([f"'{each}'" for each in clones], _LISTED)
    called = [each for each in clones if not is_cold_part(each)]
    if not called:
        return TargetError(
            f"{where} has no symbol '{name}', but parts that the compiler split off: {listed}",
            hint="the function itself was inlined, or has no symbol; such code is jumped to in rare cases",
        )
    every = f", or the pattern '{name}.*' for all of them" if len(called) > 1 else ""
    return TargetError(
        f"{where} has no symbol '{name}', but variants that the compiler made: {listed}",
        hint=f"write '{called[0]}'{every}; arguments that it does not need may be left out, and the others moved up",
    )


def split_file(pattern: str) -> tuple[str, str] | None:
    """Return the source file and the name of a pattern FILE:NAME; None for other patterns."""
    file, colon, name = pattern.rpartition(":")
    return (file, name) if colon and file and name and not file.endswith(":") else None


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """
    Return a predicate for linker names that match a pattern. Case is significant.

    A pattern with ``::`` is compared with the readable name, both with its parameters and without.
    """
    expression = compile_glob(pattern)
    if "::" not in pattern:
        return lambda name: expression.match(name) is not None
    from dprobes.target.readable_names import Demangler, readable_parts

    demangler = Demangler()

    def matches(name: str) -> bool:
        readable = demangler.name_of(name)
        if readable == name:
            return expression.match(name) is not None
        path, parameters = readable_parts(readable)
        return any(expression.match(text) for text in (path, path + parameters))

    return matches


_NEAR = 3  # names suggested for an unknown one

_COPIES = 2
"""Number of static functions with one name from which on each is named with its source file."""

_FEW = 16
"""Number of addresses that are looked up as starts of functions before an index of all functions is made."""


class Symbol(NamedTuple):
    """
    Name of ``size`` bytes from a link address on. The size is 0 if unknown.

    ``kind`` is ``func``, ``object``, ``ifunc``, ``tls``, ``common`` or ``notype``; ``binding`` is ``local``, ``global``
    or ``weak``. ``default_version`` is False for a name that only programs linked earlier use (``name@VERSION``).
    """

    name: str
    address: int
    size: int
    kind: str
    binding: str
    default_version: bool = True

    @property
    def is_code(self) -> bool:
        """True for a function, or the resolver of one."""
        return self.kind in ("func", "ifunc")


class SymbolSource(Protocol):
    """Symbols of one table or list, such as ``.symtab``, for ``SymbolTable``."""

    @property
    def complete(self) -> bool:
        """True if local symbols are included, as in ``.symtab`` and unlike in ``.dynsym``."""

    def find(self, name: str) -> list[Symbol]:
        """Return the defined symbols called ``name``."""

    def in_files(self, name: str) -> Iterable[tuple[str, Symbol]]:
        """Iterate over the local symbols called ``name``, each with its source file, where that is known."""

    def imports(self, name: str) -> bool:
        """Return True if the table lists ``name`` only as undefined, because another module defines it."""

    def beginning(self, start: str) -> Iterable[Symbol]:
        """Iterate over the symbols whose names begin with ``start``."""

    def names(self) -> Iterable[str]:
        """Return the names of all defined symbols."""

    def code(self) -> Iterable[tuple[int, int, int]]:
        """Return link address, size and index of every symbol that may be code."""

    def symbol(self, index: int) -> Symbol:
        """Return the symbol with an index from ``code``."""

    def starting(self, address: int) -> list[Symbol]:
        """
        Return the symbols at a link address.

        Return an empty list if the lookup would take as long as an index of all symbols.
        """


CodeRange = tuple[int, int]
"""Start and end of an area of code, as link addresses."""


class SymbolTable:
    """
    Symbols of several sources.

    ``code_range`` returns the area of code that contains a link address; a symbol without a size ends within it.
    ``later`` returns further sources, which are slow to find. It is called once, and only if the first sources lack
    local symbols and have no result.
    """

    def __init__(
        self,
        sources: Iterable[SymbolSource],
        *,
        code_range: Callable[[int], CodeRange | None],
        later: Callable[[], Iterable[SymbolSource]] | None = None,
    ) -> None:
        self._sources = list(sources)
        self._code_range = code_range
        self._later = later
        self._index: _CodeIndex | None = None
        self._looks = _FEW
        self._covered: tuple[int, Symbol | None] | None = None
        """The last address that ``covering`` found a function for, as a place is looked up several times."""

    @property
    def sources(self) -> Sequence[SymbolSource]:
        """The loaded sources, in order of preference."""
        return tuple(self._sources)

    @property
    def complete(self) -> bool:
        """True if local symbols are known, after all sources are loaded."""
        self._load_later()
        return any(source.complete for source in self._sources)

    def lookup(self, name: str) -> list[Symbol]:
        """
        Return the best symbols with a name and distinct addresses. If there are several, the name is ambiguous.

        The default version is better than others, then any binding better than ``local``. A local symbol is also found
        with its source file, as in ``file.c:name``.
        """
        found = [symbol for source in self._sources for symbol in source.find(name)]
        if not any(s.default_version and s.binding != "local" for s in found) and self._load_later():
            found = [symbol for source in self._sources for symbol in source.find(name)]
        if not found:
            found = self._of_file(name)
        if not found:
            return []
        best = min(_preference(symbol) for symbol in found)
        distinct: dict[int, Symbol] = {}
        for symbol in found:
            if _preference(symbol) == best:
                known = distinct.setdefault(symbol.address, symbol)
                if symbol.size > known.size:
                    distinct[symbol.address] = symbol
        return sorted(distinct.values(), key=lambda symbol: symbol.address)

    def _of_file(self, name: str) -> list[Symbol]:
        file, colon, plain = name.rpartition(":")
        if not colon or not file or file.endswith(":"):
            return []
        return [
            symbol._replace(name=name) for known, symbol in self.in_files(plain) if f"/{known}".endswith(f"/{file}")
        ]

    def in_files(self, name: str) -> list[tuple[str, Symbol]]:
        """Return the local symbols called ``name`` with their source files, one for each address."""
        self._load_later()
        found: dict[int, tuple[str, Symbol]] = {}
        for source in self._sources:
            for file, symbol in source.in_files(name):
                found.setdefault(symbol.address, (file, symbol))
        return [found[address] for address in sorted(found)]

    def imports(self, name: str) -> bool:
        """Return whether the module imports ``name`` from another module."""
        return any(source.imports(name) for source in self._sources)

    def covering(self, link_address: int) -> Symbol | None:
        """
        Return the nearest function that covers ``link_address``.

        A symbol without a size covers everything up to the next one, if no other symbol covers the address.
        """
        if self._covered is not None and self._covered[0] == link_address:
            return self._covered[1]
        area = self._code_range(link_address)
        if area is None:
            return None
        found = self._function_at(link_address) or self._code_index().covering(link_address, area)
        self._covered = link_address, found
        return found

    def names_at(self, link_address: int) -> set[str]:
        """Return all names of the function that starts at ``link_address``."""
        return {symbol.name for symbol in self.starting(link_address, link_address + 1)}

    def starting(self, start: int, end: int) -> list[Symbol]:
        """Return the symbols of code that start from link address ``start`` to ``end`` (excluded)."""
        return self._code_index().starting(start, end)

    def preceding(self, link_address: int) -> list[Symbol]:
        """Return the symbols of code with the highest link address up to ``link_address``."""
        return self._code_index().preceding(link_address)

    def functions(self) -> Iterator[Symbol]:
        """Iterate over every function with every name that it has, in order of sources, for patterns of names."""
        self._load_later()
        seen: set[tuple[str, int]] = set()
        for source in self._sources:
            for _, _, index in source.code():
                symbol = source.symbol(index)
                if symbol.is_code and symbol.name and (symbol.name, symbol.address) not in seen:
                    seen.add((symbol.name, symbol.address))
                    yield symbol

    def functions_beginning(self, start: str) -> Iterator[Symbol]:
        """Iterate over the functions whose names begin with ``start``, without reading all others."""
        self._load_later()
        first: dict[tuple[str, int], Symbol] = {}
        for source in self._sources:
            for symbol in source.beginning(start):
                if symbol.is_code:
                    first.setdefault((symbol.name, symbol.address), symbol)
        yield from first.values()

    def matching(self, pattern: str, functions: Iterable[Symbol] | None = None) -> list[Symbol]:
        """
        Return the functions that match a shell pattern, in the order of ``functions``, by default all functions.

        A pattern FILE:NAME matches the static functions of source files; a function that it matches is called
        FILE:NAME, with its own file. With ``*`` as FILE, other functions called NAME match, too.
        """
        functions = self.functions() if functions is None else functions
        if (parts := split_file(pattern)) is None:
            matches = self.matcher(pattern)
            return [symbol for symbol in functions if matches(symbol.name)]
        file, name = parts
        named = compile_glob(name).match
        in_file = compile_glob(f"*/{file}").match
        files: dict[str, dict[int, str]] = {}
        found = []
        for symbol in functions:
            if not named(symbol.name):
                continue
            if symbol.name not in files:
                files[symbol.name] = {each.address: known for known, each in self.in_files(symbol.name)}
            known = files[symbol.name].get(symbol.address) if symbol.binding == "local" else None
            if known is not None and in_file(f"/{known}"):
                found.append(symbol._replace(name=f"{known}:{symbol.name}"))
            elif known is None and file == "*":
                found.append(symbol)
        return found

    def copy_name(self, symbol: Symbol) -> str:
        """Return the name of a symbol, as FILE:NAME if it is one of several static functions called NAME."""
        if symbol.binding != "local" or not symbol.is_code:
            return symbol.name
        files = self.in_files(symbol.name)
        if len(files) < _COPIES:
            return symbol.name
        return next((f"{file}:{symbol.name}" for file, each in files if each.address == symbol.address), symbol.name)

    def near(self, name: str) -> list[str]:
        """Return up to three known names that are similar to ``name``, the nearest first."""
        self._load_later()
        names = {n for source in self._sources for n in source.names() if n}
        plain = _plain(name)
        same = sorted(n for n in names if len(n) >= len(plain) and _plain(n) == plain and n != name)
        near = [n for n in near_names(name, sorted(names), _NEAR + 1) if n not in same and n != name]
        return (same + near)[:_NEAR]

    def matcher(self, pattern: str) -> Callable[[str], bool]:
        """
        Return a predicate for linker names that match a shell pattern.

        If a name is equal to the pattern, such as ``main.gen[int]`` or ``Cart::operator*``, only that name matches.
        """
        if self.lookup(pattern):
            return pattern.__eq__
        is_operator = "operator" in pattern
        if is_operator or "::" in pattern:
            named = {each.linker_name for each in self._readable_names(pattern) if each.is_whole or is_operator}
            if named:
                return named.__contains__
        return name_matcher(pattern)

    def _readable_names(self, written: str) -> list[ReadableName]:
        from dprobes.target.readable_names import find_readable

        self._load_later()
        return find_readable((name for source in self._sources for name in source.names()), written)

    def readable(self, name: str) -> list[tuple[str, Symbol]]:
        """
        Return the symbols for a readable name of C++ or Rust, each with its whole readable name, one for each address.

        More than one means that it is ambiguous.
        """
        found: dict[int, tuple[str, Symbol]] = {}
        for each in self._readable_names(name):
            for symbol in self.lookup(each.linker_name):
                found.setdefault(symbol.address, (each.readable, symbol))
        return [found[address] for address in sorted(found)]

    def near_readable(self, name: str) -> list[str]:
        """Return up to three readable names that are similar to ``name``, the nearest first."""
        from dprobes.target.readable_names import near_readable

        self._load_later()
        return near_readable((each for source in self._sources for each in source.names()), name)

    def _function_at(self, link_address: int) -> Symbol | None:
        """
        Return the function at a link address without sorting all functions, if that is possible.

        Most programs look up only some starts of functions. Return None if there is none, or a source may have a better
        name.
        """
        if self._index is not None or self._looks == 0:
            return None
        self._looks -= 1
        found = (symbol for source in self._sources for symbol in source.starting(link_address))
        best = min((symbol for symbol in found if symbol.name and symbol.size), key=familiarity, default=None)
        if best is None or not best.is_code or not best.default_version or best.binding == "local":
            return None
        return best

    def _code_index(self) -> _CodeIndex:
        self._load_later()
        if self._index is None:
            self._index = _CodeIndex(self._sources)
        return self._index

    def _load_later(self) -> bool:
        """
        Load the sources that are slow to find, unless local symbols are known.

        Return True if that added a source.
        """
        later, self._later = self._later, None
        if later is None or any(source.complete for source in self._sources):
            return False
        added = list(later())
        self._sources += added
        self._index = None
        return bool(added)


class _CodeIndex:
    """An index of the code symbols of several sources by link address."""

    def __init__(self, sources: Sequence[SymbolSource]) -> None:
        self._sources = sources
        rows = [(address, size, i, index) for i, s in enumerate(sources) for address, size, index in s.code()]
        rows.sort()
        self._rows = rows
        self._starts = [row[0] for row in rows]
        self._reach: list[int] = []  # the largest end of each row and all before it, which bounds a search back
        end = 0
        for address, size, _, _ in rows:
            end = max(end, address + size)
            self._reach.append(end)

    def covering(self, address: int, area: CodeRange) -> Symbol | None:
        last = bisect_right(self._starts, address) - 1
        i = last
        while i >= 0 and self._reach[i] > address and self._starts[i] >= area[0]:
            start, size, _, _ = self._rows[i]
            if start + size > address and (found := self._best(i, address)) is not None:
                return found
            i -= 1
        if last < 0 or self._starts[last] < area[0] or self._rows[last][1]:
            return None
        return self._best(last, None)

    def starting(self, start: int, end: int) -> list[Symbol]:
        rows = self._rows[bisect_left(self._starts, start) : bisect_left(self._starts, end)]
        return [self._sources[source].symbol(index) for _, _, source, index in rows]

    def preceding(self, address: int) -> list[Symbol]:
        last = bisect_right(self._starts, address) - 1
        return self.starting(self._starts[last], self._starts[last] + 1) if last >= 0 else []

    def _best(self, last: int, address: int | None) -> Symbol | None:
        """
        Return the best symbol among those that start where row ``last`` of the index does, or None if none has a name.

        With ``address``, only symbols that cover this link address count.
        """
        start = self._starts[last]
        symbols = []
        while last >= 0 and self._starts[last] == start:
            _, size, source, index = self._rows[last]
            if address is None or start + size > address:
                symbols.append(self._sources[source].symbol(index))
            last -= 1
        return min((s for s in symbols if s.name), key=familiarity, default=None)


def _preference(symbol: Symbol) -> tuple[bool, bool]:
    return not symbol.default_version, symbol.binding == "local"


def familiarity(symbol: Symbol) -> tuple[bool, bool, bool, int, int, str]:
    """Return a sort key for the names of one address. The name for messages is first."""
    underscores = len(symbol.name) - len(symbol.name.lstrip("_"))
    return (
        not symbol.is_code,
        not symbol.default_version,
        symbol.binding == "local",
        underscores,
        len(symbol.name),
        symbol.name,
    )


def _plain(name: str) -> str:
    return name.strip("_").lower()
