"""
Module with its symbols: the mapping of names to places in the file and back, and the sources of symbols.

Symbol expressions are parsed elsewhere; this module looks up the single names in them. Addresses are link addresses;
offsets are file offsets.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.diagnostics import either, first_of
from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_lookup import find_module, is_library_for, searched_directories
from dprobes.target.module_symbols import SymbolTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dprobes.target.kernel.kernel_symbols import CarriedKernel
    from dprobes.target.module_symbols import Symbol, SymbolSource

__all__ = [
    "NOT_EXPECTED",
    "OWN_SYMBOLS",
    "FileSymbols",
    "FunctionCode",
    "InstructionStarts",
    "Module",
    "SymbolProvider",
    "linked_files",
    "preloaded_files",
    "providers_of",
]

_FILES_MAX = 500
"""Maximum number of libraries of a program that are read."""


def preloaded_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """
    Iterate over the files that the dynamic loader maps before all libraries.

    The environment lists them (LD_PRELOAD, ld.so(8)).
    """
    for name in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        path = find_module(name)
        if path is not None:
            yield path


def linked_files(program: Path) -> dict[str, Path | None]:
    """
    Return the libraries that a program needs, directly or indirectly, by name.

    A library that is not found is None.
    """
    found: dict[str, Path | None] = {}
    waiting = [program]
    while waiting and len(found) < _FILES_MAX:
        try:
            elf = ElfFile.open(waiting.pop())
        except TargetError:
            continue
        for name in elf.needed:
            if name not in found:
                found[name] = path = _beside(elf, name) or find_module(name, architecture=elf.machine)
                if path is not None:
                    waiting.append(path)
    return found


def _beside(elf: ElfFile, name: str) -> Path | None:
    """Return a library from a directory that is searched before those of the system, or None if there is none."""
    paths = [directory / name for directory in searched_directories(elf)] if "/" not in name else []
    return next((path.resolve() for path in paths if is_library_for(path, elf.machine)), None)


def providers_of(names: Sequence[str], files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files that export the named functions, by name. An unreadable file exports none."""
    found: dict[str, list[Path]] = {}
    for path in dict.fromkeys(files):
        for name in _provided(path, names):
            found.setdefault(name, []).append(path)
    return found


def _provided(path: Path, names: Sequence[str]) -> list[str]:
    try:
        tables = elf_symbols(ElfFile.open(path))
        return [
            name
            for name in names
            if any(symbol.is_code and symbol.binding != "local" for table in tables for symbol in table.find(name))
        ]
    except (TargetError, OSError):
        return []


NOT_EXPECTED = "no instruction is expected there"
"""The difference at a file offset for which the compiled program has no instruction."""

_LISTED = 4  # names listed in a hint

_CHOOSING = re.compile(r"_chk|_ifunc$|_resolver$")
"""Names of library functions that select an implementation (IFUNC), or check arguments before they call a function."""


class InstructionStarts(NamedTuple):
    """
    File offsets of consecutive instructions, and the ``end`` of the last one.

    ``invalid`` is the offset of the first bytes that are not an instruction, or None.
    """

    starts: list[int]
    end: int
    invalid: int | None = None


_AHEAD = 256
"""Minimum size in bytes of the code that is decoded at once: the next place in a function is usually near."""


class FunctionCode:
    """
    The file offsets of a function's instructions, decoded on demand from its ``start`` and a little further.

    ``decode`` returns the instructions that start from one offset to another (excluded); fewer at the end of the code.
    """

    def __init__(self, start: int, decode: Callable[[int, int], InstructionStarts]) -> None:
        self._decode = decode
        self._starts: list[int] = []
        self._end = start
        """The end of the last decoded instruction."""
        self._valid_to = sys.maxsize
        """The offset of the first bytes that are no instruction."""

    def _decode_to(self, offset: int) -> bool:
        """Decode the instructions that start before ``offset``. Return False if there is data between them."""
        if self._end < offset:
            found = self._decode(self._end, max(offset, self._end + _AHEAD))
            self._starts += found.starts
            self._end = found.end
            if found.invalid is not None:
                self._valid_to = min(self._valid_to, found.invalid)
        return self._valid_to >= offset

    def starts_before(self, offset: int) -> Sequence[int] | None:
        """
        Return the offsets of the instructions that start before ``offset``.

        Return None if there is data between them, because the instructions after it may be decoded incorrectly.
        """
        return self._starts[: bisect_left(self._starts, offset)] if self._decode_to(offset) else None

    def last_before(self, offset: int) -> tuple[int, int] | None:
        """
        Return the start and the end of the last instruction that starts before ``offset``, or ``offset`` twice.

        Return None as ``starts_before``.
        """
        if not self._decode_to(offset):
            return None
        following = bisect_left(self._starts, offset)
        if not following:
            return offset, offset
        return self._starts[following - 1], self._starts[following] if following < len(self._starts) else self._end

    def end_of(self, start: int) -> int:
        """Return the end of the decoded instruction that starts at ``start``."""
        following = bisect_right(self._starts, start)
        return self._starts[following] if following < len(self._starts) else self._end


