"""Replacement of points at source lines and inlined calls by points at instructions, the first pass after parsing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from dprobes.dpc.syntax.syntax_tree import PointKind
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.syntax.syntax_tree import Point, Probe, ProgramTree
    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["SOURCE_LINES", "DebugPlaces", "PlaceFinder", "place_of", "with_instructions"]

_PLACES_MAX = 1024
"""Maximum number of instructions that one probepoint may be replaced by."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""Symbols that RPN accepts without quotes."""

SOURCE_LINES = re.compile(r"(?P<path>[^:]+):(?P<first>[0-9]{1,9})(-(?P<last>[0-9]{1,9}))?")
"""Syntax of probepoints at source lines."""


class PlaceFinder(Protocol):
    """Look-up of a module's instructions for probepoints at source lines and inlined calls."""

    def of_lines(self, module: str, path: str, first: int, last: int) -> Mapping[int, Sequence[str]]:
        """
        Return the places of the instructions that begin each line from ``first`` to ``last``.

        Raise ``TargetError`` if no line in the range has an instruction.
        """

    def of_inlined(self, module: str, function: str) -> Sequence[str]:
        """Return the places of the first instructions of inlined calls; raise ``TargetError`` if there are none."""


def with_instructions(program: ProgramTree, module: str, finder: PlaceFinder, diagnostics: Diagnostics) -> ProgramTree:
    """
    Return a program in which the instructions replace points at source lines and inlined calls.

    ``finder`` finds the instructions. A probe at several lines becomes one for each line. ``module`` is the module of
    points that name none. A place that is not found is an error at its point.
    """
    module = program.module or module
    probes: list[Probe] = []
    for probe in program.probes:
        by_line: dict[int, dict[tuple[str, str], Point]] = {}
        others: list[Point] = []
        for point in probe.points:
            if point.kind is PointKind.INLINE or (point.kind is PointKind.CODE and SOURCE_LINES.fullmatch(point.place)):
                for line, place in _instructions(point, point.module or module, finder, diagnostics):
                    found = point.replaced(kind=PointKind.CODE, place=place)
                    by_line.setdefault(line, {}).setdefault((point.module, place), found)
            else:
                others.append(point)
        if others:
            probes.append(probe.replaced(points=tuple(others)))
        probes += (probe.replaced(points=tuple(found.values()), line=line) for line, found in by_line.items())
    return program.replaced(probes=tuple(probes))


def _instructions(
    point: Point, module: str, finder: PlaceFinder, diagnostics: Diagnostics
) -> Iterable[tuple[int, str]]:
    """
    Return the source line and place of each instruction of a probepoint; the line is 0 for an inlined call.

    The result is empty after a reported error.
    """
    lines = SOURCE_LINES.fullmatch(point.place) if point.kind is PointKind.CODE else None
    what = "a call that was inlined" if lines is None else f"a line of '{lines['path']}'"
    if point.at_return:
        diagnostics.error(point.span, f"{what} has no return", hint="write the function: return MODULE:FUNCTION")
        return ()
    if point.parameters is not None:
        hint = "use the names of the source, as the debug information has them"
        diagnostics.error(point.span, f"{what} takes no parameters", hint=hint)
        return ()
    if not module:
        diagnostics.error(point.span, f"{what} is in a module", hint="write it before the place: MODULE:PLACE")
        return ()
    try:
        if lines is None:
            found = [(0, place) for place in finder.of_inlined(module, point.place.strip('"'))]
        else:
            first = int(lines["first"])
            by_line = finder.of_lines(module, lines["path"], first, int(lines["last"] or first))
            found = [(line, place) for line, places in by_line.items() for place in places]
    except TargetError as error:
        diagnostics.error(point.span, error.message, hint=error.hint)
        return ()
    if len(found) > _PLACES_MAX:
        diagnostics.error(point.span, f"there are {len(found)} such instructions, more than {_PLACES_MAX}")
        return ()
    return found


