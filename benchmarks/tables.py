"""Measure what becomes tables or leaves for a collector: records a second on one core, beside a file of text."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from sinks import BATCH, DATA, SOURCE
from table import Measurement, Unit

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.target_kinds import parse_target
from dprobes.tables.parquet_files import write_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["tables"]

COUNT = 200_000
OTLP_COUNT = 20_000

COLLECTOR = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
stream = connection.makefile("rwb")
while line := stream.readline():
    size = 0
    while (line := stream.readline()) not in (b"\\r\\n", b""):
        name, _, value = line.partition(b":")
        size = int(value) if name.lower() == b"content-length" else size
    stream.read(size)
    stream.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    stream.flush()
"""
"""Takes everything, and reads nothing: what is measured is our side."""


def tables(directory: Path) -> list[Measurement]:
    """Return the rows about tables."""
    rows = []
    for what, (minor, data) in DATA.items():
        batches = _batches(minor, data, COUNT)
        text = _rate(f"file:{directory}/text", batches, COUNT)
        journal = directory / f"{minor}.dpt"
        written = _rate(f"file:{journal}", batches, COUNT)
        rows.append(Measurement(f"parquet: {what}, journal", written, "as text to a file", text, Unit.RATE))
        begin = time.process_time()
        place = directory / f"tables-{minor}"
        place.mkdir()
        write_tables(journal, place, "0")
        made = COUNT / (time.process_time() - begin)
        rows.append(Measurement(f"parquet: {what}, files", made, "as text to a file", text, Unit.RATE))
        with _collector() as port:
            sent = _rate(f"otlp:http://127.0.0.1:{port}", batches[: OTLP_COUNT // BATCH], OTLP_COUNT)
        rows.append(Measurement(f"otlp: {what}", sent, "as text to a file", text, Unit.RATE))
    rows.append(_sql(directory / "1.dpt"))
    return rows


def _sql(trace: Path) -> Measurement:
    """Return how fast a query reads a trace file, with all that it starts, beside the count of ``dprobes log``."""
    command = [sys.executable, "-m", "dprobes"]
    seconds = []
    for arguments in (["sql", str(trace), "select sum(n) from m1_1"], ["log", "--total", str(trace)]):
        begin = time.monotonic()
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - begin)
    return Measurement("sql: sum of a field", COUNT / seconds[0], "log --total", COUNT / seconds[1], Unit.RATE)


@contextlib.contextmanager
def _collector() -> Iterator[int]:
    """Run a collector in a process of its own; give its port."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _batches(minor: int, data: bytes, count: int) -> list[Batch]:
    return [
        Batch(SOURCE, list(_records(minor, data, first)), [Place("app", "work")] * BATCH, 0)
        for first in range(0, count, BATCH)
    ]


def _records(minor: int, data: bytes, first: int) -> Iterator[bytes]:
    for number in range(first, first + BATCH):
        yield encode_record(
            LogRecord(1, minor, 0, 40, 0, 0x33, 0x401234, 0x2B, 0x7FFE0000, 1000 * number, "app", 40, data)
        )


def _rate(target: str, batches: list[Batch], count: int) -> float:
    sink = parse_target(target).open(SinkOptions())
    sink.create_event(SOURCE)
    begin = time.process_time()
    for batch in batches:
        sink.log_events(batch)
    sink.flush()
    sink.close()
    return count / (time.process_time() - begin)
