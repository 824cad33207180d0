"""
Names for addresses of code: the mapping, the module, and the function with its extent.

The data about one address of a running process can name other addresses in the same function later, when the process
and its files may no longer exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.target.probed_module import Module

__all__ = [
    "CodeName",
    "InlinedCode",
    "InliningFinder",
    "LocatedCode",
    "LocatedFunction",
    "MappedCode",
    "function_at",
    "name_in",
]


class CodeName(NamedTuple):
    """
    Name of a code address: the function, the distance from its start, and the mapped module.

    If ``function`` is empty, ``distance`` counts from the start of the file. It is in bytes. ``inlined`` has the
    functions whose calls were inlined at the address, innermost first.
    """

    function: str
    distance: int
    module: str
    inlined: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The name as output has it: ``symbol+0x4 [module]``, or ``module+0x1234``."""
        if not self.function:
            return f"{self.module}+{self.distance:#x}"
        distance = f"+{self.distance:#x}" if self.distance else ""
        return f"{self.function}{distance} [{self.module}]"

    @property
    def inlined_texts(self) -> tuple[str, ...]:
        """The printed names of the functions whose calls were inlined there, the innermost first."""
        return tuple(f"{name} (inlined) [{self.module}]" for name in self.inlined)


class MappedCode(NamedTuple):
    """
    Mapping of a module's file from ``start`` to ``end`` (excluded); ``start`` is byte ``offset`` of the file.

    ``build`` is the file's build ID, or empty.
    """

    start: int
    end: int
    offset: int
    module: str
    build: str


class InlinedCode(NamedTuple):
    """The code of an inlined call: the file offsets ``start`` to ``end`` (excluded), and the called function."""

    start: int
    end: int
    name: str


class LocatedFunction(NamedTuple):
    """
    A function: the bytes of a module's file from ``start`` up to ``end``.

    ``inlined`` are the pieces of inlined calls in it, each before those nested in it.
    """

    start: int
    end: int
    name: str
    inlined: tuple[InlinedCode, ...] = ()


class LocatedCode(NamedTuple):
    """
    The location of an address in a process, or in the kernel if ``pid`` is None.

    ``since`` is the start time of the process's image, in nanoseconds of CLOCK_MONOTONIC.
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
    inlined = tuple(each.name for each in reversed(function.inlined) if each.start <= offset < each.end)
    return CodeName(function.name, offset - function.start, mapped.module, inlined)


class InliningFinder(Protocol):
    """A finder of the calls that compilers have inlined into a module's functions."""

    def inlined_in(
        self, module: Module, start: int, end: int, name_of: Callable[[str], str]
    ) -> tuple[InlinedCode, ...]:
        """Return the pieces of inlined calls in a range of bytes of a module's file, each before those nested in it."""


def _unchanged(symbol: str) -> str:
    return symbol


def function_at(
    module: Module,
    offset: int,
    name_of: Callable[[str], str] = _unchanged,
    inlining: InliningFinder | None = None,
) -> LocatedFunction | None:
    """
    Return the function at an offset of a module's file, or None if there is none.

    A function of unknown size ends after the offset. ``name_of`` demangles a symbol's name.
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
    end = max(start + size, offset + 1)
    inlined = inlining.inlined_in(module, start, end, name_of) if inlining is not None else ()
    return LocatedFunction(start, end, name_of(name), inlined)
