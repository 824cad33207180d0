"""What babeltrace2 reads in a trace is what was in the records, whatever templates and records there are."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Literal

import pytest

from dprobes.formatters.templates.template_collection import Templates
from dprobes.record.log_record import ByteOrder, LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch
from dprobes.sinks.ctf.ctf_target import CtfSink
from support.babeltrace import NEEDS_BABELTRACE, event_line, read_trace, text_of
from unit.sinks.typed import Shown, TypedField, random_data, random_fields, template_files

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = NEEDS_BABELTRACE

WALL = 1_700_000_000_123_456_789
TEMPLATES = 60
RECORDS = 1000
SHAPES: list[tuple[Literal[4, 8], ByteOrder]] = [(4, "little"), (8, "little"), (4, "big"), (8, "big")]


@pytest.mark.parametrize("seed", range(2))
def test_random_templates_and_records(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    fields = [random_fields(random) for _ in range(TEMPLATES)]
    files = template_files(7, fields)
    assert list(Templates.from_files(files).diagnostics) == []
    source = RecordSource(1, "app", "app", 7, (), files)
    sink = CtfSink(tmp_path)
    sink.create_event(source)
    expected, place, time = [], Place("app", "main"), 0
    records = []
    for _ in range(RECORDS):
        time += random.randrange(1, 10**9)
        word_size, order = random.choice(SHAPES)
        minor = random.randrange(TEMPLATES)
        record, shown = _random_record(random, time, minor, fields[minor], word_size, order)
        records.append(encode_record(record))
        expected.append(event_line(WALL + time, "app:main", *shown))
        if random.random() < 0.1:
            random.shuffle(records)
            sink.log_events(Batch(source, records, [place] * len(records), WALL))
            records = []
    sink.log_events(Batch(source, records, [place] * len(records), WALL))
    assert read_trace(tmp_path) == expected


def _random_record(
    random: Random, time: int, minor: int, fields: list[TypedField], word_size: Literal[4, 8], order: ByteOrder
) -> tuple[LogRecord, list[dict[str, str]]]:
    data, shown = random_data(fields, random, word_size, order)
    record = LogRecord(7, minor, time=time, data=data, word_size=word_size, byte_order=order)
    record = record._replace(
        cpu=random.choice([None, *range(4)]),
        pid=random.choice([None, random.getrandbits(32)]),
        uid=random.choice([None, random.getrandbits(32)]),
        cs=random.choice([None, 0x33]),
        ip=random.choice([None, random.getrandbits(8 * word_size)]),
        ss=random.choice([None, 0x2B]),
        sp=random.choice([None, random.getrandbits(8 * word_size)]),
        process_name=random.choice([None, "name", "a name", "é" * 7]),
        tid=random.choice([None, random.getrandbits(32)]),
    )
    context = {"major": "7", "minor": str(minor)}
    for name in ("pid", "uid", "cs", "ip", "ss", "sp"):
        if (value := getattr(record, name)) is not None:
            context[name] = text_of(value, 10 if name in ("pid", "uid") else 16)
    if record.process_name is not None:
        context["name"] = text_of(record.process_name)
    if record.tid is not None:
        context["tid"] = str(record.tid)
    packet = [] if record.cpu is None else [{"cpu_id": str(record.cpu)}]
    return record, [*packet, context, _payload(shown)]


def _payload(fields: dict[str, Shown]) -> dict[str, str]:
    strings: dict[str, str] = {}
    for name, shown in fields.items():
        if isinstance(shown.value, (bytes, tuple)):
            strings[f"_{name}_length"] = str(len(shown.value))
        strings[name] = text_of(shown.value, shown.base)
    return strings
