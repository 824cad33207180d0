"""
Histograms and sums of a number in records, for each place or for each combination of other fields.

Counts from tables at the hit are added with the same result.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.field_values import FieldValues, text_of
from dprobes.formatters.templates.template_model import Fault
from dprobes.keyed.table_layout import bucket_of
from dprobes.record.log_record import decode_record
from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces
from dprobes.rpn.keyed_tables import Unit
from dprobes.sinks.field_columns import FieldColumns, NoColumnError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.formatters.templates.template_model import Value
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks import Batch

__all__ = [
    "GROUPS_MAX",
    "VALUES_MAX",
    "Aggregates",
    "CountTable",
    "Histogram",
    "Measures",
    "Sum",
    "SumTable",
    "place_text",
]

GROUPS_MAX = 10_000
"""Maximum number of groups that are kept separately; further ones are merged into one group."""

OTHERS = "others"
"""The name of the merged group."""

Group = tuple[str, ...]
"""The values of the fields that group the numbers, or a place."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """
    The histogram of a field: the number of records by bucket (``bucket_of``), with the empty buckets in between.

    ``where`` is the place, or the values of the fields that group the records. ``odd`` records had no number in this
    field.
    """

    field: str
    where: str
    buckets: tuple[tuple[int, int], ...]
    odd: int
    unit: Unit = Unit.NONE


class Sum(NamedTuple):
    """Summary of numbers: their count, sum, minimum and maximum."""

    numbers: int
    total: int
    least: int
    largest: int

    def plus(self, other: Sum) -> Sum:
        """Return the summary of the numbers of both: counts and sums added, the lower minimum, the higher maximum."""
        return Sum(
            self.numbers + other.numbers,
            self.total + other.total,
            min(self.least, other.least),
            max(self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class SumTable:
    """
    The sums of a field's numbers by group, the greatest sum first.

    ``odd`` is the number of records without a number.
    """

    field: str
    by: tuple[str, ...]
    rows: tuple[tuple[Group, Sum], ...]
    odd: int
    unit: Unit = Unit.NONE


class Measures:
    """Histograms of the fields ``measured`` and sums of the fields ``summed``, grouped by the fields ``by``."""

    def __init__(self, measured: Sequence[str], summed: Sequence[str] = (), by: Sequence[str] = ()) -> None:
        self.measured, self.summed, self.by = tuple(measured), tuple(summed), tuple(by)
        self._buckets: list[dict[Group, Counter[int]]] = [{} for _ in measured]
        self._odd: list[Counter[Group]] = [Counter() for _ in measured]
        self._sums: list[dict[Group, Sum]] = [{} for _ in summed]
        self._unsummed: list[int] = [0 for _ in summed]
        self._units: dict[str, set[Unit]] = {field: set() for field in (*measured, *summed)}
        """The units that a field has in the records of the programs."""

    def __bool__(self) -> bool:
        return bool(self.measured or self.summed)

    def check(self, values: FieldValues) -> None:
        """Raise ``FormatError`` if the records of a program have none of the fields."""
        for field in self.by:
            values.check(field)
        for field in (*self.measured, *self.summed):
            values.check(field, is_number=True)
            self._units[field].add(values.unit(field))

    # Input from records, one by one or by columns

    def log(self, values: FieldValues, record: LogRecord, place: Place) -> None:
        """Add the numbers of a record to its group, and count the fields that are not numbers in it."""
        group = tuple(values.text(record, place, field) for field in self.by) if self.by else (place_text(place),)
        for n, field in enumerate(self.measured):
            self._add_numbers(n, group, _numbers(values.find(record, place, field)))
        for n, field in enumerate(self.summed):
            self._add_summed(n, group, _numbers(values.find(record, place, field)))

    def columns(self, columns: FieldColumns) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the columns of all fields; raise ``NoColumnError`` if one has none."""
        by = [columns.values(field) for field in self.by] if self.by else [columns.of_place(place_text)]
        measured = [columns.values(field) for field in self.measured]
        return by, measured, [columns.values(field) for field in self.summed]

    def log_columns(self, columns: tuple[list[Any], list[Any], list[Any]], count: int) -> None:
        """Add the numbers of ``count`` records, from the result of ``columns``."""
        by, measured, summed = columns
        if not count:
            return
        for n, numbers in enumerate(measured):
            self._log_measured(n, by, numbers, count)
        for n, numbers in enumerate(summed):
            for group, found in self._grouped(by, numbers, count):
                there = [number for number in found if isinstance(number, int)]
                if there:
                    self._add_summed(n, group, there)
                self.add_unsummed(n, len(found) - len(there))

    def _log_measured(self, n: int, by: list[Any], numbers: Any, count: int) -> None:
        is_one = not any(isinstance(column, list) for column in by)
        if is_one and isinstance(numbers, list) and set(map(type, numbers)) == {int}:
            bucket = int.bit_length if min(numbers) >= 0 else bucket_of  # int.bit_length is much faster
            self._of_group(n, self._texts(tuple(by))).update(map(bucket, numbers))
            return
        for group, found in self._grouped(by, numbers, count):
            there = [number for number in found if isinstance(number, int)]
            if there:
                self._of_group(n, group).update(map(bucket_of, there))
            self.add_odd(n, group, len(found) - len(there))

    def _grouped(self, by: list[Any], numbers: Any, count: int) -> Iterator[tuple[Group, Sequence[Any]]]:
        """
        Iterate over the groups of ``count`` records, each with its numbers.

        ``by`` has the columns of the grouping fields, and ``numbers`` is the column of numbers. A value that is not a
        list is the same for all records.
        """
        every = numbers if isinstance(numbers, list) else [numbers] * count
        if not any(isinstance(column, list) for column in by):
            yield self._texts(tuple(by)), every
            return
        found: dict[tuple[Any, ...], list[Any]] = {}
        keys = zip(*(c if isinstance(c, list) else repeat(c, count) for c in by), strict=True)
        for key, number in zip(keys, every, strict=False):
            try:
                found[key].append(number)
            except KeyError:
                found[key] = [number]
        for key, each in found.items():
            yield self._texts(key), each

    def _texts(self, key: tuple[Any, ...]) -> Group:
        """Return a group from the values of its fields, as strings for display."""
        return tuple(map(_measured_text, self.by or ("",), key))

    # Input from counts made elsewhere, by group

    def add_bucket(self, n: int, group: Group, bucket: int, count: int) -> None:
        """Add ``count`` numbers to a bucket (``bucket_of``) of the histogram of the field with index ``n``."""
        self._of_group(n, group)[bucket] += count

    def add_odd(self, n: int, group: Group, count: int) -> None:
        """Add ``count`` records without a number to the histogram of the field with index ``n``."""
        if count:
            self._odd[n][self._kept(group, self._odd[n])] += count

    def add_sum(self, n: int, group: Group, found: Sum) -> None:
        """Add a summary of numbers to the sum of the field with index ``n``."""
        sums = self._sums[n]
        group = self._kept(group, sums)
        sums[group] = found if (known := sums.get(group)) is None else known.plus(found)

    def add_unsummed(self, n: int, count: int) -> None:
        """Add ``count`` records without a number to the sum of the field with index ``n``."""
        self._unsummed[n] += count

    def _add_numbers(self, n: int, group: Group, numbers: Sequence[int]) -> None:
        if numbers:
            self._of_group(n, group).update(map(bucket_of, numbers))
        else:
            self.add_odd(n, group, 1)

    def _add_summed(self, n: int, group: Group, numbers: Sequence[int]) -> None:
        if numbers:
            self.add_sum(n, group, Sum(len(numbers), sum(numbers), min(numbers), max(numbers)))
        else:
            self.add_unsummed(n, 1)

    def _of_group(self, n: int, group: Group) -> Counter[int]:
        buckets = self._buckets[n]
        return buckets.setdefault(self._kept(group, buckets), Counter())

    def _kept(self, group: Group, known: Iterable[Group]) -> Group:
        """Return ``group`` if it is in ``known`` or there is room for it, otherwise the group of all others."""
        if isinstance(known, dict) and group not in known and len(known) >= GROUPS_MAX:
            return (OTHERS, *[""] * (len(group) - 1))
        return group

    # Results

    def histograms(self) -> Iterator[Histogram]:
        """Iterate over the histograms, for each field those of all groups."""
        for field, by_group, odd in zip(self.measured, self._buckets, self._odd, strict=True):
            for group in dict.fromkeys([*by_group, *odd]):
                counter = by_group.get(group, Counter())
                first, last = min(counter, default=0), max(counter, default=-1)
                buckets = tuple((bucket, counter[bucket]) for bucket in range(first, last + 1))
                yield Histogram(field, self._where(group), buckets, odd[group], self._unit(field))

    def _where(self, group: Group) -> str:
        if not self.by:
            return f"at {group[0]}" if group[0] else ""
        if group[0] == OTHERS and not any(group[1:]):
            return f"of {OTHERS}"
        return "where " + ", ".join(f"{name} = {text}" for name, text in zip(self.by, group, strict=True))

    def sums(self) -> Iterator[SumTable]:
        """Iterate over the sums, in the order of the requested fields."""
        for field, by_group, odd in zip(self.summed, self._sums, self._unsummed, strict=True):
            rows = sorted(by_group.items(), key=lambda item: (-item[1].total, item[0]))
            yield SumTable(field, self.by or ("place",), tuple(rows), odd, self._unit(field))

    def _unit(self, field: str) -> Unit:
        """Return the unit of a field, if it is the same in the records of all programs."""
        units = self._units[field]
        return next(iter(units)) if len(units) == 1 else Unit.NONE


