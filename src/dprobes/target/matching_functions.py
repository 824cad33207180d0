"""The functions of a module whose names match a pattern, and the matches that cannot have probepoints."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from dprobes.target.code.machine_code import instruction_starts
from dprobes.target.module_symbols import familiarity, is_cold_part, split_file
from dprobes.target.readable_names import Demangler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.target.module_symbols import Symbol
    from dprobes.target.probed_module import Module

__all__ = ["Function", "LeftOut", "matching_functions", "written_names"]


@dataclass(frozen=True, slots=True)
class Function:
    """
    Function whose name matches a pattern; ``address`` is its link address.

    ``size`` is in bytes, or 0 if unknown.
    """

    name: str
    address: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Match of a pattern that cannot have a probepoint. ``reason`` is a clause with the subject "it"."""

    name: str
    reason: str


def matching_functions(module: Module, pattern: str) -> tuple[list[Function], list[LeftOut]]:
    """
    Return the functions whose names match a shell pattern, in order of addresses, and the other matches.

    Case is significant. A function is returned once, by its best known name. If a symbol's name is equal to the
    pattern, such as ``main.gen[int]``, only that symbol matches. Static functions of several files with one name are
    called FILE:NAME.
    """
    functions = list(module.symbols.functions())
    matching = module.symbols.matching(pattern, functions)
    left_out = []
    if split_file(pattern) is None:
        names = _others(module, functions, module.symbols.matcher(pattern))
        left_out += [LeftOut(name, "it is not a function") for name in names]
    by_address: dict[int, list[Symbol]] = {}
    for symbol in matching:
        if symbol.kind == "ifunc":
            left_out.append(LeftOut(symbol.name, "it is chosen at run time (IFUNC)"))
        elif is_cold_part(symbol.name):
            left_out.append(LeftOut(symbol.name, "it is a part of another function"))
        else:
            by_address.setdefault(symbol.address, []).append(symbol)
    found = []
    counted = Counter(name for symbols in by_address.values() for name in {symbol.name for symbol in symbols})
    shared = {name for name, times in counted.items() if times > 1}
    boundaries = _Boundaries(module, functions)
    for address, symbols in sorted(by_address.items()):
        best, *others = sorted(symbols, key=familiarity)
        others = [symbol for symbol in others if symbol.name != best.name]
        offset = module.elf.file_offset(address)
        if offset is None or not module.elf.is_executable_offset(offset):
            reason: str | None = "it is not in the code of the file"
        else:
            reason = None if boundaries.is_certain(address) else "it starts inside an instruction of another function"
        if reason is None and offset is not None:
            name = module.symbols.copy_name(best) if best.name in shared else best.name
            found.append(Function(name, address, max(symbol.size for symbol in symbols), offset))
            left_out += [LeftOut(s.name, "it is another name of a function that is taken") for s in others]
        else:
            left_out += [LeftOut(s.name, reason or "") for s in (best, *others)]
    return found, left_out


def _others(module: Module, functions: Sequence[Symbol], matches: Callable[[str], bool]) -> list[str]:
    """Return the matching names of symbols other than functions, sorted."""
    names = {name for source in module.symbols.sources for name in source.names() if matches(name)}
    return sorted(names.difference(symbol.name for symbol in functions))


def written_names(module: Module, functions: Sequence[Function]) -> list[tuple[str, str]]:
    """
    Return for each function an unambiguous name for probe programs, and the function's readable name.

    The unambiguous name is the readable name if that is unique. Otherwise it is the linker's name, alone or with the
    source file, or as a last resort the file offset.
    """
    symbols, demangler = module.symbols, Demangler()
    readable = [demangler.name_of(function.name) for function in functions]
    places: dict[str, set[int]] = {}
    if any(name != function.name for name, function in zip(readable, functions, strict=True)):
        for symbol in symbols.functions():
            places.setdefault(demangler.name_of(symbol.name), set()).add(symbol.address)

    def means(name: str, function: Function) -> bool:
        return [symbol.address for symbol in symbols.lookup(name)] == [function.address]

    found = []
    for function, name in zip(functions, readable, strict=True):
        file, plain = split_file(function.name) or ("", function.name)
        in_file = file or next((f for f, symbol in symbols.in_files(plain) if symbol.address == function.address), "")
        if name != function.name and places[name] == {function.address} and means(function.name, function):
            written = name
        elif means(function.name, function):
            written = function.name
        elif in_file and means(f"{in_file}:{plain}", function):
            written = f"{in_file}:{plain}"
        else:
            written = f"{function.offset:#x}"
        found.append((written, name))
    return found


class _Boundaries:
    """A check that symbols in the middle of another function are at the start of an instruction, and not data."""

    def __init__(self, module: Module, functions: Sequence[Symbol]) -> None:
        self._module = module
        self._ranges = sorted((symbol.address, symbol.address + symbol.size) for symbol in functions)
        self._starts = [start for start, _ in self._ranges]
        self._reach = list(accumulate((end for _, end in self._ranges), max))

    def is_certain(self, address: int) -> bool:
        """Return True if an instruction starts at ``address``, or if no other function extends to it."""
        before = bisect_right(self._starts, address - 1) - 1
        while before >= 0 and self._reach[before] > address:
            start, end = self._ranges[before]
            if end > address:
                return address in instruction_starts(self._module, start, address + 1)
            before -= 1
        return True
