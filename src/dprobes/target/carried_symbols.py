"""
Symbols that a compiled program (PPDF) has for its modules, and their use for files on another machine.

A file of the same build then does not need its own symbols. The build is determined by an identity. The compiled
program also has the bytes of the probed instructions, to detect a wrong file.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import module_identity
from dprobes.target.elf.symbol_sources import ListedSymbols
from dprobes.target.module_symbols import Symbol, SymbolTable, split_file
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
    Instruction that a compiled program expects at a file offset; ``where`` is its name in messages.

    ``definition`` is the number of the probe definition. If ``is_exit`` is True, the instruction is an exit of a
    function whose return is probed.
    """

    definition: int
    offset: int
    raw: bytes
    where: str
    is_exit: bool = False


@dataclass(frozen=True, slots=True)
class CarriedBuild:
    """
    Symbols and instructions of one build of a module.

    ``path`` is the path of the original file, for messages. ``machine`` is as in ``ElfFile``.
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
    Symbols that a compiled program has for the builds of a module. A file of one of these builds gets no other symbols.

    ``source`` is the name of the compiled program in errors. With ``verify_opcodes``, the bytes of the probed
    instructions must equal those in the compiled program. For the kernel or a kernel module, ``kernels`` has the builds
    instead of ``builds``.
    """

    builds: tuple[CarriedBuild, ...]
    source: str
    other: OtherBuild = OtherBuild.REFUSE
    verify_opcodes: bool = True
    kernels: tuple[CarriedKernel, ...] = ()

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` if the compiled program does not have its build."""
        build = self._build_of(elf)
        if build is None:
            return OWN_SYMBOLS.module_of(elf)
        table = SymbolTable([_Listed(build.symbols)], code_range=elf.code_range)
        expected = {place.offset: place.raw for place in build.places} if self.verify_opcodes else None
        return Module(elf, table, expected)

    def machine(self, host: str) -> str | None:
        """Return the processor of the first build, or None if there is no build, or one for ``host``."""
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
    """
    Symbols in a compiled program. A symbol without a type counts as code, as in a file's symbol table.

    A symbol called FILE:NAME has the source file of the static symbol NAME.
    """

    def code(self) -> Iterator[tuple[int, int, int]]:
        kinds = ("func", "ifunc", "notype")
        symbols = enumerate(self._symbols)
        return ((s.address, s.size, i) for i, s in symbols if s.kind in kinds and split_file(s.name) is None)

    def names(self) -> set[str]:
        return {name for name in super().names() if split_file(name) is None}

    def in_files(self, name: str) -> list[tuple[str, Symbol]]:
        found = ((split_file(symbol.name), symbol) for symbol in self._symbols)
        return [(parts[0], s._replace(name=name)) for parts, s in found if parts is not None and parts[1] == name]


def _holds(elf: ElfFile, place: CarriedPlace) -> bool:
    return elf.data[place.offset : place.offset + len(place.raw)] == place.raw


class NeededSymbols(SymbolTable):
    """
    Table of symbols that records the results of its lookups.

    A table of the recorded symbols gives the same results. If a function covers the address of a lookup, only this
    function is recorded. If no function covers it, the symbols before the address are recorded.
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

        Functions that patterns found are in the order of the sources, because the first of several symbols with the
        same name and address counts.
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
        """Return the symbol that covers a link address and record its use, or return None if there is none."""
        found = super().covering(link_address)
        self._need([found] if found is not None else self.preceding(link_address))
        return found

    def starting(self, start: int, end: int) -> list[Symbol]:
        """Return the symbols that begin in a range, and record their use."""
        found = super().starting(start, end)
        self._need(found)
        return found

    def copy_name(self, symbol: Symbol) -> str:
        """Return the name of a symbol among those of one name, and record their source files."""
        found = super().copy_name(symbol)
        if found != symbol.name:
            self._need(each._replace(name=f"{file}:{each.name}") for file, each in self.in_files(symbol.name))
        return found

    def need_matching(self, pattern: str) -> None:
        """Record all symbols whose names match a shell pattern, and the functions that overlap the starts of these."""
        functions = self._functions = self._functions or list(self.functions())
        matching = self.matching(pattern, functions)
        addresses = {symbol.address for symbol in matching}
        self._need(matching)
        self._need_overlapping(functions, addresses)
        if split_file(pattern) is not None:
            self._need(symbol for symbol in functions if symbol.address in addresses)
            return
        matches = self.matcher(pattern)
        names = {name for source in self.sources for name in source.names() if matches(name)}
        for name in names.difference(symbol.name for symbol in functions):
            self._need(symbol for source in self.sources for symbol in source.find(name))

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