def place_text(place: Place) -> str:
    """Return the name of a probepoint as a group in histograms and sums."""
    return f"{place.function or place.symbol}{' (return)' if place.at_return else ''}"


def _measured_text(field: str, value: Value) -> str:
    return text_of(field, value) if field else str(value)


def _numbers(value: Value) -> tuple[int, ...]:
    match value:
        case int():
            return (value,)
        case tuple():
            return value
        case None | Fault() | str() | bytes():
            return ()


# Summaries of records: counts of each value of a field, and histograms and sums of numbers (``Measures``).

VALUES_MAX = 100_000
"""Maximum number of distinct values that are counted separately; further ones are counted together."""


@dataclass(frozen=True, slots=True)
class CountTable:
    """
    Counts of the combinations of values of ``fields``, the most frequent first.

    ``others`` is the number of records with values beyond the first VALUES_MAX distinct ones.
    """

    fields: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], int], ...]
    others: int


class Aggregates:
    """
    Sink that summarizes the records of all programs: counts, histograms and sums.

    Each of ``counted`` is the list of fields of one table of counts. ``measured`` has the fields of histograms and
    ``summed`` the fields of sums, for each combination of the fields ``by``.
    """

    def __init__(
        self,
        counted: Sequence[tuple[str, ...]],
        measured: Sequence[str] = (),
        summed: Sequence[str] = (),
        by: Sequence[str] = (),
    ) -> None:
        self._counted = [(fields, Counter[tuple[str, ...]]()) for fields in counted]
        self._values: list[Counter[Any]] = [Counter() for _ in counted]
        """Counts of raw values, not converted to strings yet: of one field, or tuples of several."""
        self._others = [0] * len(self._counted)
        self.measures = Measures(measured, summed, by)
        self._fields: dict[int, FieldValues] = {}

    # The sink

    def create_event(self, source: RecordSource) -> None:
        """Register a program; raise ``FormatError`` if its records have none of the requested fields."""
        self.create_event_of(source, os.uname().nodename, AddressSymboliser(source, live=True))

    def create_event_of(self, source: RecordSource, host: str, symboliser: AddressSymboliser | None = None) -> None:
        """
        Register a program whose records may be of another machine. Errors are those of ``create_event``.

        ``host`` is the name of that machine. Without ``symboliser``, addresses have no names.
        """
        self._fields[source.number] = values = FieldValues(source, host, symboliser)
        self._check(values)

    def check(self, source: RecordSource) -> None:
        """Raise the same errors as ``create_event``, without registering the program."""
        self._check(FieldValues(source))

    def _check(self, values: FieldValues) -> None:
        for field in (field for fields, _ in self._counted for field in fields):
            values.check(field)
        self.measures.check(values)

    def log_events(self, batch: Batch) -> None:
        """Decode the records of a batch, and add their values to the counts, sums and histograms."""
        values = self._fields[batch.source.number]
        if (packed := batch.packed) is not None:
            for part in packed.table.parts:
                if not self.log_columns(FieldColumns(part, packed.places.__getitem__, values)):
                    table = RecordTable.of_rows(part)
                    self._log_each(values, TableBytes(table), TablePlaces(table, packed.places))
            return
        self._log_each(values, batch.records, batch.places)

    def _log_each(self, values: FieldValues, records: Iterable[bytes], places: Iterable[Place]) -> None:
        for encoded, place in zip(records, places, strict=True):
            record = decode_record(encoded)
            for n, (fields, counter) in enumerate(self._counted):
                key = tuple(values.text(record, place, field) for field in fields)
                if key in counter or len(counter) + len(self._values[n]) < VALUES_MAX:
                    counter[key] += 1
                else:
                    self._others[n] += 1
            self.measures.log(values, record, place)

    def fields_of(self, source: RecordSource) -> FieldValues:
        """Return the field values of a registered program."""
        return self._fields[source.number]

    def log_columns(self, columns: FieldColumns) -> bool:
        """Count records by their columns. Return False, without counting any of them, if a field has no column."""
        try:
            counted = [[columns.values(field) for field in fields] for fields, _ in self._counted]
            measured = self.measures.columns(columns)
        except NoColumnError:
            return False
        for n, found in enumerate(counted):
            self._count(n, _counts_of(found, columns.count), columns.count)
        self.measures.log_columns(measured, columns.count)
        return True

    def _count(self, n: int, found: Counter[Any], count: int) -> None:
        """Add ``found``, the counts of ``count`` records, to table ``n``."""
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
        # Set operations avoid a loop over the values: there may be millions of them, most of which have no room.
        for key in values.keys() & found.keys():
            values[key] += found[key]
            count -= found[key]
        self._others[n] += count

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program, but not its counts."""
        self._fields.pop(source.number, None)

    def flush(self) -> None:
        """Do nothing: the counts are read at the end."""

    def close(self) -> None:
        """Do nothing: no resource is open."""

    # Input from counts made elsewhere

    def add_count(self, n: int, key: tuple[str, ...], count: int) -> None:
        """Add ``count`` records with these values of the fields of table ``n``."""
        self._counted[n][1][key] += count

    def add_others(self, n: int, count: int) -> None:
        """Add ``count`` records to the values of table ``n`` that are not listed separately."""
        self._others[n] += count

    # Results

    def tables(self) -> Iterator[CountTable]:
        """Iterate over the tables, in the order of the requested fields."""
        for (fields, strings), values, others in zip(self._counted, self._values, self._others, strict=True):
            counter = Counter(strings)
            for value, count in values.items():
                key = (value,) if len(fields) == 1 else value
                counter[tuple(map(text_of, fields, key))] += count
            rows = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
            yield CountTable(fields, tuple(rows), others)


def _counts_of(columns: Sequence[Any], count: int) -> Counter[Any]:
    """Return the counts of values in a column, or of combinations in several columns, in order of first occurrence."""
    if not any(isinstance(column, list) for column in columns):
        key = columns[0] if len(columns) == 1 else tuple(columns)
        return Counter({key: count} if count else {})
    if len(columns) == 1:
        return Counter(columns[0])
    return Counter(zip(*(c if isinstance(c, list) else repeat(c, count) for c in columns), strict=True))
