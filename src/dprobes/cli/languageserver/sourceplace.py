"""Where the source of a function is that is probed: what the debug information of its module says, if it is here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli.languageserver.analysis import is_c, word_at
from dprobes.cli.languageserver.position import position_at
from dprobes.errors import DprobesError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.cli.languageserver.analysis import Analysis
    from dprobes.dwarf.entries import Entry

__all__ = ["SourcePlace", "source_at", "source_of", "source_of_name"]

_FUNCTION = lazy_pattern(r'"?(?P<function>[^"+:*?\s]+)"?\s*(?:\+\s*\w+)?')
_ORIGINS_MAX = 4
_TEXT_SECTIONS = (".debug_line", ".debug_str", ".debug_line_str")


class SourcePlace(NamedTuple):
    """A file on this machine, and a line of it."""

    path: Path
    line: int


def source_at(analysis: Analysis, offset: int) -> SourcePlace | None:
    """Return where the function is defined that is probed by what stands at an offset; None if that is not known."""
    from dprobes.rpn.printer import print_header

    for program in analysis.programs:
        for definition in program.definitions:
            span = definition.span("offset")
            if span is not None and span.file is analysis.source and span.start <= offset < span.end:
                place = next((line for line in print_header(definition) if line.startswith("offset = ")), "")
                match = _FUNCTION.fullmatch(place.removeprefix("offset = "))
                return None if match is None else source_of(program.name, match["function"])
    return None


def source_of(module_name: str, function: str) -> SourcePlace | None:
    """Return where a function of a module is defined; None if nobody says so, or the source is not here."""
    from dprobes.dwarf.debugfile import debug_file_of
    from dprobes.dwarf.search import function_at
    from dprobes.target.location import Module
    from dprobes.target.modules import find_module

    try:
        if (path := find_module(module_name)) is None:
            return None
        module = Module.load(Path(path))
        symbols = module.symbols.lookup(function)
        debug = debug_file_of(module.elf)
        if not symbols or debug is None:
            return None
        entry = function_at(debug, symbols[0].address)
        return None if entry is None else _declared(entry)
    except (DprobesError, OSError):
        return None


def source_of_name(name: str, text: str, offset: int) -> SourcePlace | None:
    """Return where the module of a handler declares the variable that is named at an offset."""
    from dprobes.cli.languageserver.debuggednames import entries_known_at

    if not is_c(name) or not (position := position_at(text, offset)).in_block or position.is_text:
        return None
    start, end = word_at(text, offset)
    if text[:start].rstrip().endswith(("->", ".")):
        return None  # a member
    found = next((entry for entry in entries_known_at(text, position.head) if entry.name == text[start:end]), None)
    try:
        return None if found is None else _declared(found)
    except (DprobesError, OSError):
        return None


def _declared(entry: Entry) -> SourcePlace | None:
    from dprobes.dwarf.linetable import LineProgram, LineSections
    from dprobes.dwarf.numbers import At

    for _ in range(_ORIGINS_MAX):
        line, file = entry.number(At.DECL_LINE), entry.number(At.DECL_FILE)
        if line and file is not None:
            break
        origin = entry.reference(At.ABSTRACT_ORIGIN) or entry.reference(At.SPECIFICATION)
        if origin is None:
            return None
        entry = origin
    else:
        return None
    root = entry.unit.root
    offset = root.offset_in_section(At.STMT_LIST)
    if offset is None:
        return None
    debug = entry.unit.file
    sections = (debug.section(name) for name in _TEXT_SECTIONS)
    lines, strings, line_strings = (bytes(each.data[each.start : each.end]) for each in sections)
    files = LineProgram(
        LineSections(lines, strings, line_strings, is_big_endian=debug.elf.byte_order == "big"), offset
    ).files
    if not 0 <= file < len(files):
        return None
    path = Path(root.text(At.COMP_DIR) or "/", files[file])
    return SourcePlace(path, line) if path.is_file() else None
