"""Directories of Parquet files, as DuckDB and pyarrow read them, while writers are killed and disks are full."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.errors import SinkError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.target_kinds import parse_target
from dprobes.tables.parquet_target import ParquetSink
from dprobes.tables.sql_database import Database
from integration.support import TIMEOUT, Builder, Runner, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

for _library in ("pyarrow", "duckdb"):
    pytest.importorskip(_library, reason=f"{_library} is not installed")

PLACE = Place("app", "main")
FILES = {"templates.lst": b"1 t.fmt", "t.fmt": b'major = 1\nminor = 1\nfmt = "number=%qu"\n'}
SOURCE = RecordSource(1, "app", "app", 1, (), FILES)


def batch(first: int, count: int, source: RecordSource = SOURCE, lost: int = 0, size: int = 0) -> Batch:
    numbers = range(first, first + count)
    records = [
        encode_record(LogRecord(major=1, minor=1, time=n, data=struct.pack("<Q", n) + os.urandom(size)))
        for n in numbers
    ]
    return Batch(source, records, [PLACE] * count, 0, lost)


def query(directory: Path, text: str) -> list[tuple[Any, ...]]:
    """Ask DuckDB; {} is all files."""
    import duckdb

    files = f"read_parquet('{directory}/**/*.parquet', hive_partitioning=true, union_by_name=true)"
    return duckdb.execute(text.format(files)).fetchall()


def numbers(directory: Path) -> list[int]:
    """Return the numbers of all records, as pyarrow reads them."""
    import pyarrow.dataset as ds

    found: list[int] = ds.dataset(directory, partitioning="hive").to_table(columns=["number"])["number"].to_pylist()
    return sorted(found)


def hidden(directory: Path) -> list[str]:
    """Return what is not for readers."""
    return sorted(path.name for path in directory.rglob(".*"))


TEMPLATES = """
major = 7
minor = 3
desc = "a tick"
fmt = "n=%u low=%bx missing=%d"
"""

PROGRAM = """
name = "{program}"
major = 7
offset = tick
minor = 3
push r, arg0
log 1
push 0xfe
log b, 1
exit
offset = main
minor = 4
push r, rip
log 1
exit
"""


def test_a_run_writes_what_json_says(run: Runner, build: Builder, tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    directory, templates = tmp_path / "tables", tmp_path / "templates"
    templates.mkdir()
    (templates / "templates.lst").write_text("7 hotloop.fmt\n")
    (templates / "hotloop.fmt").write_text(TEMPLATES)
    program = build("hotloop.c")
    options = ["--log-target", f"parquet:{directory}", "--templates", str(templates)]
    result = run.command(PROGRAM.format(program=program), program, "50", options=options)
    assert len(result.records) == 51
    await_true(lambda: not hidden(directory), "the end of the conversion")
    names = {"name": "process_name", "time": "monotonic"}
    header = ["major", "minor", "cpu", "pid", "tid", "uid", "name", "ip", "sp", "time", "module", "symbol"]
    listed = ", ".join(names.get(name, name) for name in header)
    rows = query(
        directory, f"select {listed}, lower(hex(data)), n, low, missing, problems from {{}} order by monotonic"
    )
    for row, record in zip(rows, result.records, strict=True):
        has_template = record["minor"] == 3  # the fields of the other one are those of its handler
        fields = record["fields"] if has_template else {"n": None, "low": None, "missing": None}
        problems = [{"field": "missing", "problem": "missing", "address": None}] if has_template else None
        assert row == (*(record[name] for name in header), record["data"], *fields.values(), problems)
    assert sorted(row[12 + 1] for row in rows if row[1] == 3) == list(range(50))
    table = ds.dataset(directory, partitioning="hive").to_table()
    assert sorted(table["monotonic"].to_pylist()) == [record["time"] for record in result.records]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tables"


def test_files_appear_when_the_last_program_is_gone(directory: Path) -> None:
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 10))
    sink.flush()
    assert [name.partition("-")[0] for name in hidden(directory)] == [".journal", ".journal"]
    assert not list(directory.glob("program=*"))
    sink.destroy_event(SOURCE)
    sink.close()
    assert hidden(directory) == []
    assert numbers(directory) == list(range(10))
    assert query(directory, "select program, major, minor, count(*) from {} group by all") == [("app", 1, 1, 10)]


def test_files_appear_after_a_while_also_if_nothing_more_comes(directory: Path) -> None:
    sink = ParquetSink(directory, seconds_max=0.05)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 10))
    await_true(lambda: bool(list(directory.rglob("part-*.parquet"))), "a file")
    assert numbers(directory) == list(range(10))
    sink.log_events(batch(10, 1))
    sink.close()
    assert numbers(directory) == list(range(11))


def test_lost_records_are_counted_by_the_next_one(directory: Path) -> None:
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 2, lost=5))
    sink.log_events(batch(2, 2, lost=2**40))
    sink.close()
    assert query(directory, "select number, lost_before from {} order by number") == [
        (0, 5), (1, None), (2, 2**40), (3, None),
    ]  # fmt: skip


def test_a_program_that_changes_its_templates_has_files_of_both_kinds(directory: Path) -> None:
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 2))
    changed = {**FILES, "t.fmt": b'major = 1\nminor = 1\nfmt = "number=%qu rest=%r"\n'}
    other = RecordSource(1, "app", "app", 1, (), changed)
    sink.create_event(other)
    sink.log_events(batch(2, 2, other, size=1))
    sink.close()
    assert len(list(directory.rglob("part-*.parquet"))) == 2
    assert query(directory, "select number, octet_length(rest_2) from {} order by number") == [
        (0, None), (1, None), (2, 1), (3, 1),
    ]  # fmt: skip


def test_hostile_names_of_programs(directory: Path) -> None:
    names = ["../../etc", "a=b/c%d", "123", "bytes\udcff", "__HIVE_DEFAULT_PARTITION__", "x" * 1000]
    sink = ParquetSink(directory)
    for number, name in enumerate(names):
        source = RecordSource(number, name, name, 1)
        sink.create_event(source)
        sink.log_events(batch(number, 1, source))
    sink.close()
    found = [name for (name,) in query(directory, "select program::varchar from {} order by monotonic")]
    assert found[:3] == names[:3]
    assert found[3:5] == ["bytes\\xff", names[4]]
    assert found[5].startswith("x" * 50 + "~")
    assert sorted(path.parent.parent.parent.parent for path in directory.rglob("*.parquet")) == [directory] * 6


WRITER = """
import os, signal, sys
from pathlib import Path
from dprobes.tables.sql_database import Database
from dprobes.tables.parquet_target import ParquetSink
from integration.sinks.test_parquet import SOURCE, batch

