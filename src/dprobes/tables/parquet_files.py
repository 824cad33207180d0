"""
Directory of Parquet files, and the atomic conversion of a trace file to such files.

A file is written as ``.part-STAMP-N.parquet.tmp``, which readers ignore, and renamed when all are written. Its name is
derived from the name of the trace file, so a repeated conversion replaces the files of the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from dprobes.tables.table_conversion import pieces_of
from dprobes.tables.table_schema import HEADER_COLUMNS, TIME_NS, TIME_ZONE, file_schema
from dprobes.trace.trace_reader import TraceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from dprobes.tables.table_conversion import Piece
    from dprobes.trace.trace_content import Damage

__all__ = ["convert", "description_of", "files_of", "locked", "write_tables"]

_METADATA_KEY = "dprobes"
"""The key in a file's metadata for the JSON description of its table."""

_FILES = "program=*/major=*/minor=*/*.parquet"

_ALIKE = frozenset(HEADER_COLUMNS) - {"time", "monotonic", "ip", "sp", "data"}
"""Columns with few distinct values, which get a dictionary. In other columns it would take as long as all the rest."""

_OPEN_MAX = 64
"""Maximum number of open files. A table whose file was closed gets another file."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """
    Lock a directory of Parquet files for the context.

    Meanwhile no other process adds files, or removes a trace file whose records are in them.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def files_of(directory: Path) -> list[Path]:
    """Return the paths of the complete Parquet files in a directory and its subdirectories."""
    return sorted(path for path in directory.glob(_FILES) if not path.name.startswith("."))


def convert(trace: Path, directory: Path, stamp: str) -> None:
    """
    Convert the records of a trace file to Parquet files, and remove the trace file.

    ``stamp`` is a part of the names of these files. Raise OSError, or ``FormatError`` at damage; the directory then has
    not changed.
    """
    written = write_tables(trace, directory, stamp)
    with locked(directory):
        for path in written:
            path.rename(_final(path))
        trace.unlink()


def description_of(path: Path) -> dict[str, Any]:
    """Return the description of a file's table: program, codes, the template's description, the time zone."""
    import pyarrow.parquet as pq

    try:
        said = json.loads((pq.read_schema(path).metadata or {})[_METADATA_KEY.encode()])
    except (KeyError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def write_tables(
    trace: Path,
    directory: Path,
    stamp: str,
    *,
    lasting: bool = True,
    on_lost: Callable[[str, int], None] | None = None,
    on_damage: Callable[[Damage], None] | None = None,
) -> list[Path]:
    """
    Write the records of a trace file as temporary Parquet files, and return their paths.

    ``stamp`` is a part of their names. Files that are not ``lasting`` are written faster. ``on_lost`` is called with
    the lost records that no table row counts. ``on_damage`` is called for skipped bytes; without it, damage raises
    ``FormatError``.
    """
    writers = _Writers(directory, stamp, lasting=lasting)
    reader = TraceReader(trace, on_damage)
    collects = gc.isenabled()
    gc.disable()  # the collector would scan all records repeatedly and free none
    try:
        for piece in pieces_of(reader.blocks(), on_lost):
            writers.write(piece)
        return writers.finish()
    except BaseException:
        writers.abandon()
        raise
    finally:
        reader.close()
        if collects:
            gc.enable()


def _final(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(".tmp"))


def _with_file_times(rows: pa.Table) -> pa.Table:
    """Return rows with the time columns of files: one truncated to microseconds, and one in nanoseconds."""
    import pyarrow as pa

    time, schema = rows.column("time"), file_schema(rows.schema)
    columns = {name: rows.column(name) for name in rows.schema.names}
    columns |= {"time": time.cast(schema.field("time").type, safe=False), TIME_NS: time.cast(pa.int64())}
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _is_text(field: pa.Field) -> bool:
    """Return whether a column has strings: only for these, Parquet's dictionary encoding saves time."""
    return str(field.type) == "string"


class _File:
    """A temporary Parquet file. It uses a file object of Python, so that errors have the system's messages."""

    def __init__(self, path: Path, schema: pa.Schema, description: dict[str, Any], *, lasting: bool) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self.schema = schema
        self._lasting = lasting
        self._file = path.open("wb")
        try:
            kept = file_schema(schema).with_metadata({_METADATA_KEY: json.dumps(description)})
            alike = [name for name in schema.names if name in _ALIKE and (lasting or _is_text(schema.field(name)))]
            self._writer = pq.ParquetWriter(
                self._file,
                kept,
                compression="zstd" if lasting else "none",
                use_dictionary=alike,
                write_statistics=lasting,
            )
        except BaseException:
            self._file.close()
            raise

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(_with_file_times(rows))

    def finish(self) -> None:
        self._writer.close()
        self._file.flush()
        if self._lasting:
            os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        # The disk may be full, and an incomplete file is discarded anyway.
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


class _Writers:
    """The temporary Parquet files that are being written, one for each table."""

    def __init__(self, directory: Path, stamp: str, *, lasting: bool) -> None:
        self._directory = directory
        self._lasting = lasting
        self._stamp = stamp
        self._open: OrderedDict[Path, _File] = OrderedDict()
        self._counts: dict[Path, int] = {}
        self._written: list[Path] = []

    def write(self, piece: Piece) -> None:
        place = self._directory / piece.partition.directory
        file = self._open.pop(place, None)
        if file is not None and not file.schema.equals(piece.rows.schema):
            self._open[place] = file
            self._finish(place)
            file = None
        if file is None:
            if len(self._open) >= _OPEN_MAX:
                self._finish(next(iter(self._open)))
            file = self._begin(place, piece)
        self._open[place] = file
        file.write(piece.rows)

    def _begin(self, place: Path, piece: Piece) -> _File:
        place.mkdir(parents=True, exist_ok=True)
        number = self._counts[place] = self._counts.get(place, 0) + 1
        description = {
            "program": piece.partition.program,
            "major": piece.partition.major,
            "minor": piece.partition.minor,
            "desc": piece.desc,
            "probe": piece.probe,
            "time_zone": TIME_ZONE,
        }
        path = place / f".part-{self._stamp}-{number}.parquet.tmp"
        return _File(path, piece.rows.schema, description, lasting=self._lasting)

    def _finish(self, place: Path) -> None:
        file = self._open[place]
        file.finish()
        del self._open[place]
        self._written.append(file.path)

    def finish(self) -> list[Path]:
        for place in list(self._open):
            self._finish(place)
        return self._written

    def abandon(self) -> None:
        for file in self._open.values():
            file.abandon()
        for path in self._written:
            with contextlib.suppress(OSError):
                path.unlink()
