"""Summaries of records: how often each value of a field occurs, and histograms and sums of numbers (``measures``)."""

from __future__ import annotations

import os
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Any

from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.fieldvalues import FieldValues, text_of
from dprobes.lazydataclass import dataclass
from dprobes.record.codec import decode_record
from dprobes.record.mixed import parts_of
from dprobes.record.packedparts import PackedBytes, PackedPlaces
from dprobes.sinks.fieldcolumns import FieldColumns, NoColumnError, Shown, columns_of_packed
from dprobes.sinks.measures import Measures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.formatters.templates.values import Value
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch

__all__ = ["VALUES_MAX", "Aggregates", "CountTable"]

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


class Aggregates:
    """
    Count the records of all programs: each of ``counted`` are fields of one table.

    Each of ``measured`` is the field of histograms, each of ``summed`` of sums, for each combination of fields ``by``.
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
        """The same with values that are not strings yet: of one field, or tuples of those of several."""
        self._others = [0] * len(self._counted)
        self.measures = Measures(measured, summed, by)
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
        self.measures.check(values)

    def log_events(self, batch: Batch) -> None:
        """Count records."""
        values = self._fields[batch.source.number]
        if (packed := batch.packed) is not None and isinstance(batch.places, PackedPlaces):
            table = batch.places.table
            for part in parts_of(packed):
                if not self.log_columns(columns_of_packed(part, table.__getitem__, values)):
                    self._log_each(values, PackedBytes(part), PackedPlaces(part, table))
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
        """Return what finds the fields of a program that is known."""
        return self._fields[source.number]

    def log_columns(self, columns: FieldColumns) -> bool:
        """Count records by their columns; return False, having counted none, if some field has no column."""
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