sink = ParquetSink(Path(sys.argv[1]))
sink.create_event(SOURCE)
for n in range(0, 5000, 100):
    sink.log_events(batch(n, 100))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_loses_nothing_that_was_taken(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(
        [sys.executable, "-c", WRITER, str(directory)], env=environment, timeout=TIMEOUT, check=False
    )
    assert process.returncode == -signal.SIGKILL
    (journal,) = directory.glob(".journal-*.dpt")
    with journal.open("ab") as file:
        file.write(b"torn")
    place = directory / "program=app" / "major=1" / "minor=1"
    place.mkdir(parents=True)
    (place / f".part-{journal.stem.removeprefix('.journal-')}-1.parquet.tmp").write_bytes(b"half")
    (place / ".part-20200101T000000Z-00000000-1.parquet.tmp").write_bytes(b"of nobody")
    (directory / ".journal-20200101T000000Z-00000000.lock").touch()
    ParquetSink(directory).close()
    assert numbers(directory) == list(range(5000))
    assert hidden(directory) == []


def test_a_killed_conversion_neither_loses_nor_doubles(directory: Path) -> None:
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 50_000))
    sink.destroy_event(SOURCE)
    converter = sink._converter
    assert converter is not None
    await_true(lambda: bool([*directory.rglob(".part-*.tmp"), *directory.rglob("*.parquet")]), "a file")
    converter.kill()
    with contextlib.suppress(SinkError):  # it may have been fast enough
        sink.close()
    ParquetSink(directory).close()
    assert numbers(directory) == list(range(50_000))
    assert hidden(directory) == []


def test_two_writers_share_a_directory(directory: Path) -> None:
    one, other = ParquetSink(directory), ParquetSink(directory)
    for number, sink in enumerate((one, other)):
        sink.create_event(SOURCE)
        sink.log_events(batch(number * 100, 100))
    third = ParquetSink(directory)
    third.close()
    assert not list(directory.rglob("*.parquet"))
    one.close()
    assert numbers(directory) == list(range(100))
    other.close()
    assert numbers(directory) == list(range(200))
    assert hidden(directory) == []


def test_a_damaged_journal_is_kept_and_said_once(directory: Path) -> None:
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 100))
    (journal,) = directory.glob(".journal-*.dpt")
    data = journal.read_bytes()
    with journal.open("r+b") as file:
        file.seek(len(data) - 50)
        file.write(b"\xff" * 20)
    with pytest.raises(SinkError) as caught:
        sink.close()
    (kept,) = directory.glob("damaged-*.dpt")
    assert caught.value.message.startswith("Parquet files could not be made: ")
    assert caught.value.message.endswith(f"; it is kept as '{kept}'")
    assert len(kept.read_bytes()) == len(data)
    assert hidden(directory) == []
    ParquetSink(directory).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with room for a mebibyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True, timeout=TIMEOUT)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=TIMEOUT)


