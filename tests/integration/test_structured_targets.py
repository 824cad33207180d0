"""Log targets with a structure of their own: they say of a run what its records say as JSON."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from babeltrace import NEEDS_BABELTRACE, event_line, read_trace, text_of

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
    result = run.command(PROGRAM, program, THREADS, CALLS, options=options)
    assert "log target" not in result.stderr
    assert len(result.records) == 2 * THREADS * CALLS
    records = sorted(result.records, key=lambda record: record["time"])
    # What has the same time may be in any order.
    assert sorted(read_trace(traces)) == sorted(_line(record) for record in records)


def _line(record: dict[str, Any]) -> str:
    """Return what babeltrace2 has to say of a record."""
    context = {key: str(record[key]) for key in ("major", "minor", "pid", "uid")}
    context |= {"cs": "0x33", "ip": text_of(record["ip"], 16), "ss": "0x2B", "sp": text_of(record["sp"], 16)}
    context |= {"procname": text_of(record["name"]), "tid": str(record["tid"])}
    data = bytes.fromhex(record["data"])
    payload = {"_data_length": str(len(data)), "data": text_of(data)}
    if record["minor"] == 2:
        (item,) = record["items"]
        memory = bytes.fromhex(item["value"])
        payload |= {"_memory_length": str(len(memory)), "memory": text_of(memory)}
    packet = {"cpu_id": str(record["cpu"])} if "cpu" in record else {}
    name = "threads:tick:return" if record["minor"] == 2 else "threads:tick"
    scopes = [packet, context, payload] if packet else [context, payload]
    return event_line(_nanoseconds(record["wall_time"]), name, *scopes)


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{seconds}+00:00").timestamp()) * 10**9 + int(fraction)