class DebugPlaces:
    """The instructions of modules by their debug information; ``symbols`` provides the names of the instructions."""

    def __init__(
        self, file_of: Callable[[str], ElfFile | None] = lambda _name: None, symbols: SymbolProvider | None = None
    ) -> None:
        self._file_of = file_of
        self._symbols = symbols
        self._opened: dict[str, tuple[Module, DebugFile]] = {}

    def _open(self, name: str) -> tuple[Module, DebugFile]:
        """Return a module by its name, with its debug information; raise ``TargetError`` if either is missing."""
        if name not in self._opened:
            self._opened[name] = self._described(name)
        return self._opened[name]

    def _described(self, name: str) -> tuple[Module, DebugFile]:
        from dprobes.dwarf.debug_file import debug_file_of
        from dprobes.target.elf.symbol_sources import foreign_debug_file
        from dprobes.target.module_lookup import suggestion
        from dprobes.target.probed_module import OWN_SYMBOLS

        elf = self._file_of(name)
        if elf is None:
            raise TargetError(f"there is no module '{name}' on this machine", hint=suggestion(name))
        debug = debug_file_of(elf)
        if debug is None and (problem := foreign_debug_file(elf)) is not None:
            hint = "install the debug file of this build, or compile the module with -g"
            raise TargetError(f"'{elf.path}' has no debug information: {problem}", hint=hint)
        if debug is None:
            raise TargetError(
                f"'{elf.path}' has no debug information, and no separate file with it is installed",
                hint="install the package with its debug information, or compile it with -g",
            )
        return (self._symbols or OWN_SYMBOLS).module_of(elf), debug

    def of_lines(self, module: str, path: str, first: int, last: int) -> Mapping[int, Sequence[str]]:
        """
        Return the places of the instructions that begin each line from ``first`` to ``last``.

        Raise ``TargetError`` if no line in the range has an instruction.
        """
        found, by_line = self.addresses_of_lines(module, path, first, last)
        return {line: [place_of(found, address) for address in addresses] for line, addresses in by_line.items()}

    def addresses_of_lines(
        self, module: str, path: str, first: int, last: int
    ) -> tuple[Module, Mapping[int, Sequence[int]]]:
        """Return a module, and the link addresses of the instructions that begin the lines ``first`` to ``last``."""
        from dprobes.dwarf.line_table import LineSections, addresses_of_lines

        found, debug = self._open(module)
        parts = [debug.section(name) for name in (".debug_line", ".debug_str", ".debug_line_str")]
        lines, strings, line_strings = (bytes(part.data[part.start : part.end]) for part in parts)
        sections = LineSections(lines, strings, line_strings, is_big_endian=debug.order == "big")
        return found, addresses_of_lines(sections, path, first, last)

    def of_inlined(self, module: str, function: str) -> Sequence[str]:
        """Return the places of the first instructions of inlined calls; raise ``TargetError`` if there are none."""
        from dprobes.dwarf.entry_search import inlined_calls_of

        found, debug = self._open(module)
        calls = list(inlined_calls_of(debug, function))
        if not calls:
            hint = None
            if found.symbols.lookup(function):
                hint = f"write the function itself: {module}:{function}"
            raise TargetError(f"no call of '{function}' was inlined in '{found.path}'", hint=hint)
        addresses = {address for call in calls if (address := call.first_address) is not None}
        if not addresses:
            raise TargetError(f"the calls of '{function}' that were inlined in '{found.path}' have no instructions")
        return [place_of(found, address) for address in sorted(addresses)]


def place_of(module: Module, address: int) -> str:
    """Return a link address as FUNCTION+DISTANCE, or as a file offset if RPN cannot use the name or it is ambiguous."""
    offset = module.file_offset(address)
    found = module.symbol_at(offset)
    if found is not None:
        name, distance = found
        try:
            if module.address_of(name) + distance == address and _PLAIN.fullmatch(name):
                return f"{name}+{distance:#x}" if distance else name
        except TargetError:
            pass  # several functions have the name
    return f"{offset:#x}"