def test_what_a_full_disk_does_not_take_is_not_taken(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 800_000)
    directory = small_disk / "tables"
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    taken = 0
    caught: SinkError | None = None
    while caught is None:
        try:
            sink.log_events(batch(taken, 100, size=500))
            taken += 100
        except SinkError as error:
            caught = error
    assert caught.message.startswith(f"'{directory}/.journal-")
    assert caught.message.endswith(".dpt': no space left on device")
    assert caught.taken == 0
    assert 0 < taken < 500
    with pytest.raises(SinkError, match=r"Parquet files could not be made: .*: no space left on device"):
        sink.close()
    ballast.unlink()
    sink = ParquetSink(directory)
    sink.create_event(SOURCE)
    sink.log_events(batch(taken, 100))
    sink.close()
    assert numbers(directory) == list(range(taken + 100))
    assert hidden(directory) == []


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(name: str) -> tuple[str, str | None]:
        with pytest.raises(SinkError) as caught:
            parse_target(name).open(SinkOptions())
        return caught.value.message, caught.value.hint

    (tmp_path / "file").touch()
    assert error_of("parquet:") == ("log target 'parquet' needs a directory: parquet:DIR", None)
    assert error_of(f"parquet:{tmp_path}/file") == (f"'{tmp_path}/file': file exists", None)
    assert error_of(f"parquet:{tmp_path}/file/x") == (f"'{tmp_path}/file/x': not a directory", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert error_of(f"parquet:{tmp_path}") == (
        "log target 'parquet' needs pyarrow", "pip install 'dprobes[parquet]'",
    )  # fmt: skip
    assert json.dumps(parse_target("parquet:x").text) == '"parquet:x"'


def test_spark_reads_what_is_written(tmp_path: Path) -> None:
    """Its ParquetSchemaConverter refuses a file with one column of a type that it does not know, such as NANOS."""
    import pyarrow.parquet as pq

    sink = ParquetSink(tmp_path)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 2))
    sink.close()
    (file,) = tmp_path.rglob("*.parquet")
    schema = pq.ParquetFile(file).schema
    for column in map(schema.column, range(len(schema))):
        logical = str(column.logical_type)
        assert column.physical_type in ("BOOLEAN", "INT32", "INT64", "BYTE_ARRAY"), column
        assert re.match(r"None|String|Int\(|Timestamp\(.*timeUnit=(micro|milli)seconds", logical), column
        assert re.fullmatch(r"[^ ,;{}()\n\t=]+", column.path), column


def test_files_of_older_versions_are_read_beside_new_ones(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = ParquetSink(tmp_path)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 2))
    sink.close()
    (file,) = tmp_path.rglob("*.parquet")
    table = pq.read_table(file)
    times = table["time_ns"].cast(pa.timestamp("ns"))
    older = table.drop_columns(["time_ns"]).set_column(0, "time", times)
    pq.write_table(older, file.with_name("part-older.parquet"))
    with Database([tmp_path]) as database:
        rows = database.connection.execute("select epoch_ns(time), count(*) from records group by 1 order by 1")
        assert rows.fetchall() == [(each, 2) for each in table["time_ns"].to_pylist()]


def test_a_file_says_that_its_times_are_utc_and_duckdb_can_calculate_with_them(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    before = time.time_ns() - time.monotonic_ns()
    sink = ParquetSink(tmp_path)
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 2))
    sink.log_events(batch(5_000_000_007, 1))
    sink.close()
    (file,) = tmp_path.rglob("*.parquet")
    said = query(tmp_path, f"select decode(value) from parquet_kv_metadata('{file}') where decode(key) = 'dprobes'")
    assert json.loads(said[0][0])["time_zone"] == "UTC"
    column = pc.assume_timezone(pq.read_table(file, columns=["time"])["time"], "UTC")
    assert column.type == pa.timestamp("us", "UTC")
    first, second, third = pq.read_table(file, columns=["time_ns"])["time_ns"].to_pylist()
    assert column.cast(pa.int64()).to_pylist() == [each // 1000 for each in (first, second, third)]
    assert (second - first, third - first) == (1, 5_000_000_007)
    assert abs(first - before) < 10**9
    assert query(tmp_path, "select time_ns from {} order by 1") == [(first,), (second,), (third,)]
    with Database([tmp_path]) as database:
        rows = database.connection.execute("select epoch_ns(time) from records order by 1").fetchall()
        assert rows == [(first,), (second,), (third,)]
        assert "time_ns" not in database.tables()[1].columns
    ((took, buckets, earlier),) = query(
        tmp_path,
        "select epoch_us(max(time) - min(time)), count(distinct time_bucket(interval 1 second, time)),"
        " epoch_us(min(time) - interval 1 hour) from {}",
    )
    assert took == 5_000_000
    assert buckets >= 2
    assert abs(earlier - (first // 1000 - 3_600_000_000)) <= 1
