"""What a record lacks has a mark in its place in all outputs: what cannot be read, what was cut, what had no room."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from integration.sinks.journald import Journald
from integration.support import TIMEOUT, await_true, environment
from support.babeltrace import NEEDS_BABELTRACE, read_trace
from support.perfetto_messages import read_perfetto

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.sinks.collector import Collector
    from integration.support import Builder

for _library in ("pyarrow", "duckdb", "opentelemetry.exporter.otlp.proto.http"):
    pytest.importorskip(_library, reason=f"{_library} is not installed")

pytestmark = NEEDS_BABELTRACE
ENGINES = [
    "ptrace",
    "inline",
    pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")),
]

FULL = """
name = absent
logmax = 12
offset = given
minor = 1
    push 64
    push r, arg0
    log str
    push r, arg2
    log 1
    push 7
    log b, 1
    exit
"""
"""The log of this handler has room for "first", and for nothing behind it, though the last number is short."""

FAULTY = 'absent:given(char *first, char *second, long number) { printf("%s %s %d", first, second, number); }'
CUT = "x" * 200 + "…"


class Outputs(NamedTuple):
    """What a run has given each output, one element for each record."""

    json: list[dict[str, Any]]
    csv: list[dict[str, str]]
    text: list[str]
    rows: list[dict[str, Any]]
    asked: list[dict[str, Any]]
    ctf: list[str]
    perfetto: list[dict[str, Any]]
    otlp: list[dict[str, Any]]
    syslog: list[str]
    journal: list[dict[str, Any]]


@pytest.fixture
def journald() -> Iterator[Journald]:
    made = Journald()
    yield made
    made.close()


def dprobes(*arguments: object) -> str:
    command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def outputs_of(
    arguments: list[str], program: Path, engine: str, directory: Path, collector: Collector, journald: Journald
) -> Outputs:
    from pyarrow import parquet

    trace = directory / "a.dpt"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(directory / "log"))
        server.settimeout(TIMEOUT)
        targets = [f"{kind}:{directory / kind}" for kind in ("ctf", "perfetto", "parquet")]
        targets += [f"otlp:http://127.0.0.1:{collector.port}", f"syslog:unix://{directory / 'log'}", f"file:{trace}"]
        options = [option for each in (*targets, f"journal:{journald.socket}") for option in ("--log-target", each)]
        dprobes("run", *arguments, "--engine", engine, *options, "--", program)
        syslog = [server.recv(1 << 16).decode() for _ in range(3)]
    await_true(lambda: len(collector.records) == 3, "all records at the collector")
    (file,) = (directory / "parquet").rglob("*.parquet")
    (table,) = {line["name"] for line in _lines(dprobes("sql", trace, "--json", "show tables"))} - {"records"}
    return Outputs(
        _lines(dprobes("log", trace, "--format", "json")),
        list(csv.DictReader(dprobes("log", trace, "--format", "csv").splitlines())),
        dprobes("log", trace).splitlines(),
        parquet.read_table(file).to_pylist(),
        _lines(dprobes("sql", trace, "--json", f"select * from {table} order by monotonic")),
        read_trace(directory / "ctf"),
        [event.arguments for event in read_perfetto(directory / "perfetto").events],
        [record["attributes"] for record in collector.records],
        syslog,
        journald.await_entries(3, "SYSLOG_IDENTIFIER=dprobes"),
    )


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_had_no_room_is_marked_in_every_output(
    build: Builder, tmp_path: Path, short_path: Path, engine: str, collector: Collector, journald: Journald
) -> None:
    source = tmp_path / "full.rpn"
    source.write_text(FULL)
    found = outputs_of([str(source)], build("absent.c"), engine, short_path, collector, journald)

    texts = ["arg0=<fault at 0x8>", 'arg0="…" arg2=… value=…', 'arg0="first" arg2=… value=…']
    assert [line.partition("  given  ")[2] for line in found.text[1:]] == texts[1:]
    assert [each["text"] for each in found.csv[1:]] == texts[1:]
    absent = {"arg0": None, "arg2": None, "value": None}
    assert [line["fields"] for line in found.json[1:]] == [absent, {**absent, "arg0": "first"}]
    assert [line["cut"] for line in found.json[1:]] == [True, True]
    missing = [{"field": name, "problem": "cut", "address": None} for name in absent]
    for rows in (found.rows, found.asked):
        assert [{name: row[name] for name in absent} for row in rows[1:]] == [absent, {**absent, "arg0": "first"}]
        assert [row["problems"] for row in rows[1:]] == [missing, missing[1:]]
    assert [line.rpartition(", { ")[2] for line in found.ctf[1:]] == ['cut = "…" }', 'arg0 = "first", cut = "…" }']
    assert [each["cut"] for each in found.perfetto[1:]] == [("string", "…")] * 2
    assert [each["dprobes.cut"] for each in found.otlp[1:]] == [True, True]
    assert "dprobes.field.arg2" not in found.otlp[1]
    assert all(' cut="1"]' in each for each in found.syslog[1:])
    assert [each["DPROBES_CUT"] for each in found.journal[1:]] == ["1", "1"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_cut_or_cannot_be_read_keeps_its_place_in_every_output(
    build: Builder, short_path: Path, engine: str, collector: Collector, journald: Journald
) -> None:
    found = outputs_of(["-e", FAULTY], build("absent.c"), engine, short_path, collector, journald)

    texts = ["<fault at 0x8> second 3", f"{CUT} second 0", "first  1"]
    assert [line.partition("]  ")[2] for line in found.text] == texts
    assert [each["text"] for each in found.csv] == texts
    firsts = [{"fault": "0x8"}, CUT, "first"]
    others = [("second", 3), ("second", 0), ("", 1)]
    assert [tuple(line["fields"].values()) for line in found.json] == [
        (first, *other) for first, other in zip(firsts, others, strict=True)
    ]
    problems = [[{"field": "first", "problem": "fault", "address": 8}], None, None]
    for rows in (found.rows, found.asked):
        assert [row["first"] for row in rows] == [None, CUT, "first"]
        assert [(row["second"], row["number"]) for row in rows] == others
        assert [row["problems"] for row in rows] == problems
    assert [re.sub("x+…", "x…", line.rpartition(", { ")[2]) for line in found.ctf] == [
        'first_fault = 0x8, second = "second", number = 3 }',
        'first = "x…", second = "second", number = 0 }',
        'first = "first", second = "", number = 1 }',
    ]
    assert [each.get("first") for each in found.perfetto] == [None, ("string", CUT), ("string", "first")]
    assert found.perfetto[0]["first_fault"] == ("pointer", 8)
    assert [each["dprobes.field.first"] for each in found.otlp] == ["<fault at 0x8>", CUT, "first"]
    assert [re.sub("x+…", "x…", each.partition("[fields@32473 ")[2].partition("]")[0]) for each in found.syslog] == [
        'first="<fault at 0x8>" second="second" number="3"',
        'first="x…" second="second" number="0"',
        'first="first" second="" number="1"',
    ]
    assert [each["DPROBES_FIELD_FIRST"] for each in found.journal] == ["<fault at 0x8>", CUT, "first"]
