"""All outputs name addresses alike: what a template prints by name, call stacks, and where a watchpoint hit."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

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

pytestmark = [pytest.mark.usefixtures("debug_registers"), NEEDS_BABELTRACE]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
ENGINES = ["ptrace", pytest.param("ebpf", marks=needs_root)]

SOURCE = """
name = watched
major = 1
logmax = 1024
offset = get
    minor = 1
    push r, rip
    log 1
    log ustack, 2
    exit
address = cell:cell+7
watchpoint = w
    minor = 2
    push 7
    log 1
    exit
"""
PLACE, CALLER = "get [watched]", r"work\+0x[0-9a-f]+ \[watched\]"
CALLS = 4


@pytest.fixture
def syslog(short_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    path = short_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        server.settimeout(TIMEOUT)
        yield path, server


def dprobes(*arguments: object) -> str:
    command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_stack(names: list[str]) -> bool:
    return len(names) == 2 and names[0] == PLACE and re.fullmatch(CALLER, names[1]) is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_every_output_has_the_names(
    build: Builder, tmp_path: Path, engine: str, collector: Collector, syslog: tuple[Path, socket.socket]
) -> None:
    program, text, trace = build("watched.c"), tmp_path / "a.rpn", tmp_path / "a.dpt"
    text.write_text(SOURCE)
    path, server = syslog
    targets = [f"ctf:{tmp_path / 'ctf'}", f"perfetto:{tmp_path / 'perfetto'}", f"parquet:{tmp_path / 'parquet'}"]
    targets += [f"otlp:http://127.0.0.1:{collector.port}", f"syslog:unix://{path}", f"file:{trace}"]
    options = [option for target in targets for option in ("--log-target", target)]
    # The program ends with its last access; its names are known all the same.
    dprobes("run", text, "--engine", engine, *options, "--", program, "threads", CALLS, 1)

    lines = [json.loads(line) for line in dprobes("log", trace, "--format", "json").splitlines()]
    calls, writes = ([line for line in lines if line["minor"] == minor] for minor in (1, 2))
    assert (len(calls), len(writes)) == (CALLS, CALLS)
    assert {line["fields"]["rip"]["name"] for line in calls} == {PLACE}
    assert all(is_stack([frame["name"] for frame in line["fields"]["stack"][:2]]) for line in calls)
    assert {line["function"] for line in writes} == {"put"}
    rows = csv.DictReader(dprobes("log", trace, "--format", "csv").splitlines())
    assert {row["function"] for row in rows if row["minor"] == "2"} == {"put"}

    for source in (trace, tmp_path / "parquet"):
        _check_sql(source)
    _check_ctf(read_trace(tmp_path / "ctf"))
    _check_perfetto([event.arguments for event in read_perfetto(tmp_path / "perfetto").events])
    await_true(lambda: len(collector.records) == 2 * CALLS, "all records at the collector")
    _check_otlp([record["attributes"] for record in collector.records])
    _check_syslog([server.recv(1 << 16).decode() for _ in range(2 * CALLS)])


def _check_sql(source: Path) -> None:
    asked = dprobes("sql", source, "--json", "select rip_name, stack_names from m1_1")
    rows = [json.loads(line) for line in asked.splitlines()]
    assert [row["rip_name"] for row in rows] == [PLACE] * CALLS
    assert all(is_stack(row["stack_names"][:2]) for row in rows)
    functions = dprobes("sql", source, "--json", "select distinct function from m1_2").splitlines()
    assert [json.loads(line) for line in functions] == [{"function": "put"}]


def _check_ctf(lines: list[str]) -> None:
    calls, writes = ([line for line in lines if f"minor = {minor}," in line] for minor in (1, 2))
    assert (len(calls), len(writes)) == (CALLS, CALLS)
    assert all(f'rip_name = "{PLACE}"' in line for line in calls)
    assert all(re.search(rf'stack_names = \[ \[0\] = "get \[watched\]", \[1\] = "{CALLER}"', line) for line in calls)
    assert all('function = "put" }' in line for line in writes)


def _check_perfetto(found: list[dict[str, Any]]) -> None:
    calls, writes = ([each for each in found if each["record"]["minor"][1] == minor] for minor in (1, 2))
    assert (len(calls), len(writes)) == (CALLS, CALLS)
    assert {each["rip_name"] for each in calls} == {("string", PLACE)}
    assert all(is_stack([name for _, name in each["stack_names"][:2]]) for each in calls)
    assert {each["record"]["function"] for each in writes} == {("string", "put")}


def _check_otlp(found: list[dict[str, Any]]) -> None:
    calls, writes = ([each for each in found if each["dprobes.minor"] == minor] for minor in (1, 2))
    assert (len(calls), len(writes)) == (CALLS, CALLS)
    assert {each["dprobes.field.rip_name"] for each in calls} == {PLACE}
    assert all(is_stack(each["dprobes.field.stack_names"][:2]) for each in calls)
    assert {each["code.function.name"] for each in writes} == {"put"}


def _check_syslog(found: list[str]) -> None:
    calls, writes = ([each for each in found if f'minor="{minor}"' in each] for minor in (1, 2))
    assert (len(calls), len(writes)) == (CALLS, CALLS)
    assert all('rip_name="get [watched\\]"' in each for each in calls)
    caller = CALLER.replace(r"\]", r"\\\]")
    assert all(re.search(rf'stack_names="get \[watched\\\]; {caller}', each) for each in calls)
    assert all('function="put"' in each for each in writes)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_writes_is_counted_by_functions(build: Builder, tmp_path: Path, engine: str) -> None:
    program, text = build("watched.c"), tmp_path / "a.rpn"
    text.write_text(SOURCE)
    counted = dprobes(
        "run", text, "--engine", engine, "--count", "minor,function", "--count", "rip", "--", program, "threads", 5, 1
    )
    rows = [line.split() for line in counted.splitlines()]
    assert ["1", "get", "5", "50.0%"] in rows
    assert ["2", "put", "5", "50.0%"] in rows
    assert ["get", "[watched]", "5", "50.0%"] in rows