class Module:
    """
    ELF file with its symbols, created by ``load`` or by a ``SymbolProvider``.

    ``expected`` has the bytes of instructions that must be in the file, by file offset, or is None if unknown.
    """

    def __init__(self, elf: ElfFile, symbols: SymbolTable, expected: Mapping[int, bytes] | None = None) -> None:
        self.elf = elf
        self.symbols = symbols
        self._expected = expected
        self.decoded: dict[int, FunctionCode] = {}
        """The decoded instructions of functions, by the file offsets of the functions' starts."""

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        extra_symbols: str | os.PathLike[str] | None = None,
        *,
        reached: Path | None = None,
    ) -> Module:
        """
        Load the module in a file. The symbols of the file ``extra_symbols`` (``--sym``) come first.

        ``reached`` is the path to open if ``path`` no longer leads to the file. Errors contain ``path``.
        """
        extra = None if extra_symbols is None else Path(extra_symbols)
        return FileSymbols(extra).module_of(ElfFile.open(path, reached))

    def __repr__(self) -> str:
        return f"Module({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The path of the module's file."""
        return self.elf.path

    @property
    def word_size(self) -> int:
        """Size of a machine word in bytes: 4 or 8."""
        return self.elf.word_size

    def address_of(self, symbol_name: str) -> int:
        """Return the link address of a symbol; raise ``TargetError`` if the module has no such symbol, or several."""
        symbol = self._symbol(symbol_name)
        if symbol.kind == "ifunc":
            raise TargetError(
                f"'{symbol_name}' in '{self.path}' is chosen at run time (IFUNC): "
                "its symbol is the function that chooses",
                hint=self._implementations(symbol_name),
            )
        if symbol.kind == "tls":
            raise TargetError(f"'{symbol_name}' in '{self.path}' is thread-local: each thread has its own address")
        return symbol.address

    def code_offset_of(self, symbol_name: str, addend: int) -> int:
        """Return the file offset ``addend`` bytes after a symbol; raise ``TargetError`` for a symbol of data."""
        address, symbol = self.address_of(symbol_name), self._symbol(symbol_name)
        if symbol.kind in ("object", "common"):
            raise TargetError(
                f"'{symbol_name}' in '{self.path}' is data, not code",
                hint=f"to see accesses to it, write 'address = {symbol_name}' and 'watchpoint = w' (or rw)",
            )
        return self.file_offset(address + addend)

    def _symbol(self, name: str) -> Symbol:
        """Return the only symbol with the name ``name``, or with it as its readable name."""
        found = self.symbols.lookup(name)
        if len(found) > 1:
            raise self._ambiguous(name, found)
        if found:
            return found[0]
        readable = [] if self.symbols.imports(name) else self.symbols.readable(name)
        if not readable:
            raise self._not_found(name)
        if len(readable) > 1:
            raise self._several(name, readable)
        return readable[0][1]

    def file_offset(self, address: int) -> int:
        """Return the file offset of the byte at a link address; raise ``TargetError`` if it is not in the file."""
        offset = self.elf.file_offset(address)
        if offset is None:
            raise TargetError(f"address 0x{address:x} is not in the file '{self.path}'")
        return offset

    def symbol_at(self, file_offset: int) -> tuple[str, int] | None:
        """
        Return the name of the function at a file offset and the distance in bytes from its start.

        One of several static functions with a name is called FILE:NAME. Return None without a function.
        """
        address = self.elf.link_address(file_offset)
        symbol = self.symbols.covering(address) if address is not None else None
        if address is None or symbol is None:
            return None
        return self.symbols.copy_name(symbol), address - symbol.address

    def names_at(self, file_offset: int) -> set[str]:
        """Return all names of the function that starts at a file offset."""
        address = self.elf.link_address(file_offset)
        return self.symbols.names_at(address) if address is not None else set()

    def function_start(self, file_offset: int) -> int | None:
        """
        Return the link address at which the function at a file offset starts, or None if unknown.

        Sources are the symbols and the unwind table.
        """
        address = self.elf.link_address(file_offset)
        if address is None:
            return None
        symbol = self.symbols.covering(address)
        if symbol is None or not symbol.is_code:
            described = self.elf.frames.covering(self.elf, address)
            return described if described is not None or symbol is None else symbol.address
        return symbol.address

    def is_known_code(self, file_offset: int) -> bool:
        """
        Return True if the byte at a file offset is known to be code, and not data between functions.

        A function, the unwind table, or the program's entry makes it known. A label without a type does not.
        """
        address = self.elf.link_address(file_offset)
        if address is None:
            return False
        symbol = self.symbols.covering(address)
        if (symbol is not None and symbol.is_code) or address == self.elf.entry:
            return True
        return self.elf.frames.extent(self.elf, address) is not None

    def difference_at(self, file_offset: int) -> str | None:
        """
        Return the difference of the instruction at a file offset from the expected one, a clause.

        Return None if they are equal. Return None also if no instructions are expected of the file.
        """
        if self._expected is None:
            return None
        expected = self._expected.get(file_offset)
        if expected is None:
            return NOT_EXPECTED
        found = self.elf.data[file_offset : file_offset + len(expected)]
        return None if found == expected else f"expected {expected.hex(' ')}, found {found.hex(' ') or 'nothing'}"

    def _not_found(self, name: str) -> TargetError:
        if self.symbols.imports(name):
            return TargetError(f"'{name}' is imported by '{self.path}', not defined in it", hint=self._definition(name))
        from dprobes.target.module_symbols import clones_in, only_clones

        if clones := clones_in(self.symbols, name):
            return only_clones(f"'{self.path}'", name, clones)
        if (others := self._with_other_parameters(name)) is not None:
            return others
        last = _bare(re.sub(r"\(.*", "", name)).rpartition("::")[2]
        near = self.symbols.near(name) or self.symbols.near_readable(name)
        is_known = any(_bare(each).rpartition("::")[2] == last for each in near)
        if not is_known and self._is_described(last):
            return TargetError(
                f"'{name}' is in the debug information of '{self.path}', but not among its symbols",
                hint="a function of that name was inlined, or left out: probe the one that it was inlined into",
            )
        if near:
            hint = f"did you mean {either(near)}?"
        elif not self.symbols.complete:
            from dprobes.target.elf.symbol_sources import foreign_debug_file

            hint = "the file is stripped: give its symbols with --sym FILE, install its debug file, or write a number"
            if (problem := foreign_debug_file(self.elf)) is not None:
                hint = f"the file is stripped, and {problem}: install that of this build"
        else:
            hint = None
        return TargetError(f"'{self.path}' has no symbol '{name}'", hint=hint)

    def _with_other_parameters(self, name: str) -> TargetError | None:
        """Return the error for a C++ function that exists only with other parameters, or None."""
        from dprobes.target.readable_names import readable_parts

        path, parameters = readable_parts(name)
        found = self.symbols.readable(path) if parameters else []
        if not found:
            return None
        names = [f"'{readable}'" for readable, _ in found]
        return TargetError(
            f"'{path}' in '{self.path}' has not the parameters '{parameters}'",
            hint=f"there is {first_of(names, _LISTED)}",
        )

    def _definition(self, name: str) -> str:
        """Return a hint for a probe on an imported function: the first library that defines the function."""
        advice = "put the probe on the library that defines it"
        linked = linked_files(self.path)
        providers = providers_of([name], (path for path in linked.values() if path is not None)).get(name)
        if providers:
            return f"{advice}: '{next(library for library, path in linked.items() if path == providers[0])}'"
        libraries = ", ".join(f"'{library}'" for library in self.elf.needed)
        return f"{advice}; this module needs {libraries}" if libraries else advice

    def _is_described(self, name: str) -> bool:
        """Return whether the debug information of the file itself has a name, in a section that is not compressed."""
        if (section := self.elf.section(".debug_str")) is None:
            return False
        return b"\0" + os.fsencode(name) + b"\0" in self.elf.data[section.offset : section.offset + section.size]

    def _ambiguous(self, name: str, found: list[Symbol]) -> TargetError:
        files = {symbol.address: file for file, symbol in self.symbols.in_files(name)}
        listed, places = [], []
        for symbol in found:
            offset, file = self.elf.file_offset(symbol.address), files.get(symbol.address)
            place = f"0x{offset:x}" if offset is not None else f"none (address 0x{symbol.address:x})"
            listed.append(f"{place} ({file})" if file else place)
            named = file is not None and list(files.values()).count(file) == 1
            places += [f'"{file}:{name}"'] if named else []
            places += [f"offset = 0x{offset:x}"] if offset is not None else []
        return TargetError(
            f"'{name}' is the name of {len(found)} places in '{self.path}', at file offsets {', '.join(listed)}",
            hint=f"write the intended one as {' or '.join(places[:2])}" if places else None,
        )

    def _several(self, name: str, found: list[tuple[str, Symbol]]) -> TargetError:
        names = [readable for readable, _ in found]
        listed = [
            f"'{readable}'" + (f" ({symbol.name})" if names.count(readable) > 1 else "") for readable, symbol in found
        ]
        whole = names[0] if names.count(names[0]) == 1 else found[0][1].name
        escaped = whole.replace('"', '\\"')
        return TargetError(
            f"'{name}' may be one of {len(found)} functions of '{self.path}': {first_of(listed, _LISTED)}",
            hint=f'write the whole of one: offset = "{escaped}"',
        )

    def _implementations(self, name: str) -> str:
        plain = name.strip("_")
        names = {
            s.name
            for s in self.symbols.functions()
            if s.kind == "func" and s.name.strip("_").startswith(f"{plain}_") and not _CHOOSING.search(s.name)
        }
        if not names:
            return "put the probe on one of the functions that it can choose; their names need the debug file or --sym"
        listed = [f"'{each}'" for each in sorted(names, key=lambda n: (len(n), n))]
        return f"put the probe on one of the functions that it can choose: {first_of(listed, _LISTED)}"


