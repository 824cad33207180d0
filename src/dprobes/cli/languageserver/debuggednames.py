"""The names that a handler knows from debug information: of the function that is probed, and of the file around it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dwarf.entries import Entry

__all__ = ["entries_known_at"]

_POINT = lazy_pattern(r'(?:\breturn\s+)?(?:(?P<module>"[^"]+"|[^\s,(:"]+):)?(?P<function>"[^"]+"|[^\s,(+:]+)')
_MODULE = lazy_pattern(r'\bmodule\s+(?P<module>"[^"]+"|[^\s,;]+)')
_DEPTH_MAX = 16


def entries_known_at(text: str, head: str) -> Iterator[Entry]:
    """
    Give the parameters and variables of a function, then those of its file: entries that have a name.

    The function is that of the first place of ``head``, the text before a block; nothing is given of other places.
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
        return  # what is wrong with it, diagnostics say


def _entries(module_name: str, function: str) -> Iterator[Entry]:
    from dprobes.dwarf.debugfile import debug_file_of
    from dprobes.dwarf.numbers import Tag
    from dprobes.dwarf.search import function_at
    from dprobes.target.location import Module
    from dprobes.target.modules import find_module

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
    """Give what a function, or a block in it, declares."""
    from dprobes.dwarf.numbers import Tag

    for child in entry.children():
        if child.tag in (Tag.FORMAL_PARAMETER, Tag.VARIABLE) and child.name:
            yield child
        elif child.tag == Tag.LEXICAL_BLOCK and depth < _DEPTH_MAX:
            yield from _own(child, depth + 1)
