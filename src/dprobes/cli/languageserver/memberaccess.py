"""The members that may be named behind ``.`` and ``->``: those of the type that the compiler has for what is before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli.languageserver.analysis import analyse
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.cli.languageserver.analysis import Analysis
    from dprobes.dpc.types.ctype import CType, Record

__all__ = ["MemberAccess", "access_at", "members_of"]

_ACCESS = lazy_pattern(r"(?<=[\w)\]])\s*(?:->|\.)\s*(?P<word>[A-Za-z_]\w*)?\Z")
_REST = lazy_pattern(r"\w*")
_LINE_END = lazy_pattern(r"[ \t]*(?:\n|\Z)")


@dataclass(frozen=True, slots=True)
class MemberAccess:
    """An access to a member, of which ``word`` is written; ``start`` to ``end`` is what follows the structure."""

    start: int
    end: int
    word: str


def access_at(text: str, offset: int) -> MemberAccess | None:
    """Return the access to a member that an offset is in; None if it is in none."""
    line = text.rfind("\n", 0, offset) + 1
    match = _ACCESS.search(text[line:offset])
    if match is None:
        return None
    rest = _REST.match(text, offset)
    return MemberAccess(line + match.start(), offset if rest is None else rest.end(), match["word"] or "")


def members_of(name: str, text: str, access: MemberAccess) -> Iterator[tuple[str, str]]:
    """Give the members of the structure with their types; none if the text around it cannot be understood."""
    # Without the access, which is unfinished, the text has a type for what is before it.
    end = ";" if _LINE_END.match(text, access.end) is not None else ""
    analysis = analyse(name, text[: access.start] + end + text[access.end :])
    record = _record_before(analysis, text, access.start)
    for member in record.member_names() if record is not None else ():
        found = record.member(member) if record is not None else None
        yield member, "" if found is None else str(found.type)


def _record_before(analysis: Analysis, text: str, end: int) -> Record | None:
    """Return the structure, or the one that a pointer leads to, of the expression that ends there."""
    opening = 0
    while text[end - 1 : end] == ")":
        opening = max(opening, _opening_of(text, end - 1))
        end -= 1
    here = [
        (span.end - span.start, type_)
        for span, type_ in analysis.types
        if span.file is analysis.source and span.end == end and span.start >= opening
    ]
    # In brackets all of it is meant; without them operators come after the access to a member.
    here.sort(key=lambda each: each[0], reverse=bool(opening))
    return next((record for _, type_ in here if (record := _record_of(type_)) is not None), None)


def _opening_of(text: str, closing: int) -> int:
    depth = 0
    for position in range(closing, -1, -1):
        depth += (text[position] == ")") - (text[position] == "(")
        if depth == 0:
            return position + 1
    return 0


def _record_of(type_: CType) -> Record | None:
    from dprobes.dpc.types.ctype import Pointer, Record

    target = type_.target if isinstance(type_, Pointer) else type_
    return target if isinstance(target, Record) else None