def _bare(name: str) -> str:
    """Return a demangled name without ABI tags, ``[abi:cxx11]``, and without template arguments at its end."""
    return re.sub(r"<.*>$", "", re.sub(r"\[abi:\w+\]", "", name))


class SymbolProvider(Protocol):
    """A provider of symbols for the files to which a module's name refers."""

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file with its symbols; raise ``TargetError`` if they are not available."""

    def machine(self, host: str) -> str | None:
        """
        Return the processor (``ElfFile.machine``) of the file to look up on a machine ``host``.

        None stands for the processor of the process, of the command, or else of the machine.
        """

    @property
    def kernels(self) -> tuple[CarriedKernel, ...]:
        """The known builds of the kernel, or of a module of it."""


class FileSymbols(NamedTuple):
    """
    Symbols of a file and its debug file, preceded by those of the file ``extra`` (``--sym``).

    A separate debug file is opened only when a lookup finds nothing in the module's own symbols.
    """

    extra: Path | None = None
    table: type[SymbolTable] = SymbolTable

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` if ``extra`` belongs to another module."""
        sources: list[SymbolSource] = []
        if self.extra is not None:
            from dprobes.target.elf.symbol_sources import load_symbols

            sources += load_symbols(self.extra, elf).sources
        sources += elf_symbols(elf)
        return Module(elf, self.table(sources, code_range=elf.code_range, later=lambda: _debug_symbols(elf)))

    def machine(self, host: str) -> str | None:  # noqa: ARG002 - a file may have symbols for whatever processor
        """Return None: the module's file is looked up for the processor of the process, the command or the machine."""
        return None

    @property
    def kernels(self) -> tuple[CarriedKernel, ...]:
        """Empty: the running kernel's own symbol list is used."""
        return ()


OWN_SYMBOLS = FileSymbols()
"""Only the symbols of the file itself and its debug file."""


def _debug_symbols(elf: ElfFile) -> Iterable[SymbolSource]:
    from dprobes.target.elf.symbol_sources import find_debug_file

    debug = find_debug_file(elf)
    return elf_symbols(debug) if debug is not None else []
