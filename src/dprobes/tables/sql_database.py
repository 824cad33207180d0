"""
Tables for SQL queries: records of trace files and Parquet files as views of one DuckDB database.

``records`` has the common columns of all records. Each program is a schema with a view for each major and minor code,
``m1_2``, which also has the fields of the template. Without a schema, ``m1_2`` is the view of the only program, or of
all programs together. Queries cannot read any other files, or write anything.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dprobes.diagnostics import Diagnostics, did_you_mean
from dprobes.errors import FormatError, NotSupportedError, SourceError, reason_of
from dprobes.formatters.templates.data_extraction import unique_name
from dprobes.source_text import SourceFile, Span
from dprobes.tables.parquet_files import description_of, files_of, locked, write_tables
from dprobes.tables.parquet_journals import journal_paths
from dprobes.tables.table_schema import HEADER_COLUMNS, TIME_NS, Partition, fixed_columns
from dprobes.trace.trace_writer import older_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import duckdb

    from dprobes.trace.trace_content import Damage

__all__ = ["Database", "TableInfo", "error_of", "query_error"]

# The errors of DuckDB in a query, with the span in the query.

_NAME = "query"
_KIND = re.compile(r"\A[A-Z][A-Za-z ]* Error: ")


def query_error(query: str, message: str, span: tuple[int, int] | None = None, hint: str | None = None) -> SourceError:
    """Return the error of a query. ``span`` has start and end of the underlined part, or is None."""
    diagnostics = Diagnostics()
    place = None if span is None else Span(SourceFile(_NAME, query), *span)
    diagnostics.error(place, message, hint=hint)
    return SourceError(list(diagnostics))


def error_of(query: str, error: Exception, tables: Iterable[str]) -> SourceError:
    """Return the error for an exception of a query. ``tables`` has the valid names, for hints."""
    details = _details(error)
    message, hint = message_of(error), None
    if details.get("error_subtype") == "MISSING_ENTRY" and details.get("type") == "Table":
        name = str(details.get("name", ""))
        message = f"there is no table '{name}'"
        hint = did_you_mean(name, [table for table in tables if table != name]) or "'dprobes sql --list' lists them"
    elif details.get("candidates"):
        names = [name.strip().strip('"') for name in str(details["candidates"]).split(",")]
        hint = did_you_mean(str(details.get("name", "")), names)
    return query_error(query, message, _span(query, details), hint)


def message_of(error: Exception) -> str:
    """Return DuckDB's message of an error as one line, in the style of dprobes' messages."""
    text = str(_details(error).get("exception_message") or error) or type(error).__name__
    line = _KIND.sub("", text.strip().splitlines()[0]).strip().rstrip("!.")
    words = line.split(maxsplit=1)
    if words and words[0].istitle():
        line = line[0].lower() + line[1:]
    return line


def _details(error: Exception) -> dict[str, Any]:
    """Return the details of an error, which DuckDB formats as JSON if so configured."""
    _, brace, rest = str(error).partition("{")
    try:
        details = json.loads(brace + rest)
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _span(query: str, details: dict[str, Any]) -> tuple[int, int] | None:
    try:
        position = int(details["position"])
        size = json.loads(details["location"])[1] if "location" in details else 1
    except (KeyError, ValueError, IndexError):
        return None
    data = query.encode("utf-8", "surrogateescape")  # positions are in bytes
    start = len(data[:position].decode("utf-8", "replace"))
    end = len(data[: position + size].decode("utf-8", "replace"))
    return (start, end) if start < end <= len(query) else None


_SYSTEM_SCHEMAS = ("main", "temp", "information_schema", "pg_catalog")

_TYPES = {"string": "varchar", "binary": "blob", "timestamp[ns]": "timestamp_ns", "bool": "boolean",
          "uint8": "utinyint", "uint32": "uinteger", "uint64": "ubigint"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableInfo:
    """Description of a view. ``columns`` maps names to types, without the columns that all tables have."""

    name: str
    program: str
    desc: str
    rows: int
    columns: dict[str, str]


@dataclass(slots=True)
class _Group:
    """Files of one program with one major and minor code. ``name`` is the name of its view."""

    partition: Partition
    files: list[Path] = field(default_factory=list)
    schema: str = ""
    alias: str = ""
    """The name of its probe in an instrumentation set, with ``_`` for each dot; empty: it has none."""

    @property
    def view(self) -> str:
        codes = ("null" if code is None else str(code) for code in (self.partition.major, self.partition.minor))
        return "m" + "_".join(codes)

    @property
    def name(self) -> str:
        return f"{_quoted(self.schema)}.{self.view}"


class Database:
    """
    A database with views of trace files, Parquet files, and directories that ``parquet:DIR`` has written.

    Trace files are converted to temporary Parquet files, so that memory use does not depend on their length.
    ``on_damage`` and ``on_lost``, which receives a program's name and a number of records, are called for damaged and
    lost records.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        on_damage: Callable[[Damage], None] | None = None,
        on_lost: Callable[[str, int], None] | None = None,
    ) -> None:
        self._on_damage = on_damage
        self._on_lost = on_lost
        for library in ("duckdb", "pyarrow"):
            if importlib.util.find_spec(library) is None:
                raise NotSupportedError(f"SQL needs {library}", hint="pip install 'dprobes[parquet]'")
        self._directory = Path(tempfile.mkdtemp(prefix="dprobes-sql-"))
        try:
            self._groups = _grouped(self._files(paths))
            self._allowed = sorted({str(file.parent) for group in self._groups for file in group.files})
            self.connection = self._connect()
            self._create_views()
            self._lock()
        except BaseException:
            self.remove_files()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()
        self.remove_files()

    def remove_files(self) -> None:
        """Delete the temporary Parquet files that were written for trace files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    # Files

    def _files(self, paths: Sequence[Path]) -> list[Path]:
        found = []
        for path in paths:
            if path.is_dir():
                found += self._of_directory(path.absolute())
            elif path.suffix == ".parquet":
                found.append(path.absolute())
            else:
                older = older_part(path)
                found += [file for part in (older, path) if part is path or (part.exists() and part not in paths)
                          for file in self._of_trace(part)]  # fmt: skip
        return found

    def _of_directory(self, directory: Path) -> list[Path]:
        """Return the Parquet files of a directory, and copies of its journals for conversion."""
        try:
            with locked(directory):  # prevents reading both a journal and its converted files
                files = files_of(directory)
                journals = [Path(shutil.copy(path, self._new("journal"))) for path in journal_paths(directory)]
        except OSError as error:
            raise FormatError(f"'{directory}': {reason_of(error)}") from error
        if not files and not journals:
            raise FormatError(f"'{directory}' has no tables of records", hint="'--log-target parquet:DIR' writes them")
        return files + [file for journal in journals for file in self._of_trace(journal)]

    def _new(self, name: str) -> Path:
        return self._directory / f"{name}-{len(list(self._directory.iterdir()))}"

    def _of_trace(self, path: Path) -> list[Path]:
        directory = self._new("tables")
        directory.mkdir()
        return write_tables(path, directory, "0", lasting=False, on_lost=self._on_lost, on_damage=self._on_damage)

    # The database

    def _connect(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        return duckdb.connect(
            config={
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "python_enable_replacements": False,  # otherwise a name could be a Python variable of DProbes
                "errors_as_json": True,
                "temp_directory": str(self._directory / "spilled"),
            }
        )

    def _lock(self) -> None:
        """Restrict queries to the files of the tables, and prevent them from changing settings."""
        listed = ", ".join(_literal(f"{directory}/") for directory in self._allowed)
        for setting in (f"allowed_directories = [{listed}]", "enable_external_access = false",
                        "lock_configuration = true"):  # fmt: skip
            self.connection.execute(f"set {setting}")

    def _create_views(self) -> None:
        import duckdb

        taken: set[str] = set(_SYSTEM_SCHEMAS)
        schemas: dict[str, str] = {}
        for group in self._groups:
            program = group.partition.program
            if program not in schemas:
                schemas[program] = unique_name(program or "none", taken, fold=str.lower)
                self.connection.execute(f"create schema {_quoted(schemas[program])}")
            group.schema = schemas[program]
            group.alias = str(description_of(group.files[-1]).get("probe", "")).replace(".", "_").lower()
            try:
                self.connection.execute(f"create view {group.name} as {_reading(group)}")
            except duckdb.Error as error:
                raise FormatError(f"a file of '{group.files[0].parent}' cannot be read: {message_of(error)}") from None
        self._create_common()

    def _create_common(self) -> None:
        selected = []
        for group in self._groups:
            there = self._columns(group.name)  # files of older versions may lack some columns
            listed = ", ".join(_quoted(name) for name in fixed_columns() if name in there)
            selected.append(f"select {listed} from {group.name}")  # noqa: S608 - quoted
        if not selected:
            columns = (f"null::{_TYPES[kind]} as {_quoted(name)}" for name, kind in fixed_columns().items())
            selected = [f"select {', '.join(columns)} where false"]
        self.connection.execute(f"create view records as {' union all by name '.join(selected)}")
        by_view: dict[str, list[_Group]] = {}
        for group in self._groups:
            by_view.setdefault(group.view, []).append(group)
        taken = {"records", *by_view}
        for group in self._groups:
            if group.alias in taken:
                group.alias = ""  # a file may contain any name
            if group.alias:
                by_view.setdefault(group.alias, []).append(group)
        for view, groups in by_view.items():
            union = " union all by name ".join(f"from {group.name}" for group in groups)
            self.connection.execute(f"create view {_quoted(view)} as {union}")

    # Contents

    def tables(self) -> list[TableInfo]:
        """Return the views. Those of all programs together are first."""
        import pyarrow.parquet as pq

        counts = [sum(pq.read_metadata(file).num_rows for file in group.files) for group in self._groups]
        listed = [TableInfo("records", "", "", sum(counts), self._columns("records"))]
        for group, count in zip(self._groups, counts, strict=True):
            desc = description_of(group.files[-1]).get("desc", "")
            shared = sum(other.view == group.view for other in self._groups) > 1
            own = {k: v for k, v in self._columns(group.name).items() if k not in HEADER_COLUMNS}
            listed.append(
                TableInfo(
                    group.alias or (group.name if shared else group.view),
                    group.partition.program,
                    str(desc),
                    count,
                    {name: kind for name, kind in own.items() if name not in fixed_columns()},
                )
            )
        return listed

    def names(self) -> list[str]:
        """Return the names of all views that queries can read."""
        common = [name for group in self._groups for name in (group.alias, group.view) if name]
        return ["records", *dict.fromkeys(common), *(group.name for group in self._groups)]

    def _columns(self, name: str) -> dict[str, str]:
        described: list[tuple[Any, ...]] = self.connection.execute(f"describe {name}").fetchall()
        return {column[0]: column[1] for column in described}


def _grouped(files: Iterable[Path]) -> list[_Group]:
    groups: dict[Partition, _Group] = {}
    for file in files:
        partition = Partition.of_file(file)
        if partition is None:
            raise FormatError(
                f"'{file}' is not in a directory of 'parquet:DIR'",
                hint="its path would end in program=NAME/major=N/minor=N/FILE.parquet",
            )
        groups.setdefault(partition, _Group(partition)).files.append(file)
    return sorted(groups.values(), key=lambda group: (group.partition.program, group.view))


def _reading(group: _Group) -> str:
    """Return the SQL that reads a group's files. In files of older versions, ``time`` itself is in nanoseconds."""
    partition = group.partition
    major, minor = ("null" if code is None else str(code) for code in (partition.major, partition.minor))
    exact = [file for file in group.files if _has_nanoseconds(file)]
    parts = []
    for files, time, own in (
        (exact, f"make_timestamp_ns({TIME_NS})", f"time, {TIME_NS}"),
        ([file for file in group.files if file not in exact], "time", "time"),
    ):
        if files:
            listed = ", ".join(_literal(str(file)) for file in files)
            parts.append(
                f"from read_parquet([{listed}], union_by_name = true, hive_partitioning = false) "
                f"select {time} as time, {_literal(partition.program)} as program, {major}::uinteger as major, "
                f"{minor}::uinteger as minor, * exclude ({own})"
            )
    return " union all by name ".join(parts)


def _has_nanoseconds(file: Path) -> bool:
    """Return True if a file has the column TIME_NS. An unreadable file, whose rows cause an error later, has not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return TIME_NS in pq.read_schema(file).names
    except (OSError, pa.ArrowException):
        return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""').replace("\0", "?") + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
