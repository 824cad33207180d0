"""
Look-up of names in the debug information of a module, from a place in its code.

The look-up starts in the blocks around the place. It continues in the place's source file: first in the classes and
namespaces around the function, then in the whole file. Last, it searches the whole module in the same order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from dprobes.dpc.syntax.expression_parser import scoped_parts
from dprobes.dpc.types.c_types import is_same_layout
from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import (
    Scoped,
    found_in,
    found_named,
    imported_units,
    scopes_of,
    strings_with,
    type_units_of,
)
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from dprobes.dpc.types.c_types import CType
    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.dwarf.debug_file import DebugFile

__all__ = ["NameScope", "ScopedTypes", "ambiguity", "definition_of"]

_TAGS = {
    "struct": (Tag.STRUCTURE_TYPE, Tag.CLASS_TYPE),
    "union": (Tag.UNION_TYPE,),
    "enum": (Tag.ENUMERATION_TYPE,),
}
_WITH_TAGS = frozenset((Tag.STRUCTURE_TYPE, Tag.CLASS_TYPE, Tag.UNION_TYPE, Tag.ENUMERATION_TYPE))
_NAMED = (Tag.TYPEDEF, Tag.BASE_TYPE, *_WITH_TAGS)

_INTEGERS = re.compile(r"\b(?:(?:unsigned|signed|long|short|int|char)\b ?)+")
_AROUND = re.compile(r"\s*([<>,*&()\[\]])\s*")
_NUMBER = re.compile(r"(?<=[<,])(-?[0-9]+)[uUlL]+(?=[,>])")
_CONST = re.compile(r"([\w:$.]+) const\b")
"""Variations in the names of types: words of integers, blanks, suffixes of numbers, and the position of ``const``."""

_LISTED = 4  # maximum number of meanings of a name in an error


class NameScope:
    """
    Names of a module in the scope of a place.

    ``units`` has the units of the place, the nearest first. ``around`` is the entry of the function, whose parents are
    the enclosing scopes. ``blocks`` has the blocks around the place. Without them, no part of the module is nearer than
    another.
    """

    def __init__(
        self,
        file: DebugFile,
        units: Sequence[Unit] = (),
        around: Entry | None = None,
        blocks: Sequence[Entry] = (),
    ) -> None:
        self._file = file
        self._units = units
        self._blocks = blocks
        self._around = [] if around is None else [each.name for each in scopes_of(around)]
        self._known_spellings: dict[tuple[int, str], Sequence[str]] = {}

    def outermost(self) -> NameScope:
        """Return the scope for a name that begins with ``::``: the same source file, outside of any block or class."""
        return NameScope(self._file, self._units)

    def groups(self, name: str, tags: Collection[int], *, c_declarations: bool = True) -> Iterator[Sequence[Scoped]]:
        """
        Iterate over groups of entries with one of the ``tags`` that a name may mean, nearest first.

        A caller uses the first group with a match, and ignores the others. A name may include its scopes, as
        ``shop::Cart``. Without ``c_declarations``, declarations in C are left out.
        """
        yield from self.near_groups(name, tags)
        *scopes, last = scoped_parts(name)
        found = [
            each
            for file in self._file.all_files()
            for spelling in self._spellings(file, last)
            for each in found_named(file, spelling, tags, c_declarations=c_declarations)
        ]
        yield from self._sorted(found, scopes)

    def near_groups(self, name: str, tags: Collection[int]) -> Iterator[Sequence[Scoped]]:
        """Iterate over those of ``groups`` that are in the blocks and source files of the place, nearest first."""
        *scopes, last = scoped_parts(name)
        for block in self._blocks if not scopes else ():
            found = [
                Scoped(entry, ())
                for origin in block.origins()
                for entry in origin.children()
                if entry.tag in tags and entry.has(At.NAME) and entry.text(At.NAME) == last
            ]
            if found:
                yield found
        for near in self._units:
            units = imported_units(near)
            found = [each for unit in units for each in self._found_in(unit, last, tags)]
            if all(each.entry.flag(At.DECLARATION) for each in found):
                found += [
                    each for unit in units for its in type_units_of(unit) for each in self._found_in(its, last, tags)
                ]
            yield from self._sorted(found, scopes)

    def _found_in(self, unit: Unit, name: str, tags: Collection[int]) -> Iterator[Scoped]:
        file = cast("DebugFile", unit.file)
        for spelling in self._spellings(file, name):
            yield from found_in(file, unit, spelling, tags)

    def _spellings(self, file: DebugFile, name: str) -> Sequence[str]:
        """Return the spellings of a name in a file: the arguments of a template can be written in several ways."""
        template, bracket, _ = name.partition("<")
        if not bracket:
            return (name,)
        known = self._known_spellings.get((id(file), name))
        if known is None:
            wanted = _plain(name)
            strings = (each.decode("utf-8", "surrogateescape") for each in strings_with(file, f"{template}<".encode()))
            known = sorted(each for each in strings if _plain(each) == wanted)
            self._known_spellings[id(file), name] = known
        return known

    def _sorted(self, found: Sequence[Scoped], scopes: Sequence[str]) -> Iterator[Sequence[Scoped]]:
        """Iterate over groups of the found entries by nearness of their scopes, partial matches of the scopes last."""
        left = list(found)
        for depth in range(len(self._around), -1, -1):
            group = [each for each in left if _is_in(each, [*self._around[:depth], *scopes])]
            left = [each for each in left if all(each is not other for other in group)]
            if group:
                yield group
        if rest := [each for each in left if _is_in(each, scopes, is_end=True)]:
            yield rest


def _plain(name: str) -> str:
    """Return the name of a template and its arguments in a canonical spelling."""
    name = _INTEGERS.sub(lambda match: _integer_name(match[0].split()) + " " * match[0].endswith(" "), name)
    name = _NUMBER.sub(r"\1", _AROUND.sub(r"\1", name.strip()))
    return _CONST.sub(r"const \1", name)


def _integer_name(words: Sequence[str]) -> str:
    """Return the canonical name of an integer type, whose words may be in any order and include ``int`` or not."""
    sign = "unsigned " if "unsigned" in words else ""
    if "char" in words:
        return f"{'signed ' if 'signed' in words else sign}char"
    if "short" in words:
        return f"{sign}short"
    return sign + (" ".join(["long"] * words.count("long")) or "int")


def _is_in(found: Scoped, scopes: Sequence[str], *, is_end: bool = False) -> bool:
    """
    Return whether an entry's scopes are ``scopes`` or, with ``is_end``, end in them.

    Unnamed and inline namespaces may be omitted.
    """
    wanted = [each for each in scopes if each and each != "(anonymous namespace)"]
    for its in (found.scopes, [each for each in found.scopes if not each.is_open]):
        names = [each.name for each in its if each.name]
        names = names[len(names) - len(wanted) :] if is_end and len(names) >= len(wanted) else names
        if len(names) == len(wanted) and all(map(_is_called, names, wanted)):
            return True
    return False


def _is_called(name: str, wanted: str) -> bool:
    """Return whether a scope has this name; the arguments of a template may be omitted."""
    if name == wanted or "<" not in name:
        return name == wanted
    return _plain(name) == _plain(wanted) if "<" in wanted else name.partition("<")[0] == wanted


class ScopedTypes:
    """The types of a module by their names (``NamedTypes``), in the scope of a place."""

    def __init__(self, type_of: Callable[[Entry], CType], scope: NameScope) -> None:
        """Look types up in ``scope``; ``type_of`` makes a type from its entry."""
        self._type_of = type_of
        self._scope = scope

    def named(self, name: str) -> CType | None:
        """Return the ``typedef``, base type, or C++ class with a name, or None if there is none."""
        return self._meant(name, _NAMED, name)

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return the structure, union or enumeration (``kind``) with a tag; None if there is none."""
        return self._meant(tag, _TAGS[kind], f"{kind} {tag}")

    def _meant(self, name: str, tags: Collection[int], written: str) -> CType | None:
        for group in self._scope.groups(name, tags):
            entries = [each for each in group if _is_whole(each.entry)]
            if plain := [each for each in entries if each.entry.tag not in _WITH_TAGS]:
                entries = plain  # a ``typedef`` name takes precedence over a tag
            if entries:
                return self._one(entries, written)
        return None

    def _one(self, entries: Sequence[Scoped], written: str) -> CType:
        """Return the type that all of the entries describe; raise ``TargetError`` if they describe several."""
        different: list[tuple[Scoped, CType]] = []
        for each in entries:
            type_ = self._type_of(each.entry)
            if not any(is_same_layout(type_, known) for _, known in different):
                different.append((each, type_))
        if len(different) > 1:
            raise ambiguity(written, [each for each, _ in different])
        return different[0][1]


