"""
Symbols from other files than the module: separate debug files, and the file of ``--sym``.

Rules: GDB manual, "Debugging Information in Separate Files", methods build-id and ``.gnu_debuglink``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.file_contents import file_contents
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_symbols import Symbol, SymbolTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.target.module_symbols import SymbolSource

__all__ = [
    "DEBUG_DIRECTORY",
    "ListedSymbols",
    "debug_path",
    "find_debug_file",
    "foreign_debug_file",
    "lack_of_debug_file",
    "load_symbols",
    "parse_linker_map",
    "parse_nm",
]

# Symbols from text: ``System.map``, the output of ``nm``, and the map file of the GNU linker.
# All three list link addresses. They have no build-id, so they cannot be checked against a module. Names in them may
# contain spaces (demangled C++). Formats: nm(1), ``ld -Map`` (binutils ldlang.c).


_NM_LINE = re.compile(r"^([0-9a-fA-F]{4,16}) (?:([0-9a-fA-F]{4,16}) )?([A-Za-z?-]) (\S[^\t\n]*)", re.MULTILINE)
_NM_UNDEFINED = re.compile(r"^ {8,16} [Uwv] (\S+)", re.MULTILINE)
_NM_KINDS = dict.fromkeys("tTwW", "func") | {"i": "ifunc"} | dict.fromkeys("bBdDrRgGsSvVuC", "object")

_MAP_START = "Linker script and memory map"
# " .text.name  0xADDRESS  0xSIZE file.o"; a long name is on its own line before the rest.
_MAP_SECTION = re.compile(r"^ ?([._A-Za-z]\S*)(?: +0x([0-9a-f]+) +0x([0-9a-f]+)(?: (.*))?)?$")
_MAP_REST = re.compile(r"^ +0x([0-9a-f]+) +0x([0-9a-f]+)(?: (.*))?$")
_MAP_SYMBOL = re.compile(r"^ {8,}0x([0-9a-f]+) {8,}(\S.*)$")
_MAP_ASSIGNED = re.compile(r"^(?:(?:PROVIDE|PROVIDE_HIDDEN|HIDDEN) \()?([A-Za-z_$][\w$.]*) = ")
_MAP_THREAD_LOCAL = re.compile(r"^\.(?:tdata|tbss)\b")
_MAP_CODE = re.compile(r"^\.(?:text|init|fini)\b")


class ListedSymbols:
    """The symbols of a list such as ``nm`` prints, and the names that it lists as undefined."""

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
        """Return an empty list: lists of symbols have no source files."""
        return []

    def imports(self, name: str) -> bool:
        """Return whether ``name`` was listed, and only as undefined."""
        return name in self._undefined and name not in self._by_name

    def names(self) -> Iterable[str]:
        """Return the names of all symbols."""
        return self._by_name.keys()

    def beginning(self, start: str) -> list[Symbol]:
        """Return the symbols whose names begin with ``start``."""
        return [symbol for symbol in self._symbols if symbol.name.startswith(start)]

    def code(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over link address, size and index of each function."""
        return ((s.address, s.size, i) for i, s in enumerate(self._symbols) if s.is_code)

    def symbol(self, index: int) -> Symbol:
        """Return the symbol with an index from ``code``."""
        return self._symbols[index]

    def starting(self, _address: int) -> list[Symbol]:
        """Return an empty list: a lookup would take a scan of all symbols."""
        return []


def parse_nm(text: str) -> ListedSymbols | None:
    """Return the symbols of a ``System.map`` or the output of ``nm``, or None if the text is neither."""
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
    Return the symbols of a map file of the GNU linker, or None if the text is not one.

    Such a file lists global symbols only. Sections from ``-ffunction-sections`` have the names of static functions,
    too.
    """
    start = text.find(_MAP_START)
    if start < 0:
        return None
    reader = _MapReader()
    for line in text[start + len(_MAP_START) :].split("\n"):
        reader.read(line)
    return ListedSymbols(reader.symbols())


class _MapReader:
    """A reader of the GNU linker's map file, line by line, which collects its symbols."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Symbol] = {}
        self._static: list[Symbol] = []
        self._section = ""
        self._pending: str | None = None

    def symbols(self) -> list[Symbol]:
        """Return the symbols read so far. A section name such as ``.text.f`` counts only where no symbol is."""
        taken = {symbol.address for symbol in self._found.values()}
        return [*self._found.values(), *(symbol for symbol in self._static if symbol.address not in taken)]

    def read(self, line: str) -> None:
        """Read the next line of the map: a section, the rest of a section's line, or a symbol."""
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
            return  # the name of an imported function, at its PLT entry
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


DEBUG_DIRECTORY = Path("/usr/lib/debug")
"""Directory where distributions install debug files."""

_INFORMATION = (".debug_info", ".zdebug_info")

_DIRECTORY_DIGITS = 2
"""Number of digits of a build-id that are the name of a directory below ``.build-id``."""


def find_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> ElfFile | None:
    """
    Return the separate debug file of a module, or None if there is none.

    It is searched by the build-id, then by ``.gnu_debuglink``. A kernel module's is searched by the module's name,
    because distributions write no link. A file that does not match (other build-id, other checksum) or cannot be read
    is skipped.
    """
    for path, checksum in _expected(module, directory):
        is_right = checksum is None or _checksum(path) == checksum
        if is_right and (found := _open_matching(path, module)) is not None:
            return found
    return _of_kernel_module(module, directory) if module.type == "rel" and _debug_link(module) is None else None


