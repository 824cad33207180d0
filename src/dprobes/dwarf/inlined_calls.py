"""Inlined calls: calls that the compiler has replaced by the code of the function."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.address_lists import ranges_of
from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import entries_named, is_c, may_have, references_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.dwarf.debug_file import DebugFile

__all__ = ["InlinedCall", "inlined_calls_in", "inlined_calls_of"]

_DEPTH_MAX = 128
"""Maximum depth of nested calls and blocks."""


class InlinedCall(NamedTuple):
    """
    A call that was inlined: ``entry`` is the call's, ``function`` the entry of the function with the code.

    ``depth`` is the number of inlined calls around it.
    """

    entry: Entry
    function: Entry
    depth: int

    @property
    def name(self) -> str:
        """The name of the called function, preferably that of its symbol."""
        return self.entry.linker_name or self.entry.name or "?"

    @property
    def first_address(self) -> int | None:
        """The link address of the first executed instruction of its code; None if it has no code."""
        ranges = ranges_of(self.entry)
        if not ranges:
            return None
        if self.entry.has(At.ENTRY_PC):
            address = self.entry.address(At.ENTRY_PC)
            if address is None and (distance := self.entry.number(At.ENTRY_PC)) is not None:
                address = ranges[0][0] + distance
            if address is not None:
                return address
        return ranges[0][0]


def inlined_calls_in(function: Entry) -> Iterator[InlinedCall]:
    """Iterate over the calls that were inlined into a function, each before those nested in it."""
    yield from _calls_in(function, function, 0, 0)


def _calls_in(parent: Entry, function: Entry, depth: int, level: int) -> Iterator[InlinedCall]:
    if level > _DEPTH_MAX:
        function.unit.file.malformed(f"the calls in the entry at {function.offset:#x} do not end")
    for entry in parent.children():
        if entry.tag == Tag.INLINED_SUBROUTINE:
            yield InlinedCall(entry, function, depth)
            yield from _calls_in(entry, function, depth + 1, level + 1)
        elif entry.tag == Tag.LEXICAL_BLOCK:
            yield from _calls_in(entry, function, depth, level + 1)


def inlined_calls_of(file: DebugFile, name: str) -> Iterator[InlinedCall]:
    """
    Iterate over all inlined calls of a function, in all units; ``name`` is that of the source.

    Of other units, only entries that may contain a reference to the function are searched.
    """
    alternate = file.alternate if file.has_alternate else None
    for holder in file.all_files():
        user = file if holder is alternate else holder  # calls of a function in the shared file are in this one
        found = (
            each
            for each in entries_named(holder, name, (Tag.SUBPROGRAM,), c_declarations=False)
            if not _is_elsewhere(each)
        )
        for abstract in {entry.origin: None for entry in found}:
            for unit, places in _references(user, holder, abstract):
                yield from _Search(abstract, places).calls_in(unit.root, None, 0, 0)


def _is_elsewhere(function: Entry) -> bool:
    """Return whether a C unit only declares a function, so that a search for its inlined calls there is omitted."""
    return function.has(At.DECLARATION) and is_c(function.unit)


class _Search:
    """A search for calls of a function; ``places`` are the possible references to it, None if unknown."""

    def __init__(self, abstract: Entry, places: Sequence[int] | None) -> None:
        self._abstract = abstract
        self._places = places

    def calls_in(self, parent: Entry, function: Entry | None, depth: int, level: int) -> Iterator[InlinedCall]:
        """
        Iterate over the calls in an entry.

        ``depth`` is the number of inlined calls around it, ``level`` its depth in the tree.
        """
        if level > _DEPTH_MAX:
            parent.unit.file.malformed(f"the contents of the entry at {parent.offset:#x} does not end")
        for entry in parent.children():
            if not entry.has_children and entry.tag != Tag.INLINED_SUBROUTINE:
                continue
            if not may_have(self._places, entry):
                continue
            is_call = entry.tag == Tag.INLINED_SUBROUTINE and function is not None
            if is_call and entry.origin == self._abstract:
                assert function is not None
                yield InlinedCall(entry, function, depth)
            inner = entry if entry.tag == Tag.SUBPROGRAM else function
            yield from self.calls_in(entry, inner, depth + is_call, level + 1)


def _references(file: DebugFile, holder: DebugFile, entry: Entry) -> Iterator[tuple[Unit, Sequence[int] | None]]:
    """Iterate over the units of a file that may refer to an entry of that file or its alternate, with the places."""
    own = entry.unit.offset if holder is file else None
    if own is not None:
        yield entry.unit, None  # by offsets in the unit, which dwz writes in as few bytes as possible
    by_unit: dict[int, list[int]] = {}
    for place in references_to(file, entry):
        unit = file.unit_of(place)
        if unit.offset != own:
            by_unit.setdefault(unit.offset, []).append(place)
    for offset, places in by_unit.items():
        yield file.unit_at(offset), places
