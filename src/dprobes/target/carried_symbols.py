"""
Symbols of modules in a compiled program (PPDF), and their use for the module's files on another machine.

With them, a file of the same build does not need its own symbols. Each build of a module has an identity. The compiled
program also carries the bytes of the probed instructions, to detect a wrong file.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import module_identity
from dprobes.target.elf.symbol_sources import ListedSymbols
from dprobes.target.module_symbols import Symbol, SymbolTable
from dprobes.target.probed_module import OWN_SYMBOLS, Module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.kernel.kernel_symbols import CarriedKernel
    from dprobes.target.module_symbols import CodeRange, SymbolSource

__all__ = ["CarriedBuild", "CarriedPlace", "CarriedSymbols", "NeededSymbols", "OtherBuild"]


@dataclass(frozen=True, slots=True)
class CarriedPlace:
    """
    The bytes that a compiled program expects at a file offset, an instruction; ``where`` is its name in messages.

    ``definition`` is the number of its probe definition. With ``is_exit``, the instruction leaves the function whose
    return is probed.
    """

    definition: int
    offset: int
    raw: bytes
    where: str
    is_exit: bool = False


@dataclass(frozen=True, slots=True)
class CarriedBuild:
    """
    The data that a program needs about one build of its module.

    ``path`` is that of the original file, for messages. ``machine`` is as in ``ElfFile``.
    """

    identity: str
    path: str
    machine: str
    symbols: tuple[Symbol, ...] = ()
    places: tuple[CarriedPlace, ...] = ()


class OtherBuild(enum.Enum):
    """The treatment of a file of a build that the compiled program does not carry."""

    REFUSE = "refuse"
    OWN_SYMBOLS = "own symbols"
    """The file is resolved with its own symbols."""
    NEAREST = "nearest"
    """The file is treated as the carried build with which it has the most probed instructions in common."""


@dataclass(frozen=True, slots=True)
class CarriedSymbols:
    """
    The carried symbols of the builds of a module; a file of one of these builds gets no other symbols.

    ``source`` is the name of the compiled program in errors. With ``verify_opcodes``, the bytes of the probed
    instructions must equal the carried ones. ``kernels`` are the carried builds of the kernel, or of a kernel module,
    instead of ``builds``.
    """

    builds: tuple[CarriedBuild, ...]
    source: str
    other: OtherBuild = OtherBuild.REFUSE
    verify_opcodes: bool = True
    kernels: tuple[CarriedKernel, ...] = ()

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` if its build is not carried."""
        build = self._build_of(elf)
        if build is None:
            return OWN_SYMBOLS.module_of(elf)
        table = SymbolTable([_Listed(build.symbols)], code_range=elf.code_range)
        expected = {place.offset: place.raw for place in build.places} if self.verify_opcodes else None
        return Module(elf, table, expected)

    def machine(self, host: str) -> str | None:
        """Return the processor of the first build, or None if a build is for ``host``, or no build is carried."""
        machines = [build.machine for build in self.builds]
        return None if host in machines or not machines else machines[0]

    def _build_of(self, elf: ElfFile) -> CarriedBuild | None:
        identity = module_identity(elf)
        same = next((build for build in self.builds if build.identity == identity), None)
        if same is not None or self.other is OtherBuild.OWN_SYMBOLS:
            return same
        fitting = [build for build in self.builds if build.machine == elf.machine]
        if self.other is OtherBuild.REFUSE or not fitting:
            raise self._refusal(elf, identity, fitting)
        return max(fitting, key=lambda build: sum(_holds(elf, place) for place in build.places))

    def _refusal(self, elf: ElfFile, identity: str, fitting: list[CarriedBuild]) -> TargetError:
        if not self.builds:
            known = "no module"
        elif not fitting:
            known = "modules of " + " and ".join(sorted({build.machine for build in self.builds}))
        else:
            known = ", ".join(f"{build.identity} ('{build.path}')" for build in fitting)
        found = f"for {elf.machine}" if self.builds and not fitting else f"build {identity}"
        hint = "build it for this file too (dprobes build --for FILE)"
        if fitting:
            hint += ", or give --dont-verify-build-id if the code is the same"
        return TargetError(f"'{elf.path}' is {found}, but '{self.source}' was built for {known}", hint=hint)


class _Listed(ListedSymbols):
    """The symbols that a compiled program carries; those without a type count as code, as in a file's symbol table."""

    def code(self) -> Iterator[tuple[int, int, int]]:
        kinds = ("func", "ifunc", "notype")
        return ((s.address, s.size, i) for i, s in enumerate(self._symbols) if s.kind in kinds)


def _holds(elf: ElfFile, place: CarriedPlace) -> bool:
    return elf.data[place.offset : place.offset + len(place.raw)] == place.raw


class NeededSymbols(SymbolTable):
    """
    A table of symbols that records the results of its lookups.

    A table of the recorded symbols gives the same results. A function that covered an address is recorded; nearer
    symbols did not cover it and are not needed. For an address without a function, the symbols before it are recorded.
    """

    def __init__(
        self,
        sources: Iterable[SymbolSource],
        *,
        code_range: Callable[[int], CodeRange | None],
        later: Callable[[], Iterable[SymbolSource]] | None = None,
    ) -> None:
        super().__init__(sources, code_range=code_range, later=later)
        self._needed: dict[Symbol, None] = {}
        self._functions: list[Symbol] = []

    @property
    def needed(self) -> tuple[Symbol, ...]:
        """
        The symbols of all results.

        Functions found by patterns are in the order of the sources: of several symbols with one name and address the
        first one counts.
        """
        first = dict.fromkeys(symbol for symbol in self._functions if symbol in self._needed)
        others = sorted(
            (symbol for symbol in self._needed if symbol not in first),
            key=lambda symbol: (symbol.address, symbol.name, symbol.kind, symbol.binding, symbol.default_version),
        )
        return (*first, *others)

    def lookup(self, name: str) -> list[Symbol]:
        """Return the symbols with a name, and record their use."""
        found = super().lookup(name)
        self._need(found)
        return found

    def covering(self, link_address: int) -> Symbol | None:
        """Return the symbol that covers a link address, and record its use, or None if there is none."""
        found = super().covering(link_address)
        self._need([found] if found is not None else self.preceding(link_address))
        return found

    def starting(self, start: int, end: int) -> list[Symbol]:
        """Return the symbols that begin in a range, and record their use."""
        found = super().starting(start, end)
        self._need(found)
        return found

    def need_matching(self, pattern: str) -> None:
        """Record all symbols whose names match a shell pattern, and the functions that overlap the starts of these."""
        matches = self.matcher(pattern)
        functions = self._functions = self._functions or list(self.functions())
        matching = [symbol for symbol in functions if matches(symbol.name)]
        self._need(matching)
        names = {name for source in self.sources for name in source.names() if matches(name)}
        for name in names.difference(symbol.name for symbol in functions):
            self._need(symbol for source in self.sources for symbol in source.find(name))
        self._need_overlapping(functions, {symbol.address for symbol in matching})

    def _need_overlapping(self, functions: list[Symbol], addresses: set[int]) -> None:
        """Record the functions that begin before one of the addresses and extend beyond it."""
        waiting = sorted(addresses, reverse=True)
        for symbol in sorted(functions, key=lambda symbol: symbol.address):
            while waiting and waiting[-1] <= symbol.address:
                waiting.pop()
            if waiting and symbol.address + symbol.size > waiting[-1]:
                self._need([symbol])

    def _need(self, symbols: Iterable[Symbol]) -> None:
        self._needed.update(dict.fromkeys(symbols))
