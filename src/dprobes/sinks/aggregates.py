"""Summaries of records: how often each value of a field occurs, and histograms of numbers."""

from __future__ import annotations

import os
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Any

from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.fieldvalues import FieldValues, text_of
from dprobes.formatters.templates.values import Fault
from dprobes.keyed.layout import bucket_of
from dprobes.lazydataclass import dataclass
from dprobes.record.codec import decode_record
from dprobes.record.packedparts import PackedPlaces
from dprobes.sinks.fieldcolumns import FieldColumns, NoColumnError, Shown, columns_of_packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.formatters.templates.values import Value
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch

__all__ = ["VALUES_MAX", "Aggregates", "CountTable", "Histogram", "place_text"]

VALUES_MAX = 100_000
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
        self._values: list[Counter[Any]] = [Counter() for _ in counted]
        """The same with values that are not strings yet: of one field, or tuples of those of several."""
        self._others = [0] * len(self._counted)
        self._measured = [(field, dict[str, Counter[int]]()) for field in measured]
        self._odd: list[Counter[str]] = [Counter() for _ in measured]
        self._fields: dict[int, FieldValues] = {}

    # The sink

    def create_event(self, source: RecordSource) -> None:
        """Know a program; raise ``FormatError`` if its records can have none of the fields that are asked for."""
        self.create_event_of(source, os.uname().nodename, AddressSymboliser(source, live=True))

    def create_event_of(self, source: RecordSource, host: str, symboliser: AddressSymboliser | None = None) -> None:
        """Know a program whose records may be of another machine; raises as ``create_event``."""
        self._fields[source.number] = values = FieldValues(source, host, symboliser)
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
        if (packed := batch.packed) is not None and isinstance(batch.places, PackedPlaces):
            columns = columns_of_packed(packed, batch.places.table.__getitem__, values)
            if self.log_columns(columns):
                return
        for encoded, place in zip(batch.records, batch.places, strict=True):
            record = decode_record(encoded)
            for n, (fields, counter) in enumerate(self._counted):
                key = tuple(values.text(record, place, field) for field in fields)
                if key in counter or len(counter) + len(self._values[n]) < VALUES_MAX:
                    counter[key] += 1
                else:
                    self._others[n] += 1
            for n, (field, by_place) in enumerate(self._measured):
                where = place_text(place)
                numbers = _numbers(values.find(record, place, field))
                if numbers:
                    by_place.setdefault(where, Counter()).update(map(bucket_of, numbers))
                else:
                    self._odd[n][where] += 1

    def fields_of(self, source: RecordSource) -> FieldValues:
        """Return what finds the fields of a program that is known."""
        return self._fields[source.number]

    def log_columns(self, columns: FieldColumns) -> bool:
        """Count records by their columns; return False, having counted none, if some field has no column."""
        try:
            counted = [[columns.values(field) for field in fields] for fields, _ in self._counted]
            measured = [columns.values(field) for field, _ in self._measured]
        except NoColumnError:
            return False
        for n, found in enumerate(counted):
            self._count(n, _counts_of(found, columns.count), columns.count)
        if measured and columns.count:
            wheres = columns.of_place(place_text)
            for n, numbers in enumerate(measured):
                self._measure(n, wheres, numbers, columns.count)
        return True

    def _count(self, n: int, found: Counter[Any], count: int) -> None:
        """Add up how often values occur, ``count`` times in all."""
        values, strings = self._values[n], self._counted[n][1]
        room = VALUES_MAX - len(values) - len(strings)
        if room >= len(found):
            values.update(found)
            return
        if room > 0:
            new = [key for key in found if key not in values][:room]
            values.update({key: found[key] for key in new})
            for key in new:
                count -= found.pop(key)
        # Sets are compared without a look at each value here: mostly there is no room for millions of them.
        for key in values.keys() & found.keys():
            values[key] += found[key]
            count -= found[key]
        self._others[n] += count

    def _measure(self, n: int, wheres: Any, numbers: Any, count: int) -> None:
        by_place, odd = self._measured[n][1], self._odd[n]
        if isinstance(numbers, list) and isinstance(numbers[0], int) and isinstance(wheres, str):
            bucket = int.bit_length if min(numbers) >= 0 else bucket_of  # the first is much faster
            by_place.setdefault(wheres, Counter()).update(map(bucket, numbers))
            return
        for (where, number), found in _counts_of([wheres, numbers], count).items():
            if isinstance(number, int):
                by_place.setdefault(where, Counter())[bucket_of(number)] += found
            else:
                odd[where] += found

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program, but not what was counted."""
        self._fields.pop(source.number, None)

    def flush(self) -> None:
        """Do nothing: what was counted is asked for at the end."""

    def close(self) -> None:
        """Do nothing."""

    # What somebody else has counted

    def add_count(self, n: int, key: tuple[str, ...], count: int) -> None:
        """Add so many records with these values of the fields of table ``n``."""
        self._counted[n][1][key] += count

    def add_others(self, n: int, count: int) -> None:
        """Add so many records to those of table ``n`` that are counted together."""
        self._others[n] += count

    def add_bucket(self, n: int, where: str, bucket: int, count: int) -> None:
        """Add so many numbers to a bucket of histogram ``n`` (``bucket_of``)."""
        self._measured[n][1].setdefault(where, Counter())[bucket] += count

    def add_odd(self, n: int, where: str, count: int) -> None:
        """Add so many records without a number to histogram ``n``."""
        if count:
            self._odd[n][where] += count

    # What has come of it

    def tables(self) -> Iterator[CountTable]:
        """Iterate over the tables, in the order in which they were asked for."""
        for (fields, strings), values, others in zip(self._counted, self._values, self._others, strict=True):
            counter = Counter(strings)
            for value, count in values.items():
                key = (value,) if len(fields) == 1 else value
                counter[tuple(map(_text_of, fields, key))] += count
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


def place_text(place: Place) -> str:
    """Return what histograms call a place."""
    return f"{place.function or place.symbol}{' (return)' if place.at_return else ''}"


def _text_of(field: str, value: Value) -> str:
    return str(value) if isinstance(value, Shown) else text_of(field, value)


def _counts_of(columns: Sequence[Any], count: int) -> Counter[Any]:
    """Return how often each value occurs in a column, or each combination of those of several; the first ones first."""
    if not any(isinstance(column, list) for column in columns):
        key = columns[0] if len(columns) == 1 else tuple(columns)
        return Counter({key: count} if count else {})
    if len(columns) == 1:
        return Counter(columns[0])
    return Counter(zip(*(c if isinstance(c, list) else repeat(c, count) for c in columns), strict=True))


def _numbers(value: Value) -> tuple[int, ...]:
    match value:
        case int():
            return (value,)
        case tuple():
            return value
        case None | Fault() | str() | bytes():
            return ()
