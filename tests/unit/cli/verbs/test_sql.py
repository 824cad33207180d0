"""The verb ``sql``: which tables there are, what queries print, and what they cannot do."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dprobes.cli.main import run
from dprobes.record.log_record import LogRecord, encode_record
from integration.support import await_true
from support.trace_files import header, lost, places, program, records

for _library in ("pyarrow", "duckdb"):
    pytest.importorskip(_library, reason=f"{_library} is not installed")

SECOND = 10**9
NOON = 1_763_812_800 * SECOND
"""2025-11-22 12:00:00 in UTC."""

TEMPLATES = {
    "templates.lst": "1 t.fmt\n",
    "t.fmt": 'major = 1\nminor = 1\ndesc = "a read"\nfmt = "fd=%d count=%u"\nminor = 2\nfmt = "path=%*s pid=%d"\n',
}


def record(minor: int, seconds: float, data: bytes = b"", **items: int | str) -> bytes:
    made = LogRecord(major=1, minor=minor, time=int(seconds * SECOND), data=data, **items)  # type: ignore[arg-type] # items
    return encode_record(made)


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of two programs: three with a template, one of them a fault, and three lost ones."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.dpt"
    path.write_bytes(
        header(wall_offset=NOON)
        + program(1, "service", module="/usr/bin/service", templates=TEMPLATES)
        + places(1, ("main", "", None), ("wr*", "write_file", 0x1234))
        + records(1, (0, record(1, 0.000000001, words(3, 100), pid=42, process_name="a\x1b[31m\n")))
        + lost(1, 3, time=2 * SECOND)
        + records(
            1,
            (1, record(1, 1, words(-1, 2**62), pid=43)),
            (0, record(2, 2, b"\x01\x04\x00/etc" + words(7), pid=42)),
            (0, record(2, 3, b"\xff\x08\x00" + words(16), pid=42)),
        )
        + program(2, "libc", module="/lib/libc.so.6")
        + records(2, (0, record(1, 4, b"\x01\x02\x00ab", pid=44)))
    )
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Return what the verb prints, errors if it is to fail."""
    assert run(["sql", *arguments]) == status
    out, err = capsys.readouterr()
    assert (err == "") == (status == 0)
    return err if status else out


ALL = """\
time                           program  major  minor  pid  symbol        function    placed  lost_before
2025-11-22 12:00:00.000000001  service      1      1   42  main          main          NULL         NULL
2025-11-22 12:00:01.000000000  service      1      1   43  wr*           write_file    4660            3
2025-11-22 12:00:02.000000000  service      1      2   42  main          main          NULL         NULL
2025-11-22 12:00:03.000000000  service      1      2   42  main          main          NULL         NULL
2025-11-22 12:00:04.000000000  libc         1      1   44  probepoint 0  NULL          NULL         NULL
"""

FIELDS = """\
pid  path  pid_2  problems
 42  /etc      7  NULL
 42  NULL   NULL  [{"field": "path", "problem": "fault", "address": 16}, {"field": "pid_2", "problem": "missing", \
"address": null}]
"""


def test_the_table_of_all_records(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = "time, program, major, minor, pid, symbol, function, placed, lost_before"
    assert output(capsys, "trace.dpt", f"select {columns} from records order by time") == ALL
    assert output(capsys, "trace.dpt", "select module, data from records order by time limit 1") == (
        "module            data\n/usr/bin/service  03000000000000006400000000000000\n"
    )


def test_fields_of_templates_are_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "trace.dpt", "select pid, path, pid_2, problems from m1_2 order by time") == FIELDS
    query = "select sum(fd) as s, max(count) as m, avg(fd) as a from service.m1_1"
    assert output(capsys, "trace.dpt", query) == "s                    m    a\n2  4611686018427387904  1.0\n"


def test_a_code_of_several_programs_is_all_of_theirs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        output(capsys, "trace.dpt", "select program, fd, items from m1_1 order by time")
        == """\
program    fd  items
service     3  NULL
service    -1  NULL
libc     NULL  [{"type": "string", "text": "ab"}]
"""
    )


