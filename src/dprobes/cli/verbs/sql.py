"""The verb ``sql``: SQL queries of the records in trace files and Parquet files."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_line, print_lines, print_table
from dprobes.cli.output.record_printer import DamageReport, skip_damaged_option
from dprobes.escapes import json_text
from dprobes.tables.sql_database import error_of, query_error

if TYPE_CHECKING:
    from collections.abc import Callable

    import duckdb

    from dprobes.sets.set_library import SetQuery
    from dprobes.tables.sql_database import Database, TableInfo

__all__ = ["sql_command"]

_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(?P<query>.*)", re.IGNORECASE | re.DOTALL)

_PATIENCE = 1.0
"""Seconds to wait until an interrupted query ends."""


@click.command("sql")
@click.argument("words", nargs=-1, metavar="[FILE ...] 'SELECT ...'")
@click.option("--list", "lists", is_flag=True, help="Print the tables and their columns instead of a query's result.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON lines.")
@skip_damaged_option()
def sql_command(words: tuple[str, ...], lists: bool, as_csv: bool, as_json: bool, skip_damaged: bool) -> int:
    """
    Query records in SQL (DuckDB's dialect).

    FILE is a trace file, a directory of the log target parquet:DIR, or a Parquet file in such a directory; the default
    is the manager's trace file. The table 'records' has the columns that all records have. The table 'm1_2' has the
    records of major code 1 and minor code 2, with the fields of their template. The records of an instrumentation set
    are also in tables with the names of its probes, such as 'sqlite_statement_step'. --list prints all tables.

    The query may be a view of a set: 'dprobes sql FILE SET/VIEW'.

    A query can read only these files, and cannot write.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    names, query = (words, "") if lists else (words[:-1], words[-1] if words else "")
    if not lists and not query.strip():
        raise click.UsageError("there is no query: dprobes sql FILE 'select * from records'")
    if not lists:
        _check_no_file(query)
    view = None if lists else _query_of_view(query)
    if view is not None:
        query = view.sql
    from dprobes.tables.sql_database import Database

    report = DamageReport()
    progress = Progress.of_command()
    progress.begin("reading the records")
    with Database(_paths(names), report if skip_damaged else None, _warn_of_loss) as database:
        progress.end()
        report.finish()
        if lists:
            _print_list(database.tables(), as_json=as_json)
            return 0
        there = database.names()
        for probe in () if view is None else view.probes:
            from dprobes.sets.set_library import table_of

            if table_of(probe) not in there:
                console.note(f"there is no record of '{probe}'", "its set was not recorded, or had no such event")
                return 0
        return _interruptible(database, lambda: _answer(database, query, as_csv=as_csv, as_json=as_json))


def _check_no_file(query: str) -> None:
    """Raise a usage error if a query is the path of a file."""
    if not os.path.exists(query):  # noqa: PTH110 - Path.exists() fails for a query that is too long for a path
        return
    from dprobes.sets.set_library import is_view

    if is_view(query):
        message = f"'{query}' is a file and a view of an instrumentation set; write '{query}:' for the view"
        raise click.UsageError(f"{message}, or a query after the file")
    raise click.UsageError(f"the query comes last, but '{query}' is a file; --list prints its tables")


def _query_of_view(word: str) -> SetQuery | None:
    from dprobes.sets.set_library import query_of

    return query_of(word) if "/" in word else None


def _warn_of_loss(program: str, count: int) -> None:
    console.warning(f"{count} records of '{program}' were lost after the last one")


def _interruptible(database: Database, answer: Callable[[], int]) -> int:
    """
    Call ``answer``, which executes a query, in another thread, and return its result.

    Python cannot handle Ctrl-C while a query runs in the main thread. DuckDB does not end every query at once when it
    is interrupted, so the wait is limited.
    """
    results: list[int | BaseException] = []

    def work() -> None:
        try:
            results.append(answer())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            results.append(error)

    worker = threading.Thread(target=work, name="query", daemon=True)
    worker.start()
    try:
        worker.join()
    except KeyboardInterrupt:
        database.connection.interrupt()
        worker.join(_PATIENCE)
        if worker.is_alive():
            database.remove_files()
            os._exit(130)
        raise
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result


def _paths(names: tuple[str, ...]) -> list[Path]:
    from dprobes.errors import FormatError

    if names:
        paths = [Path(name) for name in dict.fromkeys(names)]
        for path in paths:
            if not path.exists():
                raise FormatError(f"'{path}': no such file or directory")
        return paths
    from dprobes.manager.manager_files import manager_paths

    trace = manager_paths().trace
    if not trace.exists():
        raise FormatError(f"'{trace}': nothing has been recorded", hint="name a file: dprobes sql FILE 'select …'")
    return [trace]


def _answer(database: Database, query: str, *, as_csv: bool, as_json: bool) -> int:
    import duckdb

    from dprobes.cli.output import query_rows

    connection = database.connection
    try:
        statement = _checked(connection, query)
        if statement.type == duckdb.StatementType.EXPLAIN:
            for _, text in connection.execute(statement).fetchall():
                print_lines(str(text).rstrip().splitlines())
            return 0
        relation = connection.sql(query)
        assert relation is not None
        reader = relation.to_arrow_reader(query_rows.ROWS)
        if as_csv:
            query_rows.print_csv(reader)
        elif as_json:
            query_rows.print_json(reader)
        elif left_out := query_rows.print_table(reader):
            console.note(f"{left_out} more rows are not shown", "--csv and --json print all, and so does a pipe")
    except duckdb.Error as error:
        raise error_of(query, _with_place(connection, query, error), database.names()) from None
    return 0


def _with_place(connection: duckdb.DuckDBPyConnection, query: str, error: duckdb.Error) -> duckdb.Error:
    """Return the error with its place in the query, which DuckDB provides only when the query is executed."""
    import duckdb

    if "{" not in str(error):
        try:
            connection.execute(query)
        except duckdb.Error as again:
            return again
    return error


def _checked(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
    """Return the parsed statement of a query; raise ``SourceError`` unless it is a single statement that only reads."""
    import duckdb

    statements = connection.extract_statements(query)
    if not statements:
        raise query_error(query, "there is no query")
    if len(statements) > 1:
        first = statements[0].query  # includes the following blanks or not, depending on the version of DuckDB
        start = len(query) - len(query[len(first) :].lstrip())
        raise query_error(query, f"expected one query, found {len(statements)}", (start, len(query)))
    (statement,) = statements
    kind = statement.type
    if kind == duckdb.StatementType.EXPLAIN and (match := _EXPLAIN.match(query)):
        inner = connection.extract_statements(match["query"])
        kind = inner[0].type if inner else kind
    if kind != duckdb.StatementType.SELECT:
        words = query.split()
        raise query_error(
            query,
            f"'{words[0].lower()}' is not for reading records",
            _place_of(query, words[0]),
            "queries begin with select, from, with, values, describe, summarize, show or explain",
        )
    return statement


def _place_of(query: str, word: str) -> tuple[int, int]:
    start = query.index(word)
    return start, start + len(word)


def _print_list(tables: list[TableInfo], *, as_json: bool) -> None:
    if as_json:
        for table in tables:
            said = {"table": table.name, "program": table.program, "desc": table.desc, "rows": table.rows}
            click.echo(json_text({**said, "columns": table.columns}))
        return
    print_table(
        ("table", "rows", "program", "description"),
        [(table.name, str(table.rows), table.program, table.desc) for table in tables],
    )
    print_line()
    rows = [(table.name, name, kind) for table in tables for name, kind in table.columns.items()]
    print_table(("table", "column", "type"), rows)
    if len(tables) > 1:
        print_line()
        print_line("All tables have the columns of 'records'.")
