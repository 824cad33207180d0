"""
The symbols of the running kernel and its modules, from ``/proc/kallsyms``.

A line is an address, a letter as in nm(1), a name, and for a module's symbol a tab and the module in brackets::

    ffffffff81000000 T _text
    ffffffffc0201000 t ext4_readdir	[ext4]

The list has some 200 000 lines, and parsing them takes a second. So names and addresses are searched in its bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from dprobes.diagnostics import near_lengths, near_names, parts_of
from dprobes.globs import compile_glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "KALLSYMS",
    "CarriedKernel",
    "Kallsyms",
    "KernelArea",
    "KernelPlace",
    "KernelSymbol",
    "NeededKallsyms",
    "listed",
]

KALLSYMS = Path("/proc/kallsyms")

_CODE = "tTwW"
_LINE = re.compile(rb"^([0-9a-f]{1,16}) ([!-~]) (\S+)(?:[ \t]+\[(\S+)\])?$", re.MULTILINE)
_ADDRESS = re.compile(rb"[0-9a-f]{1,16}")
_BEFORE_NAME = 19
"""Maximum number of bytes before a name: the newline of the previous line, 16 digits, a blank, and the letter."""
_NEAR = 3
_FEW = 500
"""Maximum number of data symbols in a list of functions only, which are symbols of the linker script."""


class KernelSymbol(NamedTuple):
    """Symbol of the kernel, or of the module ``module``. ``letter`` is its kind, as in nm(1)."""

    name: str
    address: int
    letter: str
    module: str = ""

    @property
    def is_code(self) -> bool:
        """True for a symbol in a text section. Most of these are functions."""
        return self.letter in _CODE


class Kallsyms:
    """The symbols of ``/proc/kallsyms`` at the time of reading."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @classmethod
    def read(cls, path: Path = KALLSYMS) -> Self:
        """Read the list; raise OSError if the kernel does not provide it."""
        return cls(path.read_bytes())

    @property
    def is_hidden(self) -> bool:
        """True if the kernel shows 0 for every address (``kernel.kptr_restrict``), or no symbol at all."""
        return re.search(rb"^0*[1-9a-f]", self._data, re.MULTILINE) is None

    @property
    def has_data(self) -> bool:
        """True if the list has the symbols of the kernel's data, which are tens of thousands."""
        return len(re.findall(rb" [dDbB] ", self._data[: self._core_size])) > _FEW

    def all(self) -> Iterator[KernelSymbol]:
        """Iterate over all symbols, in the order of the list."""
        return (_symbol(match) for match in _LINE.finditer(self._data))

    def find(self, name: str, module: str | None = None) -> list[KernelSymbol]:
        """
        Return the symbols with a name, by ascending address.

        If ``module`` is None, all modules are searched; if it is "", only the kernel itself.
        """
        found = {symbol for symbol in map(_symbol, self._beginning(name)) if symbol.name == name}
        return sorted((s for s in found if module is None or s.module == module), key=lambda symbol: symbol.address)

    def matching(self, pattern: str, module: str) -> Iterator[KernelSymbol]:
        """Iterate over the symbols of code in a module that match a shell pattern, in the order of the list."""
        matches = compile_glob(pattern).match
        start = re.match(r"[^*?[]*", pattern)
        assert start is not None
        if start[0]:
            found = map(_symbol, self._beginning(start[0]))
            yield from (s for s in found if s.is_code and s.module == module and matches(s.name))
            return
        ending = rb"[ \t]+\[(%b)\]" % re.escape(module.encode()) if module else rb"()"
        for match in re.finditer(rb"^([0-9a-f]{1,16}) ([tTwW]) (\S+)%b$" % ending, self._data, re.MULTILINE):
            if matches(match[3].decode(errors="replace")):
                yield _symbol(match)

    @cached_property
    def shared_names(self) -> frozenset[str]:
        """The names that several symbols of code have, in the kernel or its modules."""
        times = Counter(re.findall(rb"^[0-9a-f]{1,16} [tTwW] (\S+)", self._data, re.MULTILINE))
        return frozenset(name.decode(errors="replace") for name, count in times.items() if count > 1)

    def _beginning(self, start: str) -> Iterator[re.Match[bytes]]:
        """Iterate over the lines of the symbols whose names begin with ``start``, in the order of the list."""
        quoted = b" " + start.encode()
        at = self._data.find(quoted)
        while at >= 0:
            line = self._data.rfind(b"\n", max(0, at - _BEFORE_NAME), at) + 1
            match = _LINE.match(self._data, line) if line or at < _BEFORE_NAME else None
            if match is not None and match.start(3) == at + 1:
                yield match
            at = self._data.find(quoted, at + 1)

    def names_at(self, address: int) -> set[str]:
        """Return the names of the code that begins at an address."""
        names = {symbol.name for symbol in self._core_at(address) if symbol.address == address}
        return names | self._module_names.get(address, set())

    def covering(self, address: int) -> KernelSymbol | None:
        """
        Return the symbol of code at or before an address, or None if there is none.

        The kernel's own symbols come first and are sorted; the symbols of modules are not sorted.
        """
        before = [symbol for symbol in self._of_modules if symbol.is_code and symbol.address <= address]
        nearest = max((symbol.address for symbol in before), default=0)
        candidates = [symbol for symbol in before if symbol.address == nearest]
        core = self._core_at(address)
        if core and core[0].address > nearest:
            candidates = core
        return min(candidates, key=_familiarity, default=None)

    def global_before(self, address: int) -> str | None:
        """Return the nearest global function of the kernel before an address, or None if there is none."""
        if self._of_modules and address >= min(symbol.address for symbol in self._of_modules):
            return None
        position = self._core_end(address - 1)
        while position > 0:
            position = self._data.rfind(b"\n", 0, position - 1) + 1
            if (match := _LINE.match(self._data, position)) is not None and match[2] == b"T":
                return _symbol(match).name
        return None

    def following(self, symbol: KernelSymbol) -> int | None:
        """
        Return the address of the next symbol of code after a symbol, in the kernel or in the symbol's module.

        Return None for the last symbol.
        """
        if symbol.module:
            more = (s.address for s in self._of_modules if s.module == symbol.module and s.is_code)
            return min((address for address in more if address > symbol.address), default=None)
        position = self._core_end(symbol.address)
        while position < self._core_size and (match := _LINE.match(self._data, position)) is not None:
            found = _symbol(match)
            if found.is_code:
                return found.address
            position = match.end() + 1
        return None

    def _core_at(self, address: int) -> list[KernelSymbol]:
        """Return the kernel's symbols of code with the highest address up to ``address``."""
        low = self._core_end(address)
        found: list[KernelSymbol] = []
        while low > 0:
            start = self._data.rfind(b"\n", 0, low - 1) + 1
            match = _LINE.match(self._data, start)
            if match is None:
                break
            symbol = _symbol(match)
            if symbol.is_code:
                if found and symbol.address != found[0].address:
                    break
                found.append(symbol)
            low = start
        return found

    def _core_end(self, address: int) -> int:
        """Return the end of the lines of the kernel's symbols up to an address, by a binary search."""
        low, high = 0, self._core_size
        while low < high:
            start = self._data.rfind(b"\n", 0, (low + high) // 2) + 1
            end = self._data.find(b"\n", start) + 1 or self._core_size
            line = _ADDRESS.match(self._data, start)
            if line is None or int(line[0], 16) <= address:
                low = end
            else:
                high = start
        return low

    def near(self, name: str, module: str) -> list[str]:
        """Return up to three names in a module that are similar to ``name``, the nearest first."""
        plain = name.strip("_")
        split = [each for each in self._named_with(f"{name}.", module) if each.startswith(f"{name}.")]
        same = [each for each in self._named_with(plain or name, module) if each.strip("_") == plain and each != name]
        parts = parts_of(name) or ("",)
        likely = {each for part in parts for each in self._named_with(part, module, near=len(name))}
        near = near_names(name, sorted(likely - {name}), _NEAR)
        return list(dict.fromkeys(split + same + near))[:_NEAR]

    def _named_with(self, part: str, module: str, near: int | None = None) -> list[str]:
        """
        Return the sorted names in a module that contain ``part``.

        With ``near``, they must have about this length.
        """
        lengths = range(1 << 16) if near is None else near_lengths(near)
        lines = [line for line in self._with(part.encode()) if len(line[3]) in lengths]
        return sorted({symbol.name for symbol in map(_symbol, lines) if symbol.module == module})

    def _with(self, part: bytes) -> Iterator[re.Match[bytes]]:
        """Iterate over the lines whose names contain some bytes, in the order of the list."""
        if not part:
            yield from _LINE.finditer(self._data)
        at = self._data.find(part) if part else -1
        while at >= 0:
            start, end = self._data.rfind(b"\n", 0, at) + 1, self._data.find(b"\n", at)
            if (match := _LINE.match(self._data, start)) is not None and match.start(3) <= at:
                yield match
            at = self._data.find(part, end) if end >= 0 else -1

    @cached_property
    def _core_size(self) -> int:
        """Size in bytes of the lines of the kernel's own symbols, which come first."""
        first = self._data.find(b"\t[")
        return len(self._data) if first < 0 else self._data.rfind(b"\n", 0, first) + 1

    @cached_property
    def _of_modules(self) -> list[KernelSymbol]:
        return [_symbol(match) for match in _LINE.finditer(self._data, self._core_size)]

    @cached_property
    def _module_names(self) -> dict[int, set[str]]:
        """The names of the modules' code, by address."""
        names: dict[int, set[str]] = {}
        for symbol in self._of_modules:
            if symbol.is_code:
                names.setdefault(symbol.address, set()).add(symbol.name)
        return names


def _symbol(match: re.Match[bytes]) -> KernelSymbol:
    address, letter, name, module = match.groups()
    return KernelSymbol(
        name.decode(errors="replace"), int(address, 16), letter.decode(), (module or b"").decode(errors="replace")
    )


def _familiarity(symbol: KernelSymbol) -> tuple[bool, int, int, str]:
    """Return a sort key for the names of one address. The name for messages is first."""
    return symbol.letter.islower(), len(symbol.name) - len(symbol.name.lstrip("_")), len(symbol.name), symbol.name


# The parts of a kernel, or of a kernel module, in a compiled file.
# Addresses are those of the file that they came from. The kernel's address changes at each boot (KASLR), and each
# section of a module moves independently. So the file has *areas*: memory that moves as a whole, with a name by which
# its address is found.


class KernelArea(NamedTuple):
    """
    Part of a kernel that moves as a whole: ``size`` bytes from an address on.

    ``name`` is the name of a module's section. The kernel has only one area, named after the symbol at its start.
    """

    name: str
    address: int
    size: int


class KernelPlace(NamedTuple):
    """
    Instruction that a compiled program expects at an address; ``raw`` is empty if it could not be read.

    ``where`` is its name in messages. ``definition`` is the number of the probe definition.
    """

    definition: int
    address: int
    raw: bytes
    where: str


@dataclass(frozen=True, slots=True)
class CarriedKernel:
    """
    Symbols and instructions of one build of the kernel or of a kernel module.

    ``identity`` is the build-id in hex; ``path`` is the path of the file, for messages. ``module`` is the kernel's name
    of the module, or "" for the kernel itself. Offsets count from the first area.
    """

    identity: str
    path: str
    module: str
    areas: tuple[KernelArea, ...]
    symbols: tuple[KernelSymbol, ...] = ()
    places: tuple[KernelPlace, ...] = ()


def listed(symbols: Iterable[KernelSymbol]) -> bytes:
    """Return symbols in the format of ``/proc/kallsyms``."""
    core, modules = [], []
    for symbol in sorted(symbols, key=lambda symbol: symbol.address):
        line = f"{symbol.address:016x} {symbol.letter} {symbol.name}"
        if symbol.module:
            modules.append(f"{line}\t[{symbol.module}]\n")
        else:
            core.append(f"{line}\n")
    return "".join((*core, *modules)).encode()


class NeededKallsyms(Kallsyms):
    """
    List of symbols that records the results of its lookups.

    A list of the recorded symbols gives the same results, because it contains the nearest symbol before each address.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._needed: set[KernelSymbol] = set()

    @property
    def needed(self) -> tuple[KernelSymbol, ...]:
        """The symbols of all results, by address."""
        return tuple(sorted(self._needed, key=lambda symbol: (symbol.address, symbol.name, symbol.letter)))

    def find(self, name: str, module: str | None = None) -> list[KernelSymbol]:
        """Return the symbols with a name, and record their use."""
        found = super().find(name, module)
        self._needed.update(found)
        return found

    def matching(self, pattern: str, module: str) -> Iterator[KernelSymbol]:
        """Iterate over the symbols that match a pattern, and record their use."""
        for symbol in super().matching(pattern, module):
            self._needed.add(symbol)
            yield symbol

    def covering(self, address: int) -> KernelSymbol | None:
        """Return the symbol that covers an address and record its use, or return None if there is none."""
        found = super().covering(address)
        self._needed.update([found] if found is not None else ())
        return found

    def need_names(self, addresses: Iterable[int]) -> None:
        """Record all names of the code that begins at these addresses, because ftrace lists it under any of them."""
        for address in addresses:
            for name in self.names_at(address):
                self._needed.update(symbol for symbol in super().find(name) if symbol.address == address)
