"""Inserted program of a session: its records, counts, variables and removal."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

from dprobes.engines.engine_interface import Counts, ProbeRemoval, TableChange, VariableReset
from dprobes.errors import DprobesError, EngineError
from dprobes.escapes import escaped
from dprobes.record.record_origin import wall_offset, wall_time
from dprobes.resolve.probepoints import places_of
from dprobes.rpn.keyed_tables import tables_matching
from dprobes.runs.followed_program import FollowedProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pandas as pd
    import pyarrow as pa

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.command_launcher import LaunchedCommand
    from dprobes.engines.engine_interface import Attachment
    from dprobes.keyed.table_text import KeyedTable
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import DataReader, Place
    from dprobes.resolve.probepoints import ProbeState
    from dprobes.rpn.rpn_program import Program

__all__ = ["InsertedProgram", "Probepoint", "RecordList", "RecordQueue", "total"]

# Transfer of records from the threads that get them from engines to those that read them.


class RecordQueue:
    """
    Buffer of encoded records of up to ``limit`` bytes. Further records are lost, and counted in ``lost``.

    The queue is over when it is empty and every ``open`` was followed by a ``close``.
    """

    def __init__(self, limit: int) -> None:
        self.lost = 0
        self._limit = limit
        self._size = 0
        self._writers = 0
        self._batches: deque[tuple[int, Sequence[tuple[bytes, Place]]]] = deque()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def listener(self, tell: Callable[[], None]) -> Iterator[None]:
        """
        Call ``tell`` when records arrive or a writer closes the queue, until the context ends.

        The call may be in any thread.
        """
        with self._changed:
            self._listeners.append(tell)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(tell)

    @property
    def is_over(self) -> bool:
        """True if the queue is empty and has no more writers."""
        with self._changed:
            return not self._writers and not self._batches

    def _tell(self) -> None:
        for tell in self._listeners:
            tell()

    def open(self) -> None:
        """Count a further writer; the queue ends when all writers have called ``close``."""
        with self._changed:
            self._writers += 1

    def close(self) -> None:
        """Count a writer as finished; after the last one, readers get no more records."""
        with self._changed:
            self._writers -= 1
            self._changed.notify_all()
            self._tell()

    def put(self, batch: Sequence[tuple[bytes, Place]]) -> None:
        """Add a batch of records. The first one that exceeds the limit, and all later ones of the batch, are lost."""
        size = sum(len(record) for record, _ in batch)
        with self._changed:
            if self._size + size > self._limit:
                ends = accumulate((len(record) for record, _ in batch), initial=self._size)
                count = sum(end <= self._limit for end in ends) - 1
                self.lost += len(batch) - max(count, 0)
                batch = batch[: max(count, 0)]
                if not batch:
                    return
                size = sum(len(record) for record, _ in batch)
            self._size += size
            self._batches.append((size, batch))
            self._changed.notify()
            self._tell()

    def take(self, timeout: float | None) -> Sequence[tuple[bytes, Place]]:
        """
        Wait for a batch of records and remove it from the queue.

        Return an empty sequence if the queue is over, or if no record arrived for ``timeout`` seconds. None means no
        limit.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._batches:
                left = None if until is None else until - time.monotonic()
                if not self._writers or (left is not None and left <= 0):
                    return ()
                self._changed.wait(left)
            size, batch = self._batches.popleft()
            self._size -= size
            return batch

    def put_back(self, batch: Sequence[tuple[bytes, Place]]) -> None:
        """Put records that were not read back at the beginning of the queue."""
        if batch:
            size = sum(len(record) for record, _ in batch)
            with self._changed:
                self._size += size
                self._batches.appendleft((size, batch))
                self._changed.notify()
                self._tell()


# Lists of records: displayed as tables in notebooks, and convertible to Arrow and pandas.


_SHOWN_MAX = 100
"""Maximum number of records that a notebook shows; the list contains all."""

_KINDS = {"time": "timestamp[ns]", "monotonic": "uint64"}
"""Types of columns that do not depend on their contents."""

_FIRST = ("process_name", "pid", "tid", "symbol")
"""The first columns in a notebook, after the time."""

_HIDDEN = frozenset({"time", "major", "minor", "cpu", "uid", "cs", "ip", "ss", "sp", "module", "function", "at_return"})
"""Columns that a notebook omits. ``to_dicts`` and tables contain them."""