def test_csv_and_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select time, process_name as name, fd, data, problems, [fd] as name from service.m1_1 order by time"
    assert output(capsys, "--csv", "trace.dpt", query) == (
        "time,name,fd,data,problems,name\n"
        "2025-11-22 12:00:00.000000001,a\\x1b[31m\\n,3,03000000000000006400000000000000,,[3]\n"
        "2025-11-22 12:00:01.000000000,,-1,ffffffffffffffff0000000000000040,,[-1]\n"
    )
    assert [json.loads(line) for line in output(capsys, "--json", "trace.dpt", query).splitlines()] == [
        {"time": "2025-11-22 12:00:00.000000001", "name": "a\\x1b[31m\\n", "fd": 3,
         "data": "03000000000000006400000000000000", "problems": None, "name_2": [3]},
        {"time": "2025-11-22 12:00:01.000000000", "name": None, "fd": -1,
         "data": "ffffffffffffffff0000000000000040", "problems": None, "name_2": [-1]},
    ]  # fmt: skip


def test_values_of_all_kinds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = (
        "select 18446744073709551615::ubigint as u, true as b, null as n, 1.5::decimal(9, 2) as d, 'nan'::float as f, "
        "interval 40 day as i, sum(fd) as h, {'t': min(time)} as s, date '2025-01-02' as day, 'x'::blob as x from m1_1"
    )
    assert (
        output(capsys, "trace.dpt", query)
        == """\
                   u  b     n       d    f  i        h  s                                       day         x
18446744073709551615  true  NULL  1.5  nan  40 days  2  {"t": "2025-11-22 12:00:00.000000001"}  2025-01-02  78
"""
    )


def test_what_is_printed_does_not_disturb_a_terminal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        output(capsys, "trace.dpt", 'select process_name, 1 as "a\x1b" from m1_1 order by time limit 1')
        == """\
process_name  a\\x1b
a\\x1b[31m\\n       1
"""
    )


def test_the_list_of_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = output(capsys, "--list", "trace.dpt").splitlines()
    assert listed[:6] == [
        "table           rows  program  description",
        "records            5",
        '"libc".m1_1        1  libc',
        '"service".m1_1     2  service  a read',
        "m1_2               2  service",
        "",
    ]
    assert [line.split(maxsplit=2) for line in listed[6:] if "records" not in line] == [
        ["table", "column", "type"],
        ['"libc".m1_1', "items", 'STRUCT("type" VARCHAR, "text" VARCHAR)[]'],
        ['"service".m1_1', "fd", "BIGINT"],
        ['"service".m1_1', "count", "UBIGINT"],
        ['"service".m1_1', "problems", "STRUCT(field VARCHAR, problem VARCHAR, address UBIGINT)[]"],
        ['"service".m1_1', "rest", "BLOB"],
        ["m1_2", "path", "VARCHAR"],
        ["m1_2", "pid_2", "BIGINT"],
        ["m1_2", "problems", "STRUCT(field VARCHAR, problem VARCHAR, address UBIGINT)[]"],
        ["m1_2", "rest", "BLOB"],
        [],
    ]
    tables = [json.loads(line) for line in output(capsys, "--list", "--json", "trace.dpt").splitlines()]
    assert [(table["table"], table["rows"], table["desc"]) for table in tables] == [
        ("records", 5, ""), ('"libc".m1_1', 1, ""), ('"service".m1_1', 2, "a read"), ("m1_2", 2, ""),
    ]  # fmt: skip
    for table in tables:
        assert output(capsys, "trace.dpt", f"select count(*) as n from {table['table']}") == f"n\n{table['rows']}\n"


WRONG = (
    ("selec 1", """query:1:1: error: syntax error at or near "selec"
    selec 1
    ^~~~~
"""),
    ("select 1 as ä,\n nocol from m1_1", """query:2:2: error: referenced column "nocol" not found in FROM clause
     nocol from m1_1
     ^~~~~
"""),
    ("select cuont from m1_1", """query:1:8: error: referenced column "cuont" not found in FROM clause
    select cuont from m1_1
           ^~~~~
hint: did you mean 'count'?
"""),
    ("select * from recods", """query:1:15: error: there is no table 'recods'
    select * from recods
                  ^~~~~~
hint: did you mean 'records'?
"""),
    ("select 'x' + fd from m1_1", """query:1:8: error: could not convert string 'x' to INT64
    select 'x' + fd from m1_1
           ^~~
"""),
    ("/* nothing */", "error: there is no query\n"),
    ("select 1; select 2", """query:1:11: error: expected one query, found 2
    select 1; select 2
              ^~~~~~~~
"""),
)  # fmt: skip


