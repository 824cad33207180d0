"""
Names for places in code, and what they were made of: the mapping, the module, and the function with its extent.

What is found out about a process while it runs is enough to name other addresses of the same functions later, without
the process and without its files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.target.location import Module

__all__ = ["CodeName", "LocatedCode", "LocatedFunction", "MappedCode", "function_at", "name_in"]


class CodeName(NamedTuple):
    """Name an address: ``distance`` is from the start of the function, of the module's file where that is empty."""

    function: str
    distance: int
    module: str

    @property
    def text(self) -> str:
        """The name for people: ``symbol+0x4 [module]``, or ``module+0x1234``."""
        if not self.function:
            return f"{self.module}+{self.distance:#x}"
        distance = f"+{self.distance:#x}" if self.distance else ""
        return f"{self.function}{distance} [{self.module}]"


class MappedCode(NamedTuple):
    """Say that a process shows the file of a module, from byte ``offset`` on, from ``start`` up to ``end``."""

    start: int
    end: int
    offset: int
    module: str
    build: str


class LocatedFunction(NamedTuple):
    """Name the bytes of a module's file from ``start`` up to ``end``."""

    start: int
    end: int
    name: str


class LocatedCode(NamedTuple):
    """
    Say where an address is.

    ``since`` is when the process began what it executes, in nanoseconds of CLOCK_MONOTONIC; ``pid`` None is the kernel.
    """

    pid: int | None
    since: int
    mapped: MappedCode
    function: LocatedFunction | None

    def name_of(self, address: int) -> CodeName:
        """Return the name of an address in the mapping, and in the function if there is one."""
        return name_in(self.mapped, self.function, address)


def name_in(mapped: MappedCode, function: LocatedFunction | None, address: int) -> CodeName:
    """Return the name of an address in a mapping, and in a function if one is known."""
    offset = address - mapped.start + mapped.offset
    if function is None:
        return CodeName("", offset, mapped.module)
    return CodeName(function.name, offset - function.start, mapped.module)


def _unchanged(symbol: str) -> str:
    return symbol


def function_at(module: Module, offset: int, name_of: Callable[[str], str] = _unchanged) -> LocatedFunction | None:
    """
    Return the function at an offset of a module's file; of one whose size nobody knows, what is up to there.

    ``name_of`` makes the name for people of a symbol.
    """
    found = module.symbol_at(offset)
    if found is None:
        return None
    name, distance = found
    link_address = module.elf.link_address(offset)
    assert link_address is not None
    symbol = module.symbols.covering(link_address)
    size = symbol.size if symbol is not None else 0
    start = offset - distance
    return LocatedFunction(start, max(start + size, offset + 1), name_of(name))
