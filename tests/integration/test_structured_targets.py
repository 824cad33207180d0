"""Log targets with a structure of their own: they say of a run what its records say as JSON."""

from __future__ import annotations

import os
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from support.babeltrace import NEEDS_BABELTRACE, event_line, read_trace, text_of
from support.perfetto_messages import read_perfetto

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
ENGINES = ["ptrace", pytest.param("ebpf", marks=needs_root)]

PROGRAM = """
name = threads
major = 5
offset = tick
    minor = 1
    push r, arg0
    log 1
    exit
offset = tick
    return = yes
    minor = 2
    push 4
    push r, sp
    log mrf
    exit
"""
THREADS, CALLS = 3, 40


@NEEDS_BABELTRACE
@pytest.mark.parametrize("engine", ENGINES)
def test_a_ctf_trace_has_what_the_records_have(build: Builder, run: Runner, tmp_path: Path, engine: str) -> None:
    program, traces = build("threads.c", "-pthread"), tmp_path / "traces"
    options = ["--engine", engine, "--log-target", f"ctf:{traces}"]
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "templates.lst").write_text("5 five\n")
    (templates / "five").write_text('major = 5\nminor = 1\nfmt = "n=%d"\nminor = 2\nfmt = "memory=%*h"\n')
    options += ["--templates", str(templates)]
    result = run.command(PROGRAM, program, THREADS, CALLS, options=options)
    assert "log target" not in result.stderr
    assert len(result.records) == 2 * THREADS * CALLS
    assert sorted(record["fields"]["n"] for record in result.records if record["minor"] == 1) == sorted(
        [*range(CALLS)] * THREADS
    )
    records = sorted(result.records, key=lambda record: record["time"])
    # What has the same time may be in any order.
    assert sorted(read_trace(traces)) == sorted(_line(record) for record in records)


def _line(record: dict[str, Any]) -> str:
    """Return what babeltrace2 has to say of a record."""
    context = {key: str(record[key]) for key in ("major", "minor", "pid", "uid")}
    context |= {"cs": "0x33", "ip": text_of(record["ip"], 16), "ss": "0x2B", "sp": text_of(record["sp"], 16)}
    context |= {"name": text_of(record["name"]), "tid": str(record["tid"])}
    if record["minor"] == 1:
        payload = {"n": str(record["fields"]["n"])}
    else:
        memory = bytes.fromhex(record["fields"]["memory"])
        payload = {"_memory_length": str(len(memory)), "memory": text_of(memory)}
    packet = {"cpu_id": str(record["cpu"])} if "cpu" in record else {}
    name = "threads:tick:return" if record["minor"] == 2 else "threads:tick"
    scopes = [packet, context, payload] if packet else [context, payload]
    return event_line(_nanoseconds(record["wall_time"]), name, *scopes)


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{seconds}+00:00").timestamp()) * 10**9 + int(fraction)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_perfetto_trace_has_the_calls_of_each_thread(
    build: Builder, run: Runner, tmp_path: Path, engine: str
) -> None:
    program, path = build("threads.c", "-pthread"), tmp_path / "trace"
    result = run.command(
        PROGRAM, program, THREADS, CALLS, options=["--engine", engine, "--log-target", f"perfetto:{path}"]
    )
    assert "log target" not in result.stderr
    trace = read_perfetto(path)
    assert len(trace.events) == THREADS * CALLS
    for record in result.records:
        record["thread"] = f"thread {record['pid']} {record['tid']}"
    for thread in {record["thread"] for record in result.records}:
        records = [record for record in result.records if record["thread"] == thread]
        assert [r["minor"] for r in records] == [1, 2] * CALLS
        entries, returns = records[::2], records[1::2]
        calls = trace.on(thread)
        assert [(call.name, call.begin, call.end, call.depth) for call in calls] == [
            ("threads:tick", entry["time"], back["time"], 0) for entry, back in zip(entries, returns, strict=True)
        ]
        for call, entry, back in zip(calls, entries, returns, strict=True):
            assert call.arguments["arg0"] == ("uint", entry["fields"]["arg0"])
            assert call.arguments["record"]["ip"] == ("pointer", entry["ip"])
            assert [byte for _, byte in call.returned["return"]["sp"]] == back["fields"]["sp"]
        assert trace.tracks[thread]["name"] == "threads"


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_nest_through_recursion_tail_calls_and_longjmp(
    build: Builder, run: Runner, tmp_path: Path, engine: str
) -> None:
    functions = (
        "factorial", "leaf", "branches", "jumper", "tail", "tail_indirect", "tail_maybe", "tail_jumper", "even", "odd",
        "partly", "structure_tail", "table_of",
    )  # fmt: skip
    source = "name = returns\n" + "".join(
        f"offset = {f}\nminor = {n}\nexit\noffset = {f}\nreturn = yes\nminor = {n + 50}\nexit\n"
        for n, f in enumerate(functions)
    )
    path = tmp_path / "trace"
    target = ["--engine", engine, "--log-target", f"perfetto:{path}"]
    result = run.command(source, build("returns.c", "-O1"), 3, 12, options=target)
    events = read_perfetto(path).events
    assert all(event.is_slice and event.end is not None for event in events)
    assert {n: sum(event.name == f"returns:{f}" for event in events) for n, f in enumerate(functions)} == {
        n: result.counts[n].hits for n in range(len(functions))
    }
    # factorial(n) calls itself n - 1 times, for the same numbers n in each thread, and nothing else calls it.
    depths = Counter(event.depth for event in events if event.name == "returns:factorial")
    assert sorted(depths) == list(range(len(depths)))
    assert list(depths.values()) == sorted(depths.values(), reverse=True)
    assert len(depths) > 3