class RecordList(Sequence["LogRecord"]):
    """
    Immutable list of records. ``ProbeSession.collect`` returns one, and it can be constructed from any records.

    ``offset``, in nanoseconds, is added to their times to obtain wall-clock times. The default is the offset of this
    machine and boot.
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
        """Return a record, or for a slice a list of records."""
        if isinstance(index, slice):
            return RecordList(self._records[index], offset=self._offset)
        return self._records[index]

    def __repr__(self) -> str:
        return f"<{len(self)} records>"

    def to_dicts(self) -> list[dict[str, object]]:
        """Return each record as a dictionary, the result of ``LogRecord.to_dict``."""
        return [record.to_dict() for record in self._records]

    def to_arrow(self) -> pa.Table:
        """
        Return an Arrow table with a column for each name of ``to_dicts``; this needs pyarrow.

        ``time`` is the wall-clock time in UTC, and ``monotonic`` CLOCK_MONOTONIC, as in SQL tables. Values that could
        not be read at the hit, and those that a record lacks, are null.
        """
        import pyarrow as pa

        columns = self._columns()
        return pa.table({name: _array(values, _KINDS.get(name)) for name, values in columns.items()})

    def to_pandas(self) -> pd.DataFrame:
        """Return the table of ``to_arrow`` as a DataFrame. This needs pandas, too."""
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
        """Return the records as an HTML table, which notebooks display."""
        rows = [self._row(record) for record in self._records[:_SHOWN_MAX]]
        names = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{escape(escaped(name))}</th>" for name in names)
        lines = "".join(
            "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names) + "</tr>" for row in rows
        )
        more = f"<p>… {len(self) - len(rows)} more records</p>" if len(self) > len(rows) else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"

    def _row(self, record: LogRecord) -> dict[str, str]:
        """Return the values of a record by column, as a notebook shows them."""
        row = record.to_dict()
        time = None if record.time is None else wall_time(record.time, self._offset)
        shown = {"time": time, **{name: row.pop(name, None) for name in _FIRST}}
        shown |= {name: value for name, value in row.items() if name not in _HIDDEN}
        return {name: _shown(value) for name, value in shown.items() if value is not None}


def _plain(value: object) -> Any:
    """Return a value in a form that Arrow accepts, or None for a value that could not be read."""
    match value:
        case list() | tuple():
            return [item if isinstance(item, int) else str(item) for item in value]
        case str():
            return value.encode("utf-8", "backslashreplace").decode() if _is_broken(value) else value
        case None | bool() | int() | bytes():
            return value
    return None


def _is_broken(text: str) -> bool:
    """Return whether a string represents bytes that are not valid UTF-8, which Arrow refuses."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _array(values: Sequence[Any], kind: str | None) -> pa.Array:
    """
    Return an Arrow array of ``kind``, of a type that suits the values if it is None.

    Values of several types are converted to strings.
    """
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


@dataclass(frozen=True, slots=True)
class Probepoint:
    """
    A place where a handler runs, in one file.

    ``minor`` is the code of its definition, ``path`` the file. ``detail`` describes the state further; it may be empty.
    """

    major: int
    minor: int
    place: Place
    path: str
    state: ProbeState
    detail: str
    counts: Counts


class _Followed(FollowedProgram):
    """An attached program whose records are put into the queue of the session."""

    def __init__(self, program: Program, attachment: Attachment, queue: RecordQueue, reader: DataReader) -> None:
        super().__init__(program.name, program, attachment)
        self._queue = queue
        self._reader = reader
        self._places: list[Place] = []
        queue.open()

    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        probes, places = self.probes, self._places
        if len(probes) > len(places):
            places += (replace(place, reader=self._reader) for place in places_of(self.name, probes, len(places)))
        self._queue.put([(record, places[probe]) for probe, record in records])

    def take_end(self, lost: int) -> None:  # noqa: ARG002 - the counts tell
        self._queue.close()