@pytest.mark.parametrize(("query", "said"), WRONG)
def test_what_is_wrong_is_shown_in_the_query(
    trace: Path, capsys: pytest.CaptureFixture[str], query: str, said: str
) -> None:
    shown = output(capsys, "trace.dpt", query, status=2)
    # Where a hint is DuckDB's own idea, it depends on its version.
    assert shown == said or (shown.startswith(said) and "hint" not in said)


@pytest.mark.parametrize(
    "query",
    [
        "copy records to 'x.csv'",
        "explain analyze copy records to 'x.csv'",
        "/* */ explain analyze copy records to 'x.csv'",
        "create table x as select 1",
        "attach 'x.db'",
        "install json",
        "set threads = 1",
        "set enable_external_access = true",
        "export database 'x'",
        "import database 'x'",
        "drop view records",
        "insert into records values (1)",
        "pragma enable_profiling",
        "call pragma_version()",
    ],
)
def test_a_query_only_reads(trace: Path, capsys: pytest.CaptureFixture[str], query: str) -> None:
    before = sorted(trace.parent.iterdir())
    said = output(capsys, "trace.dpt", query, status=2)
    assert "is not for reading records" in said
    assert sorted(trace.parent.iterdir()) == before


@pytest.mark.parametrize(
    "source",
    ["read_text('/etc/hostname')", "read_csv('/etc/passwd')", "glob('/etc/*')", "read_parquet('/tmp/x.parquet')",
     "read_text('trace.dpt')", "read_text('https://localhost/')"],
)  # fmt: skip
def test_a_query_reads_nothing_else(trace: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    said = output(capsys, "trace.dpt", f"select * from {source}", status=2)
    assert "file system operations are disabled by configuration" in said
    assert output(capsys, "trace.dpt", "select * from '/etc/passwd'", status=2) == (
        "query:1:15: error: there is no table '/etc/passwd'\n    select * from '/etc/passwd'\n"
        "                  ^~~~~~~~~~~~~\nhint: 'dprobes sql --list' lists them\n"
    )


def test_a_query_may_be_longer_than_the_name_of_a_file(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = f"select pid from records where pid in ({', '.join(map(str, range(44, 1044)))})"
    assert output(capsys, str(trace), "--csv", query) == "pid\n44\n"


def test_names_of_our_own_are_no_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("reader", "tables", "relation", "words"):
        assert f"there is no table '{name}'" in output(capsys, "trace.dpt", f"select * from {name}", status=2)


def test_questions_that_are_no_select(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "trace.dpt", "from m1_2 select count(*) as n") == "n\n2\n"
    assert output(capsys, "trace.dpt", "with x as (values (1)) from x").splitlines() == ["col0", "   1"]
    assert output(capsys, "trace.dpt", "show tables") == "name\nm1_1\nm1_2\nrecords\n"
    assert "path" in output(capsys, "trace.dpt", "describe m1_2")
    assert "READ_PARQUET" in output(capsys, "trace.dpt", "explain analyze select path from m1_2")


def test_hostile_names_of_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ['a"; drop view records; --', "main", "it's", "../../x", "A", "a", "\x1b"]
    path = tmp_path / "x.dpt"
    content = header()
    for number, name in enumerate(names):
        content += program(number, name) + records(number, (0, record(number, number)))
    path.write_bytes(content)
    query = "select program from records order by minor"
    lines = output(capsys, "--json", str(path), query).splitlines()
    assert [json.loads(line)["program"] for line in lines] == [*names[:-1], r"\x1b"]
    listed = [json.loads(line)["table"] for line in output(capsys, "--list", "--json", str(path)).splitlines()]
    assert sorted(listed) == ["m1_0", "m1_1", "m1_2", "m1_3", "m1_4", "m1_5", "m1_6", "records"]
    assert output(
        capsys, str(path), 'select minor from main_2.m1_1 union all (select minor from "a_2".m1_5)'
    ).splitlines() == [
        "minor",
        "    1",
        "    5",
    ]


def test_trace_files_and_directories_are_alike(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dprobes.tables.parquet_files import convert

    directory = tmp_path / "ta[b]*les"
    directory.mkdir()
    query = "select * from records order by time"
    expected = output(capsys, "trace.dpt", query)
    (directory / ".journal-1.dpt").write_bytes(trace.read_bytes())
    assert output(capsys, str(directory), query) == expected
    convert(directory / ".journal-1.dpt", directory, "1")
    assert output(capsys, str(directory), query) == expected
    files = sorted(map(str, directory.rglob("*.parquet")))
    assert len(files) == 3
    assert output(capsys, *files, query) == expected
    assert output(capsys, str(directory), "trace.dpt", "select count(*) as n from m1_2") == "n\n4\n"
    with contextlib.chdir(directory):
        assert output(capsys, ".", query) == expected


def test_the_older_part_of_a_file_belongs_to_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.with_name("trace.dpt.1").write_bytes(trace.read_bytes())
    assert output(capsys, "trace.dpt", "select count(*) as n from records") == " n\n10\n"
    assert output(capsys, "trace.dpt", "trace.dpt.1", "select count(*) as n from records") == " n\n10\n"


def test_a_file_without_records_has_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.dpt").write_bytes(header())
    assert output(capsys, str(tmp_path / "x.dpt"), "select time, pid from records") == "time  pid\n"
    assert output(capsys, str(tmp_path / "x.dpt"), "select count(ip) as n from records") == "n\n0\n"


def test_records_lost_at_the_end_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.dpt").write_bytes(header() + program(1, "app") + lost(1, 3, time=1))
    assert run(["sql", str(tmp_path / "x.dpt"), "select count(*) as n from records"]) == 0
    assert capsys.readouterr() == ("n\n0\n", "dprobes: warning: 3 records of 'app' were lost after the last one\n")


def test_errors_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("x.parquet").touch()
    Path("bad.dpt").write_bytes(b"no trace file" * 10)
    place = Path("program=a/major=1/minor=1")
    place.mkdir(parents=True)
    (place / "x.parquet").write_bytes(b"PAR1 but no more PAR1")
    assert output(capsys, "nosuch", "select 1", status=1) == "dprobes: error: 'nosuch': no such file or directory\n"
    assert output(capsys, "empty", "select 1", status=1) == (
        "dprobes: error: 'empty' has no tables of records\nhint: '--log-target parquet:DIR' writes them\n"
    ).replace("'empty'", f"'{tmp_path}/empty'")
    assert output(capsys, "x.parquet", "select 1", status=1) == (
        f"dprobes: error: '{tmp_path}/x.parquet' is not in a directory of 'parquet:DIR'\n"
        "hint: its path would end in program=NAME/major=N/minor=N/FILE.parquet\n"
    )
    assert "'bad.dpt' is not a trace file, or is damaged" in output(capsys, "bad.dpt", "select 1", status=1)
    assert output(capsys, ".", "select 1", status=1).startswith(
        f"dprobes: error: a file of '{tmp_path}/{place}' cannot be read: "
    )
    assert "there is no query" in output(capsys, status=2)
    assert "the query comes last, but 'bad.dpt' is a file" in output(capsys, "bad.dpt", status=2)
    assert "exclude each other" in output(capsys, "--csv", "--json", "bad.dpt", "select 1", status=2)


def at_terminal(columns: int, *arguments: str) -> str:
    """Return what the verb prints at a terminal of so many columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-m", "dprobes", "sql", *arguments], stdout=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end
            while data := os.read(ours, 4096):
                shown += data
    os.close(ours)
    assert process.returncode == 0
    return re.sub(r"\x1b\[\d*m", "", shown.decode()).replace("\r\n", "\n")


def test_at_a_terminal_a_table_or_blocks_where_it_is_too_narrow(trace: Path) -> None:
    query = "select pid, path, pid_2 from m1_2 order by time"
    lines = [line.strip() for line in at_terminal(80, str(trace), query).splitlines()]
    assert [" ".join(line.split()) for line in lines if "pid" in line or "42" in line] == [
        "pid path pid_2", "42 /etc 7", "42 NULL NULL",
    ]  # fmt: skip
    blocks = at_terminal(12, str(trace), query)
    assert "row 1" in blocks
    assert "  pid    42\n  path   /etc\n  pid_2  7\n" in blocks


def threads_of(pid: int) -> list[str]:
    return [task.name for task in Path(f"/proc/{pid}/task").iterdir()]


def test_an_interrupted_query_leaves_nothing_behind(trace: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    query = "select count(*) from range(1000000000) a, range(1000000000) b where a.range * b.range = 3"
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "dprobes", "sql", str(trace), query],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_true(lambda: len(threads_of(process.pid)) > 1, "threads of DuckDB")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err.strip()) == (130, "", "")
    assert list(temporary.iterdir()) == []
