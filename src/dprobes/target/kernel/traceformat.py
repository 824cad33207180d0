"""
The format of a tracepoint's record, as the kernel describes it in ``events/SUBSYSTEM/NAME/format`` of tracefs.

::

    name: sched_process_exec
    ID: 365
    format:
            field:unsigned short common_type;       offset:0;       size:2; signed:0;
            field:__data_loc char[] filename;       offset:8;       size:4; signed:0;

Source: Documentation/trace/events.rst of the kernel, section 3.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RecordField", "TraceFormat", "parse_format"]

_ID = lazy_pattern(r"^ID: (\d+)$", re.MULTILINE)
_FIELD = lazy_pattern(r"^\s*field:([^;]+);\s*offset:(\d+);\s*size:(\d+);\s*signed:([01]);", re.MULTILINE)
_DECLARATION = lazy_pattern(r"(?P<type>.*?)(?P<name>\w+)(?P<array>\[[^\]]*\])?\Z", re.DOTALL)
_DYNAMIC = ("__data_loc ", "__rel_loc ")


@dataclass(frozen=True, slots=True)
class RecordField:
    """
    A field of a tracepoint's record.

    ``offset`` and ``size`` are in bytes. An array is ``is_array``; where ``place`` is "__data_loc" or "__rel_loc", the
    field is a word whose lower half says where in the record the array is: from the record's start, or from the
    field's end.
    """

    name: str
    type_name: str
    offset: int
    size: int
    is_signed: bool
    is_array: bool
    place: str = ""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The format of a tracepoint's record; ``number`` is what perf_event_open(2) calls the tracepoint."""

    number: int
    fields: Mapping[str, RecordField]


def parse_format(text: str) -> TraceFormat:
    """Return what a format says, without the fields that all records have; raise ``FormatError`` if it is none."""
    number = _ID.search(text)
    if number is None:
        raise FormatError("the format of a tracepoint has no line 'ID: N'")
    fields = (_field(*match.groups()) for match in _FIELD.finditer(text))
    return TraceFormat(int(number[1]), {each.name: each for each in fields if not each.name.startswith("common_")})


def _field(declaration: str, offset: str, size: str, signed: str) -> RecordField:
    place = next((word.strip() for word in _DYNAMIC if declaration.startswith(word)), "")
    match = _DECLARATION.match(declaration.removeprefix(place).strip())
    if match is None:
        raise FormatError(f"the format of a tracepoint has a field without a name: '{declaration}'")
    type_name = match["type"].strip() + (match["array"] or "")
    is_array = bool(match["array"]) or bool(place) or int(size) not in (1, 2, 4, 8)
    return RecordField(match["name"], type_name, int(offset), int(size), signed == "1", is_array, place)