class InsertedProgram:
    """
    Inserted program, with its counts, variables and removal; created by ``ProbeSession.insert``.

    ``engine`` is the name of its engine. ``reason`` is the reason for that choice, or None if the user requested the
    engine. ``diagnostics`` has warnings and notes about the program. The methods may be called in any thread, also
    after the end of the program.
    """

    def __init__(
        self,
        program: Program,
        attachment: Attachment,
        queue: RecordQueue,
        reader: DataReader,
        *,
        engine: str,
        reason: str | None,
        diagnostics: Diagnostics,
        command: LaunchedCommand | None = None,
        tells_status: bool = False,
    ) -> None:
        self.program = program
        self.engine = engine
        self.reason = reason
        self.diagnostics = diagnostics
        self.attachment = attachment
        self._command = command
        self._tells_status = tells_status
        self._is_reported = False
        self._is_stopping = False
        self._followed = _Followed(program, attachment, queue, reader)

    def begin(self) -> None:
        """Wait until all processes in scope are probed, as far as possible; raise the error that prevented that."""
        try:
            self._followed.start()
        except DprobesError:
            self._is_reported = True
            raise

    @property
    def name(self) -> str:
        """The name of the probed module."""
        return self.program.name

    @property
    def has_ended(self) -> bool:
        """True if the program has ended, so that none of its probepoints is inserted any more."""
        return self._followed.has_ended

    @property
    def is_stopping(self) -> bool:
        """True if the end of the program was requested."""
        return self._is_stopping

    @property
    def probepoints(self) -> list[Probepoint]:
        """The probepoints with their states and counts; one definition may have many, in several files."""
        followed, counts = self._followed, self._followed.counts()
        probes = list(followed.probes)
        places = places_of(self.name, probes)
        return [
            Probepoint(
                self.program.major,
                probe.definition.minor,
                places[number],
                probe.path,
                state,
                detail,
                counts[number] if number < len(counts) else Counts(),
            )
            for number, (probe, (state, detail)) in enumerate(zip(probes, followed.states(), strict=False))
        ]

    def counts(self, minor: int | None = None) -> Counts:
        """
        Return the sums of the current counts of its probepoints.

        With ``minor``, include only the probepoints of definitions with this code.
        """
        return total(each.counts for each in self.probepoints if minor in (None, each.minor))

    def local_variables(self) -> list[int]:
        """Return the values of the program's local variables (``lv``), in the order of their indices."""
        return self.attachment.local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return the values of the program's per-CPU variables (``cv``): a list for each CPU, ordered by index."""
        return self.attachment.cpu_variables()

    def tables(self) -> dict[str, KeyedTable]:
        """Return the current contents of the program's keyed tables, by name."""
        from dprobes.keyed.table_text import KeyedTable

        return {each.table.name: KeyedTable(each) for each in self.attachment.tables()}

    def clear_tables(self, pattern: str = "*") -> None:
        """
        Clear the keyed tables whose names match a pattern, by default all. The program continues to use them.

        Raise ``EngineError`` if no name matches.
        """
        self.attachment.change([TableChange(number) for number in tables_matching(pattern, self.program.tables)])

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """
        Set local and per-CPU variables with the indices from ``first`` to ``last``, inclusive, to zero.

        Without ``last``, set all from ``first`` on.
        """
        self.attachment.change([VariableReset(first, last)])

    def notices(self) -> list[str]:
        """Return the latest messages of the program's engine, the oldest first."""
        return [notice.text for notice in self._followed.notices()]

    def left_out(self) -> dict[str, str]:
        """Return the functions that match a pattern and have no probepoint, each with the reason."""
        return {each.name: each.reason for each in self._followed.left_out}

    def remove(self, minor: int | None = None) -> None:
        """
        Remove the program, and wait until it is removed. Earlier records can still be read.

        With ``minor``, only request the removal of the probepoints of definitions with this code, and do not wait.
        Raise ``EngineError`` if there is no such probepoint, or if the removal takes too long.
        """
        if minor is None:
            self.stop()
            self.join()
            return
        probes = self._followed.probes_at(self.program.major, minor)
        if not probes:
            raise EngineError(f"the program for '{self.name}' has no probepoint with minor {minor}")
        self.attachment.change([ProbeRemoval(probes)])

    def stop(self) -> None:
        """Request the end of the program without waiting."""
        self._is_stopping = True
        self._followed.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """
        Wait until the program has ended: with its processes, removed by its handlers, or after ``stop``.

        Return False if it has not ended after ``timeout`` seconds. None means no limit.
        """
        return self._followed.wait(timeout)

    def join(self) -> None:
        """Wait until the program has ended after ``stop``; raise ``EngineError`` if that takes too long."""
        if not self._followed.wait():
            raise EngineError(f"the program for '{self.name}' has not ended yet, but is going to")

    @property
    def exit_status(self) -> int | None:
        """
        The exit status of the launched command, negative for a signal, or None before its end and without a command.

        With a stub it is the exit status of the program that the stub debugs.
        """
        if self._command is not None:
            return self._command.exit_status
        finished = self._followed.finished if self._tells_status else None
        return (
            None
            if finished is None or finished.exit_status is None
            else os.waitstatus_to_exitcode(finished.exit_status)
        )

    def raise_problem(self) -> None:
        """Raise ``EngineError`` if the program failed or no probepoint was inserted. An error is raised only once."""
        problem = self._problem()
        if problem is not None and not self._is_reported:
            self._is_reported = True
            raise EngineError(problem)

    def _problem(self) -> str | None:
        if self._followed.problem is not None:
            return f"the program for '{self.name}' has ended: {self._followed.problem}"
        states = self._followed.states()
        if self._followed.finished is None or not states or not all(state.is_obstacle for state, _ in states):
            return None
        state, detail = states[0]
        said = f"{state.value} {detail}" if detail else state.value
        told = (each.message for each in self.diagnostics if each.message.startswith(state.value))
        return f"no probepoint of the program for '{self.name}' was inserted: {next(told, said)}"


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums of counts; ``executed`` is the union of the executed places."""
    result = Counts()
    executed: dict[str, None] = {}
    for each in counts:
        result.hits += each.hits
        result.records += each.records
        result.lost += each.lost
        result.passed += each.passed
        result.missed += each.missed
        result.skipped += each.skipped
        result.faulted += each.faulted
        result.neighbours += each.neighbours
        executed |= dict.fromkeys(each.executed)
    result.executed = tuple(executed)
    return result
