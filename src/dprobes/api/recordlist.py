"""Records as one thing: in notebooks a table, elsewhere a list that converts itself to what others compute with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, overload

from dprobes.escapes import escaped
from dprobes.formatters.walltime import wall_time
from dprobes.record.clock import wall_offset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd
    import pyarrow as pa

    from dprobes.record.layout import LogRecord

__all__ = ["RecordList"]

_SHOWN_MAX = 100
"""Records that a notebook shows; the others are there, too."""

_KINDS = {"time": "timestamp[ns]", "monotonic": "uint64"}
"""Types of columns that do not depend on what is in them."""

_FIRST = ("process_name", "pid", "tid", "symbol")
"""What a notebook shows of each record, after its time."""

_HIDDEN = frozenset({"time", "major", "minor", "cpu", "uid", "cs", "ip", "ss", "sp", "module", "function", "at_return"})
"""What it leaves out; ``to_dicts`` and tables have it."""


class RecordList(Sequence["LogRecord"]):
    """
    A list of records that does not change; ``ProbeSession.collect`` returns one, and any records make one.

    ``offset`` is what makes time of day of their times, in nanoseconds; by default that of this machine since it was
    started.
    """

    def __init__(self, records: Iterable[LogRecord] = (), *, offset: int | None = None) -> None:
        self._records = tuple(records)
        self._offset = wall_offset() if offset is None else offset

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[LogRecord]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> LogRecord: ...

    @overload
    def __getitem__(self, index: slice) -> RecordList: ...

    def __getitem__(self, index: int | slice) -> LogRecord | RecordList:
        """Return a record, or a list of some."""
        if isinstance(index, slice):
            return RecordList(self._records[index], offset=self._offset)
        return self._records[index]

    def __repr__(self) -> str:
        return f"<{len(self)} records>"

    def to_dicts(self) -> list[dict[str, object]]:
        """Return each record as ``LogRecord.to_dict`` does."""
        return [record.to_dict() for record in self._records]

    def to_arrow(self) -> pa.Table:
        """
        Return a table of Arrow with a column for each name of ``to_dicts``; it needs pyarrow.

        ``time`` is the time of day, in UTC, and ``monotonic`` CLOCK_MONOTONIC, as in SQL tables. What could not be read
        when a record was made is null, as is what a record does not have.
        """
        import pyarrow as pa

        columns = self._columns()
        return pa.table({name: _array(values, _KINDS.get(name)) for name, values in columns.items()})

    def to_pandas(self) -> pd.DataFrame:
        """Return the table of ``to_arrow`` as a DataFrame; it needs pandas besides."""
        return self.to_arrow().to_pandas()

    def _columns(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for number, record in enumerate(self._records):
            row = record.to_dict()
            if (time := row.get("time")) is not None and isinstance(time, int):
                row = {"time": time + self._offset, **{n: v for n, v in row.items() if n != "time"}, "monotonic": time}
            for name, value in row.items():
                columns.setdefault(name, [None] * number).append(_plain(value))
            for values in columns.values():
                if len(values) == number:
                    values.append(None)
        return columns

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        rows = [self._row(record) for record in self._records[:_SHOWN_MAX]]
        names = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{escape(escaped(name))}</th>" for name in names)
        lines = "".join(
            "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names) + "</tr>" for row in rows
        )
        more = f"<p>… {len(self) - len(rows)} more records</p>" if len(self) > len(rows) else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"

    def _row(self, record: LogRecord) -> dict[str, str]:
        """Return what a notebook shows of a record."""
        row = record.to_dict()
        time = None if record.time is None else wall_time(record.time, self._offset)
        shown = {"time": time, **{name: row.pop(name, None) for name in _FIRST}}
        shown |= {name: value for name, value in row.items() if name not in _HIDDEN}
        return {name: _shown(value) for name, value in shown.items() if value is not None}


def _plain(value: object) -> Any:
    """Return a value as Arrow takes it; None for what could not be read."""
    match value:
        case list() | tuple():
            return [item if isinstance(item, int) else str(item) for item in value]
        case str():
            return value.encode("utf-8", "backslashreplace").decode() if _is_broken(value) else value
        case None | bool() | int() | bytes():
            return value
    return None


def _is_broken(text: str) -> bool:
    """Return whether a text has bytes that were no UTF-8, which Arrow does not take."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _array(values: Sequence[Any], kind: str | None) -> pa.Array:
    """Return a column; where its values are of several types, they are strings."""
    import pyarrow as pa

    if kind is not None:
        return pa.array(values, kind)
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return pa.array(values, _number_kind(value for value in values if value is not None))
    if kinds == {list}:
        items = [item for value in values if value is not None for item in value]
        is_numbers = all(isinstance(item, int) for item in items)
        return pa.array(values, pa.list_(_number_kind(items) if is_numbers else pa.string()))
    if len(kinds) > 1:
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.array(values)


def _number_kind(numbers: Iterable[int]) -> pa.DataType:
    import pyarrow as pa

    return pa.int64() if min(numbers, default=0) < 0 else pa.uint64()


def _shown(value: object) -> str:
    return value.hex(" ") if isinstance(value, bytes) else escaped(str(value))
