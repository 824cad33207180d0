"""
Cells of notebooks in DProbes C: ``%load_ext dprobes.notebook``, then ``%%dprobes -p 1234`` before a program.

A cell runs ``dprobes run`` as a separate process, and its value is a ``Recording``, which notebooks show as tables.
Values of records come from other processes and are untrusted, so they are escaped and never rendered as HTML.
"""

from __future__ import annotations

import html
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dprobes.errors import DprobesError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import IO

    import pandas as pd

__all__ = ["Recording", "RunError", "load_ipython_extension", "record"]

RECORDS_MAX = 100_000
"""Maximum number of records of a run that are kept; further records are only counted."""

_ROWS_SHOWN = 200
_ITEMS = ("wall_time", "name", "pid")
_MESSAGES_MAX = 20_000


@dataclass(frozen=True)
class Recording:
    """
    The results of a run: records and rows of tables as ``dprobes run --format json`` prints them.

    ``lines`` were printed by blocks of the tool, ``left_out`` is the number of records that are not kept, and
    ``messages`` are the lines of standard error. Notebooks show everything as tables.
    """

    records: tuple[Mapping[str, Any], ...]
    rows: tuple[Mapping[str, Any], ...]
    lines: tuple[str, ...] = ()
    messages: str = ""
    left_out: int = 0

    @property
    def tables(self) -> dict[str, list[Mapping[str, Any]]]:
        """The rows of the program's keyed tables by table name; ``_`` is the table without a name."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            found.setdefault(str(row["table"]), []).append(row)
        return found

    def to_pandas(self, table: str | None = None) -> pd.DataFrame:
        """Return the records, or the rows of a table, as a DataFrame; raise ``NotSupportedError`` without pandas."""
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise NotSupportedError("a DataFrame needs pandas", hint="pip install 'dprobes[pandas]'") from error
        if table is not None:
            return pd.DataFrame([_flat_row(row) for row in self.tables.get(table, ())])
        return pd.DataFrame([_flat(each) for each in self.records])

    def _repr_html_(self) -> str:
        parts = ["".join(f"<div>{html.escape(line)}</div>" for line in self.lines)]
        if self.records:
            parts.append(_table([_flat(each) for each in self.records[:_ROWS_SHOWN]]))
            more = len(self.records) - _ROWS_SHOWN
            if more > 0:
                parts.append(f"<div>and {more} more records</div>")
        if self.left_out:
            parts.append(f"<div>{self.left_out} records are not kept</div>")
        for name, rows in self.tables.items():
            title = "@" if name == "_" else f"@{name}"
            parts.append(_table([_flat_row(row) for row in rows[:_ROWS_SHOWN]], title))
        return "\n".join(filter(None, parts)) or "<div>no records</div>"

    def __repr__(self) -> str:
        tables = ", ".join(f"@{'' if name == '_' else name}: {len(rows)} rows" for name, rows in self.tables.items())
        return f"<{len(self.records)} records{f', {tables}' if tables else ''}>"


class RunError(DprobesError):
    """A failure to run a program; ``messages`` are the lines of its output."""

    def __init__(self, messages: str, status: int) -> None:
        self.messages = messages.strip() or f"dprobes ended with status {status}"
        super().__init__(self.messages.splitlines()[0])


def record(program: str, arguments: Sequence[str]) -> Recording:
    """
    Run a program in DProbes C with the options of ``dprobes run``, and return its results.

    The run ends as ``dprobes run`` does, or at an interrupt (Ctrl-C), with the results so far. Raise ``RunError`` if
    the program could not be run.
    """
    command = [sys.executable, "-m", "dprobes", "run", "--format", "json", "-e", program, *arguments]
    with tempfile.TemporaryFile() as said:
        # A Ctrl-C is handled here: one to the run would end it, and a second one would end it without its results.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True
        )
        assert process.stdout is not None
        reader = _Reader()
        try:
            with process.stdout as output:
                _read(output, reader, process)
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        said.seek(max(0, said.seek(0, os.SEEK_END) - _MESSAGES_MAX))
        messages = said.read().decode(errors="replace")
    if status not in (0, 130):
        raise RunError(messages, status)
    return Recording(tuple(reader.records), tuple(reader.rows), tuple(reader.lines), messages, reader.left_out)


class _Reader:
    """
    A reader of the JSON lines that a run prints; it sorts them into records, rows of keyed tables, and text lines.

    ``left_out`` is the number of records beyond ``RECORDS_MAX``.
    """

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.rows: list[Mapping[str, Any]] = []
        self.lines: list[str] = []
        self.left_out = 0

    def take(self, line: bytes) -> None:
        """Add the JSON object in a line of output; a record above ``RECORDS_MAX`` is only counted."""
        found = json.loads(line)
        if "block" in found:
            self.lines.append(str(found["text"]))
        elif "table" in found:
            self.rows.append(found)
        elif len(self.records) < RECORDS_MAX:
            self.records.append(found)
        else:
            self.left_out += 1


def _read(output: IO[bytes], reader: _Reader, process: subprocess.Popen[bytes]) -> None:
    """
    Read the output of a run to its end; the first interrupt (Ctrl-C) ends ``process``, and reading continues.

    A second interrupt is raised.
    """
    is_interrupted = False
    while True:
        try:
            for line in output:
                reader.take(line)
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            process.send_signal(signal.SIGINT)
        else:
            return


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a record: time and place of the hit, and the fields of its data."""
    return {name: found[name] for name in _ITEMS if name in found} | dict(found.get("fields", {}))


def _flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a keyed table with a column for each key field."""
    keys = {f"key {number}": key for number, key in enumerate(row.get("keys", ()), 1)}
    return keys | {name: value for name, value in row.items() if name not in ("table", "kind", "keys", "estimates")}


def _table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = _cells("th", names)
    body = "".join(f"<tr>{_cells('td', [_shown(row.get(name, '')) for name in names])}</tr>" for row in rows)
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(tag: str, words: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words)


def _shown(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(each, list) and len(each) == 3 for each in value):
        return ", ".join(f"[{low}, {high}): {count}" for low, high, count in value)  # the buckets of a histogram
    return value if isinstance(value, str) else json.dumps(value)


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic ``%%dprobes`` with ``ipython``, the running InteractiveShell, as ``%load_ext`` requires."""

    def dprobes(line: str, cell: str) -> Recording | None:
        """Run the program in this cell with the options of ``dprobes run`` in its first line; None after an error."""
        try:
            return record(cell, shlex.split(line))
        except RunError as error:
            sys.stderr.write(f"{error.messages}\n")
        except ValueError as error:
            sys.stderr.write(f"the options are wrong: {error}\n")
        return None

    ipython.register_magic_function(dprobes, magic_kind="cell")
