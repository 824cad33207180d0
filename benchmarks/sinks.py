"""Measure log targets with a structure of their own: records a second on one core, beside a file of text."""

from __future__ import annotations

import shutil
import struct
import time
from typing import TYPE_CHECKING

from table import Measurement, Unit

from dprobes.formatters.templates.template_directory import DIRECTORY_FILE
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.instruction_set import Token
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.target_kinds import parse_target

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sinks"]

TARGETS = ("ctf", "perfetto")
"""Kinds of targets whose argument is a path."""

COUNT = 200_000
BATCH = 1000
ROUNDS = 3

_ITEMS = (
    bytes([Token.STRING]) + struct.pack("<H", 10) + b"/etc/hosts"
    + bytes([Token.MEMORY]) + struct.pack("<H", 8) + bytes(8)
)  # fmt: skip

DATA = {
    "3 words, by a template": (1, struct.pack("<qQQ", -1, 0xABC, 7)),
    "a string and memory, by a template": (2, _ITEMS),
    "3 words, without": (3, struct.pack("<qQQ", -1, 0xABC, 7)),
}

FORMATS = b'major = 1\nminor = 1\nfmt = "n=%d at=%p of=%u"\nminor = 2\nfmt = "path=%*s head=%*h"\n'
SOURCE = RecordSource(1, "app", "app", 1, (), {DIRECTORY_FILE: b"1 one\n", "one": FORMATS})


def sinks(directory: Path) -> list[Measurement]:
    """Return the rows about sinks."""
    rows = []
    for what, (minor, data) in DATA.items():
        batches = _batches(minor, data)
        text = _best(f"file:{directory}/sink", batches, directory)
        for target in TARGETS:
            rate = _best(f"{target}:{directory}/sink", batches, directory)
            rows.append(Measurement(f"{target}: records of {what}", rate, "as text to a file", text, Unit.RATE))
    return rows


def _batches(minor: int, data: bytes) -> list[Batch]:
    """Return records of two threads on two CPUs."""
    place = Place("app", "work")
    return [
        Batch(SOURCE, [_record(minor, data, number) for number in range(first, first + BATCH)], [place] * BATCH, 0)
        for first in range(0, COUNT, BATCH)
    ]


def _record(minor: int, data: bytes, number: int) -> bytes:
    turn = number % 2
    return encode_record(
        LogRecord(1, minor, turn, 40, 0, 0x33, 0x401234, 0x2B, 0x7FFE0000, 1000 * number, "app", 40 + turn, data)
    )


def _best(target: str, batches: list[Batch], directory: Path) -> float:
    """Return the best rate of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        sink = parse_target(target).open(SinkOptions())
        sink.create_event(SOURCE)
        begin = time.process_time()
        for batch in batches:
            sink.log_events(batch)
        sink.flush()
        sink.close()
        seconds.append(time.process_time() - begin)
        path = directory / "sink"
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return COUNT / min(seconds)