def foreign_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> str | None:
    """
    Return a message about a debug file of another build where the module's was expected, or None if there is none.

    Use it for a module whose debug file ``find_debug_file`` has not found.
    """
    for path, checksum in _expected(module, directory):
        if (problem := _of_other_build(path, module)) is not None:
            return problem
        if checksum is not None and (found := _checksum(path)) is not None and found != checksum:
            return (
                f"'{path}' is the debug file of another build: its CRC is {found:#010x}, "
                f"and .gnu_debuglink of the module says {checksum:#010x}"
            )
    return None


def lack_of_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> str | None:
    """Return the message of ``foreign_debug_file`` for a module without debug information, or None."""
    if any(map(module.section, _INFORMATION)) or find_debug_file(module, directory):
        return None
    return foreign_debug_file(module, directory)


def _of_other_build(path: Path, module: ElfFile) -> str | None:
    """Return a message if a file is known to be of another build than ``module``, or None."""
    try:
        found = ElfFile.open(path)
    except TargetError:
        return None
    if found.build_id is None or module.build_id is None or found.build_id == module.build_id:
        return None
    return (
        f"'{path}' is the debug file of another build: its build-id is {found.build_id}, the module's {module.build_id}"
    )


def debug_path(build_id: str, directory: Path = DEBUG_DIRECTORY) -> Path:
    """Return the path where the debug file of a build-id is installed."""
    return directory / ".build-id" / build_id[:_DIRECTORY_DIGITS] / f"{build_id[_DIRECTORY_DIGITS:]}.debug"


def _expected(module: ElfFile, directory: Path) -> Iterator[tuple[Path, int | None]]:
    """
    Iterate over the possible paths of a module's debug file, each with the required CRC-32.

    The checksum is None if the build-id determines the file. The module itself is never among the paths.
    """
    if module.build_id is not None and len(module.build_id) > _DIRECTORY_DIGITS:
        yield debug_path(module.build_id, directory), None
    if (link := _debug_link(module)) is not None:
        name, checksum = link
        own = _real(module.path)
        beside = own.parent
        for path in (beside / name, beside / ".debug" / name, directory / beside.relative_to("/") / name):
            if _real(path) != own:
                yield path, checksum


def _of_kernel_module(module: ElfFile, directory: Path) -> ElfFile | None:
    """Return the debug file of a kernel module, or None if there is none. The module's own file may be compressed."""
    if module.build_id is None:
        return None
    beside = _real(module.path).parent
    name = module.path.name.partition(".ko")[0]
    # /lib may be a link to /usr/lib, and the directory of debug files is older than that.
    for place in (str(beside), str(beside).removeprefix("/usr")):
        # Those of Debian and SUSE have the module's name, those of Fedora and Arch end in '.debug'.
        for suffix in (".ko", ".ko.debug"):
            found = _open_matching(directory / place.lstrip("/") / f"{name}{suffix}", module)
            if found is not None and found.build_id == module.build_id:
                return found
    return None


def load_symbols(path: Path, module: ElfFile) -> SymbolTable:
    """
    Load symbols for ``module`` from the file ``path``, whose contents determine its format.

    The formats are an unstripped ELF or debug file, a ``System.map`` or other output of ``nm``, and a map file of the
    GNU linker. If an ELF file and ``module`` both have a build-id, these must be equal. Raise ``TargetError`` for other
    contents, or if there are no symbols.
    """
    data = file_contents(path, "a file with symbols")
    sources: list[SymbolSource]
    if data[:4] == b"\x7fELF":
        elf = ElfFile.of_bytes(path, data)
        _check_same_module(elf, module)
        sources = list(elf_symbols(elf))
    else:
        text = data[:].decode("utf-8", "replace")
        listed = parse_linker_map(text)
        if listed is None:
            listed = parse_nm(text)
        if listed is None:
            raise TargetError(
                f"'{path}' holds no symbols in a known format",
                hint="give an unstripped ELF or .debug file, a System.map or the output of nm, or a GNU ld map file",
            )
        sources = [listed]
    if not any(any(True for _ in source.names()) for source in sources):
        raise TargetError(f"'{path}' holds no symbols", hint="give the file as it was before strip, or its debug file")
    return SymbolTable(sources, code_range=module.code_range)


def _check_same_module(elf: ElfFile, module: ElfFile) -> None:
    if elf.machine != module.machine:
        raise TargetError(f"'{elf.path}' is for {elf.machine}, but '{module.path}' for {module.machine}")
    if elf.build_id is not None and module.build_id is not None and elf.build_id != module.build_id:
        raise TargetError(
            f"'{elf.path}' does not belong to '{module.path}': its build-id is {elf.build_id}, "
            f"the module's {module.build_id}",
            hint="give the symbols of exactly this build of the module",
        )


def _open_matching(path: Path, module: ElfFile) -> ElfFile | None:
    try:
        found = ElfFile.open(path)
        _check_same_module(found, module)
    except TargetError:
        return None
    return found.placed_as(module) if module.type == "rel" else found


def _debug_link(module: ElfFile) -> tuple[str, int] | None:
    """
    Return the file name and CRC-32 in ``.gnu_debuglink``, or None if the section is missing or malformed.

    The section consists of the name, a NUL, padding to 4 bytes, and the checksum.
    """
    section = module.section(".gnu_debuglink")
    if section is None or section.offset + section.size > len(module.data):
        return None
    data = module.data[section.offset : section.offset + section.size]
    end = data.find(b"\0")
    place = (end + 4) & ~3
    name = data[:end].decode("utf-8", "surrogateescape")
    if end <= 0 or len(data) < place + 4 or "/" in name or name in (".", ".."):
        return None
    return name, int.from_bytes(data[place : place + 4], module.byte_order)


def _real(path: Path) -> Path:
    # Path.resolve() raises RuntimeError for circular links.
    return Path(os.path.realpath(path))


def _checksum(path: Path) -> int | None:
    import zlib

    try:
        return zlib.crc32(file_contents(path, "a debug file"))
    except TargetError:
        return None