def definition_of(entry: Entry, file: DebugFile, type_of: Callable[[Entry], CType]) -> Entry | None:
    """Return the entry that defines a declared structure, None without one; raise ``TargetError`` if layouts differ."""
    name = entry.text(At.NAME)
    if not name:
        return None
    scope = NameScope(file, (entry.unit,), entry)
    for group in scope.groups(name, (entry.tag,)):
        whole = [each for each in group if _is_whole(each.entry)]
        if whole:
            first = type_of(whole[0].entry)
            for each in whole[1:]:
                if not is_same_layout(first, type_of(each.entry)):
                    raise ambiguity(name, whole)
            return whole[0].entry
    return None


def _is_whole(entry: Entry) -> bool:
    """Return whether an entry is a definition, or refers to one by its signature."""
    return not entry.flag(At.DECLARATION) or entry.has(At.SIGNATURE)


def ambiguity(written: str, found: Sequence[Scoped]) -> TargetError:
    """Return the error for a name with several meanings, with a list of them by scope, or else by source file."""
    names = ["::".join([*(s.name for s in each.scopes if s.name), each.entry.name or ""]) for each in found]
    files = [_source_of(each.entry) for each in found]
    if len(set(names)) == len(names):
        labels, hint = names, "name the intended one"
    elif len(set(files)) == len(files):
        labels = [f"that of {each}" for each in files]
        hint = "a handler in a function of a source file means its own"
    else:
        labels = [f"{name} of {file}:{each.entry.number(At.DECL_LINE)}" for name, file, each in
                  zip(names, files, found, strict=True)]  # fmt: skip
        hint = "a handler in a function or block that has one means that"
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return TargetError(f"'{written}' may be {', '.join(labels[:_LISTED])}{more}", hint=hint)


def _source_of(entry: Entry) -> str:
    return (entry.unit.root.text(At.NAME) or "a unit of its own").rpartition("/")[2]
