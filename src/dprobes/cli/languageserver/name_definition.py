"""Definitions of names: in a program, or in the source of a probed module, according to its debug information."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.cli.languageserver.edited_program import is_c, position_at, word_at
from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.cli.languageserver.edited_program import Analysis
    from dprobes.dwarf.debug_entries import Entry

__all__ = ["definition_of", "entries_known_at", "source_at", "source_of_name"]

# The definition of a name: in the program, or of a probed function in the source of its module.


_TYPE = r"(?:static|global|percpu|thread|extern|typedef|struct|union|enum|const|volatile|unsigned|signed|[A-Za-z_]\w*)"


class Definition(NamedTuple):
    """A definition in a source text: the characters from ``start`` to ``end`` (excluded)."""

    start: int
    end: int


def definition_of(name: str, text: str, offset: int) -> Definition | None:
    """Return the definition of the word at an offset, or None if it is not found."""
    start, end = word_at(text, offset)
    word = text[start:end]
    if not word:
        return None
    plain = _without_comments(text)
    for pattern in _patterns(word) if is_c(name) else _rpn_patterns(word):
        # The nearest one above, else the first one below.
        found = [match.start("name") for match in re.finditer(pattern, plain, re.MULTILINE)]
        before = [place for place in found if place <= start]
        if found:
            place = before[-1] if before else found[0]
            return Definition(place, place + len(word))
    return None


def _patterns(word: str) -> list[str]:
    name = rf"(?P<name>{re.escape(word)})"
    if word.startswith("@"):
        return [rf"{name}\b\s*(?:\[[^\]\n]*\]\s*)?(?:=(?!=)|\+=|-=|\+\+)"]
    return [
        rf"^[ \t]*#[ \t]*define[ \t]+{name}\b",
        rf"\b(?:struct|union|enum)\s+{name}\s*\{{",
        rf"\b(?!return\b|else\b|case\b){_TYPE}(?:\s+{_TYPE})*[\s*]+{name}\s*(?=[=;,\[])",
        rf"\b(?!return\b|else\b){_TYPE}[\s*]+{name}\s*\([^)]*\)\s*\{{",
        rf"[(,]\s*(?:[\w\s*]*?[\s*])?{name}\s*(?=[,)])(?=[^;{{]*\{{)",
    ]


def _rpn_patterns(word: str) -> list[str]:
    name = rf"(?P<name>{re.escape(word)})"
    return [
        rf"^[ \t]*#[ \t]*define[ \t]+{name}\b",
        rf"^[ \t]*{name}[ \t]*:",
        rf"^[ \t]*proc[ \t]+{name}\b",
        rf"^[ \t]*table[ \t]*=[ \t]*{name}\b",
    ]


def _without_comments(text: str) -> str:
    pattern = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
    return pattern.sub(lambda match: "".join(c if c == "\n" else " " for c in match.group()), text)


# The names from debug information that a handler can use: those of the probed function, and of its source file.


_POINT = re.compile(r'(?:\breturn\s+)?(?:(?P<module>"[^"]+"|[^\s,(:"]+):)?(?P<function>"[^"]+"|[^\s,(+:]+)')
_MODULE = re.compile(r'\bmodule\s+(?P<module>"[^"]+"|[^\s,;]+)')
_DEPTH_MAX = 16


def entries_known_at(text: str, head: str) -> Iterator[Entry]:
    """
    Iterate over the entries with a name: parameters and variables of a function, then those of its source file.

    The function is that of the first place of ``head``, the text before a block. For other kinds of places, there are
    none.
    """
    point = _POINT.match(head.strip())
    if point is None:
        return
    default = _MODULE.search(text)
    module = point["module"] or (default["module"] if default is not None else None)
    if module is None:
        return
    try:
        yield from _entries(module.strip('"'), point["function"].strip('"'))
    except (DprobesError, OSError):
        return  # diagnostics report the problem


def _entries(module_name: str, function: str) -> Iterator[Entry]:
    from dprobes.dwarf.debug_file import debug_file_of
    from dprobes.dwarf.dwarf_numbers import Tag
    from dprobes.dwarf.entry_search import function_at
    from dprobes.target.module_lookup import find_module
    from dprobes.target.probed_module import Module

    if (path := find_module(module_name)) is None:
        return
    module = Module.load(Path(path))
    symbols = module.symbols.lookup(function)
    debug = debug_file_of(module.elf)
    entry = function_at(debug, symbols[0].address) if symbols and debug is not None else None
    if entry is None:
        return
    yield from _own(entry, 0)
    yield from (child for child in entry.unit.root.children() if child.tag == Tag.VARIABLE and child.name)


def _own(entry: Entry, depth: int) -> Iterator[Entry]:
    """
    Yield the DIEs of parameters and variables below the DIE of a function or block.

    ``depth`` is the nesting depth of that block, 0 for the function itself.
    """
    from dprobes.dwarf.dwarf_numbers import Tag

    for child in entry.children():
        if child.tag in (Tag.FORMAL_PARAMETER, Tag.VARIABLE) and child.name:
            yield child
        elif child.tag == Tag.LEXICAL_BLOCK and depth < _DEPTH_MAX:
            yield from _own(child, depth + 1)


_FUNCTION = re.compile(r'"?(?P<function>[^"+:*?\s]+)"?\s*(?:\+\s*\w+)?')


class SourcePlace(NamedTuple):
    """The file and line number of a definition, in a source file on this machine."""

    path: Path
    line: int


def source_at(analysis: Analysis, offset: int) -> SourcePlace | None:
    """Return the definition of the function in the probe's place at an offset, or None if it is unknown."""
    from dprobes.rpn.program_text import print_header

    for program in analysis.programs:
        for definition in program.definitions:
            span = definition.span("offset")
            if span is not None and span.file is analysis.source and span.start <= offset < span.end:
                place = next((line for line in print_header(definition) if line.startswith("offset = ")), "")
                match = _FUNCTION.fullmatch(place.removeprefix("offset = "))
                return None if match is None else source_of(program.name, match["function"])
    return None


def source_of(module_name: str, function: str) -> SourcePlace | None:
    """Return the definition of a module's function, or None if it is unknown, or its source is not on this machine."""
    from dprobes.dwarf.debug_file import debug_file_of
    from dprobes.dwarf.entry_search import function_at
    from dprobes.target.module_lookup import find_module
    from dprobes.target.probed_module import Module

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
    """Return the declaration in a handler's module of the variable at an offset, or None if it is not found."""
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
    from dprobes.dwarf.declaration_places import declaration_of

    if (declared := declaration_of(entry)) is None:
        return None
    path, line = Path(declared[0]), declared[1]
    return SourcePlace(path, line) if path.is_file() else None
