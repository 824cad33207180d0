"""Summaries of records: how often each value of a field occurs, and histograms of numbers."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from dprobes.formatters.fieldvalues import FieldValues
from dprobes.formatters.templates.values import Fault
from dprobes.keyed.layout import bucket_of
from dprobes.lazydataclass import dataclass
from dprobes.record.codec import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.formatters.templates.values import Value
    from dprobes.record.origin import RecordSource
    from dprobes.sinks.interface import Batch

__all__ = ["Aggregates", "CountTable", "Histogram"]

_VALUES_MAX = 100_000
"""Distinct values that are counted one by one; what comes beyond them is counted together."""


@dataclass(frozen=True, slots=True)
class CountTable:
    """
    Say how often each combination of values of ``fields`` has occurred, the most frequent first.

    ``others`` records had values that are not listed, because there were too many different ones.
    """

    fields: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], int], ...]
    others: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """
    Say how many numbers of a field fell into each bucket, by ``bucket_of``; empty ones between them are there.

    ``odd`` records had no number there.
    """

    field: str
    place: str
    buckets: tuple[tuple[int, int], ...]
    odd: int


class Aggregates:
    """Count the records of all programs: each of ``counted`` are fields of one table, each of ``measured`` a field."""

    def __init__(self, counted: Sequence[tuple[str, ...]], measured: Sequence[str]) -> None:
        self._counted = [(fields, Counter[tuple[str, ...]]()) for fields in counted]
        self._others = [0] * len(self._counted)
        self._measured = [(field, dict[str, Counter[int]]()) for field in measured]
        self._odd: list[Counter[str]] = [Counter() for _ in measured]
        self._fields: dict[int, FieldValues] = {}

    # The sink

    def create_event(self, source: RecordSource) -> None:
        """Know a program; raise ``FormatError`` if its records can have none of the fields that are asked for."""
        self.create_event_of(source, os.uname().nodename)

    def create_event_of(self, source: RecordSource, host: str) -> None:
        """Know a program whose records are of another machine; raises as ``create_event``."""
        self._fields[source.number] = values = FieldValues(source, host)
        self._check(values)

    def check(self, source: RecordSource) -> None:
        """Raise as ``create_event``, without knowing the program afterwards."""
        self._check(FieldValues(source))

    def _check(self, values: FieldValues) -> None:
        for field in (field for fields, _ in self._counted for field in fields):
            values.check(field)
        for field, _ in self._measured:
            values.check(field, is_number=True)

    def log_events(self, batch: Batch) -> None:
        """Count records."""
        values = self._fields[batch.source.number]
        for encoded, place in zip(batch.records, batch.places, strict=True):
            record = decode_record(encoded)
            for n, (fields, counter) in enumerate(self._counted):
                key = tuple(values.text(record, place, field) for field in fields)
                if key in counter or len(counter) < _VALUES_MAX:
                    counter[key] += 1
                else:
                    self._others[n] += 1
            for n, (field, by_place) in enumerate(self._measured):
                where = f"{place.function or place.symbol}{' (return)' if place.at_return else ''}"
                numbers = _numbers(values.find(record, place, field))
                if numbers:
                    by_place.setdefault(where, Counter()).update(map(bucket_of, numbers))
                else:
                    self._odd[n][where] += 1

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program, but not what was counted."""
        self._fields.pop(source.number, None)

    def flush(self) -> None:
        """Do nothing: what was counted is asked for at the end."""

    def close(self) -> None:
        """Do nothing."""

    # What has come of it

    def tables(self) -> Iterator[CountTable]:
        """Iterate over the tables, in the order in which they were asked for."""
        for (fields, counter), others in zip(self._counted, self._others, strict=True):
            rows = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
            yield CountTable(fields, tuple(rows), others)

    def histograms(self) -> Iterator[Histogram]:
        """Iterate over the histograms, for each field those of all places."""
        for (field, by_place), odd in zip(self._measured, self._odd, strict=True):
            for place in dict.fromkeys([*by_place, *odd]):
                counter = by_place.get(place, Counter())
                first, last = min(counter, default=0), max(counter, default=-1)
                buckets = tuple((bucket, counter[bucket]) for bucket in range(first, last + 1))
                yield Histogram(field, place, buckets, odd[place])


def _numbers(value: Value) -> tuple[int, ...]:
    match value:
        case int():
            return (value,)
        case tuple():
            return value
        case None | Fault() | str() | bytes():
            return ()
