"""The type of an expression in DProbes C for people: as C writes it, with the members of a structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.cli.languageserver.analysis import Analysis
    from dprobes.dpc.types.ctype import CType

__all__ = ["type_at"]

_MEMBERS_MAX = 20
_TYPES_MAX = 4
"""How many types are shown of an expression that has another one at each place."""


def type_at(analysis: Analysis, offset: int) -> str | None:
    """Return the type of the smallest expression at an offset, in Markdown; None if there is none."""
    here = [
        (span.end - span.start, span, type_)
        for span, type_ in analysis.types
        if span.file is analysis.source and span.start <= offset < span.end
    ]
    if not here:
        return None
    smallest = min(size for size, _, _ in here)
    text = " ".join(next(span.text for size, span, _ in here if size == smallest).split())
    # What a place in memory holds is noted before what is made of it: the address of an array or structure.
    types: dict[str, CType] = {}
    for size, _, type_ in here:
        if size == smallest:
            types.setdefault(str(type_), type_)
    shown = list(types.items())[: 1 if _is_whole(next(iter(types.values()))) else _TYPES_MAX]
    lines = [line for name, type_ in shown for line in (f"{name}  // {text}", *_members(type_))]
    return "\n".join(["```c", *lines, "```"])


def _is_whole(type_: CType) -> bool:
    from dprobes.dpc.types.ctype import Array, Record

    return isinstance(type_, Array | Record)


def _declared(type_: str, name: str) -> str:
    """Return a declaration as C writes it: ``char name[16]``, ``char *name``."""
    base, *sizes = type_.split(" [")
    pointed = f"{base}{'' if base.endswith('*') else ' '}{name}".rstrip()
    return pointed + "".join(f"[{size}" for size in reversed(sizes))


def _members(type_: CType) -> Iterator[str]:
    """Give the members of a structure, or of what a pointer leads to, as far as they are known."""
    from dprobes.dpc.types.ctype import Pointer, Record

    record = type_.target if isinstance(type_, Pointer) else type_
    if not isinstance(record, Record):
        return
    try:
        members = record.members
    except DprobesError:
        return  # the debug information is damaged
    if members is None:
        return
    yield f"{record} {{"
    for member in members[:_MEMBERS_MAX]:
        bits = f" : {member.bits}" if member.bits is not None else ""
        yield f"    {_declared(str(member.type), member.name)}{bits};"
    if len(members) > _MEMBERS_MAX:
        yield f"    // and {len(members) - _MEMBERS_MAX} more"
    yield "};"
