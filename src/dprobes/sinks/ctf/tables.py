"""
Rows of keyed tables as events.

An event has the parts of the key, ``key0``, as strings, and the numbers of the value: ``value``, or ``count``, ``sum``,
``min``, ``max``; a string or a call stack that is kept is a string, ``value``; of a histogram ``bucket_lows`` and
``bucket_counts``, of the buckets that are not empty. What can be computed from these is left out: there are no numbers
here but whole ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped
from dprobes.formatters.templates.fields import Field, FieldKind
from dprobes.keyed.rows import shown_rows
from dprobes.record.layout import LogRecord
from dprobes.sinks.ctf.classes import HeaderItems
from dprobes.sinks.typedvalues import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.keyed.parts import Names
    from dprobes.sinks.ctf.trace import Events, Trace
    from dprobes.sinks.typedvalues import ArgumentValue

__all__ = ["table_events"]

_NO_RECORD = LogRecord()
_LEAST = -(1 << 63)
_NOTHING = "?"
"""What stands for an empty string: readers show an earlier one instead."""


def table_events(trace: Trace, contents: Sequence[TableContents], names: Names, time: int) -> Events:
    """Return the events of tables at one moment, whose classes are added to a trace."""
    header = HeaderItems(_NO_RECORD)
    events: Events = []
    for each in contents:
        for row in shown_rows(each, names):
            fields = [*_of_key(row.keys), *_of_value(row.value)]
            shape = Shape(tuple(field for field, _ in fields))
            event_class = trace.add_class(f"table:{each.table.name}", header, shape, has_cpu=False)
            events.append((time, event_class.encode(time, _NO_RECORD, [value for _, value in fields])))
    return events


def _of_key(keys: Sequence[str]) -> Iterator[tuple[Field, ArgumentValue]]:
    for number, key in enumerate(keys):
        yield Field(f"key{number}", FieldKind.STRING, 0, 10, is_array=False), escaped(key) or _NOTHING


def _of_value(value: dict[str, Any]) -> Iterator[tuple[Field, ArgumentValue]]:
    for name, number in value.items():
        if isinstance(number, int):
            yield _number(name), number
        elif name == "value":
            kept = "; ".join(number) if isinstance(number, list) else str(number)
            yield Field(name, FieldKind.STRING, 0, 10, is_array=False), escaped(kept) or _NOTHING
    if (buckets := value.get("buckets")) is not None:
        yield _number("bucket_lows", is_array=True), tuple(_LEAST if low is None else low for low, _, _ in buckets)
        yield _number("bucket_counts", is_array=True), tuple(count for _, _, count in buckets)


def _number(name: str, *, is_array: bool = False) -> Field:
    return Field(name, FieldKind.SIGNED, 8, 10, is_array=is_array)
