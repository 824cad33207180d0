"""Trace files as log targets, compressed or not."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.local.trace_file_target import TraceFileSink
from dprobes.sinks.sink_thread import LogTarget
from dprobes.sinks.target_kinds import parse_target
from dprobes.trace.trace_content import LostRecords
from dprobes.trace.trace_reader import TraceReader
from unit.sinks.records import OTHER, PLACE, SOURCE, batch, record
from unit.sinks.test_sink_thread import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def opened(path: Path) -> TraceFileSink:
    sink = parse_target(str(path)).open(SinkOptions())
    assert isinstance(sink, TraceFileSink)
    return sink


def read(path: Path) -> list[tuple[str, bytes | int]]:
    with TraceReader(path) as reader:
        return [
            (each.program.name, each.count if isinstance(each, LostRecords) else each.record) for each in reader.read()
        ]


@pytest.mark.parametrize("name", ["trace.dpt", "trace.dptz"])
def test_a_name_asks_for_a_trace_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sink = opened(path)
    sink.create_event(SOURCE)
    sink.create_event(OTHER)
    sink.log_events(batch(1, 2))
    sink.log_events(batch(3, source=OTHER, lost=4))
    sink.flush()
    expected = [("app", record(1)), ("app", record(2)), ("other", 4), ("other", record(3))]
    await_true(lambda: read(path) == expected)
    sink.destroy_event(OTHER)
    for _ in range(1000):
        sink.log_events(Batch(SOURCE, [record(5) + b"-" * 40], [PLACE], 0))
    sink.close()
    assert read(path) == expected + [("app", record(5) + b"-" * 40)] * 1000
    assert (b"-" * 40 in path.read_bytes()) == (name == "trace.dpt")


def test_records_that_come_one_by_one_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.dpt"
    sink = opened(path)
    sink.create_event(SOURCE)
    for number in range(1000):
        sink.log_events(batch(number))
        sink.flush()
    await_true(lambda: len(read(path)) == 1000)  # nobody has to ask for that
    assert read(path) == [("app", record(number)) for number in range(1000)]
    with TraceReader(path) as reader:
        blocks = list(reader.blocks())
    assert len(blocks) < 200
    assert path.stat().st_size < 20_000
    sink.close()


def test_what_was_held_and_found_no_room_is_an_error_of_the_next_call(small_disk: Path) -> None:
    path = small_disk / "trace.dpt"
    sink = opened(path)
    sink.create_event(SOURCE)
    fill(small_disk)
    held = Batch(SOURCE, [record(1) + os.urandom(40) for _ in range(200)], [PLACE] * 200, 0)
    sink.log_events(held)
    await_true(lambda: sink._has_failed)
    with pytest.raises(SinkError) as caught:
        sink.log_events(held)
    assert caught.value.message == f"'{path}': no space left on device"
    assert (caught.value.taken, caught.value.lost, caught.value.unmarked) == (0, 200, {SOURCE.number: 200})
    with contextlib.suppress(SinkError):
        sink.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a small file system is mounted")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("name", ["trace.dpt", "trace.dptz"])
def test_a_full_disk_is_an_error_that_says_how_many_records_it_cost(small_disk: Path, name: str) -> None:
    path = small_disk / name
    sink = opened(path)
    sink.create_event(SOURCE)
    sink.log_events(batch(1))
    sink.flush()
    await_true(lambda: read(path) == [("app", record(1))])
    filler = fill(small_disk)
    accepted, refused = 0, None
    while refused is None:  # the last page of the file has some room
        try:
            sink.log_events(batch(*range(50), lost=1))
            accepted += 50
            sink.flush()
        except SinkError as error:
            refused = error
    assert refused.message == f"'{path}': no space left on device"
    # What was refused comes again; what was kept back is lost, and so are the notes before it.
    assert refused.lost % 50 == 0
    assert refused.unmarked == {SOURCE.number: refused.lost + refused.lost // 50}
    filler.unlink()
    missing = sum(refused.unmarked.values())
    sink.log_events(batch(2, lost=missing))
    sink.close()
    found = read(path)
    assert found[0] == ("app", record(1))
    assert found[-1] == ("app", record(2))
    accepted -= refused.lost
    assert len([each for _, each in found if isinstance(each, bytes)]) == 2 + accepted
    assert sum(each for _, each in found if isinstance(each, int)) == accepted // 50 + missing


def test_what_finds_no_room_at_the_end_is_an_error(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.trace.trace_writer._KEPT_NANOSECONDS", 10**12)
    path = small_disk / "trace.dptz"
    sink = opened(path)
    sink.create_event(SOURCE)
    sink.flush()
    fill(small_disk)
    for _ in range(40):  # which is less than what is kept back
        sink.log_events(Batch(SOURCE, [record(1) + os.urandom(16) for _ in range(256)], [PLACE] * 256, 0))
    with pytest.raises(SinkError) as caught:
        sink.close()
    assert caught.value.message == f"'{path}': no space left on device"
    assert caught.value.lost == 40 * 256 - len(read(path))


@pytest.mark.parametrize("name", ["trace.dpt", "trace.dptz"])
def test_a_disk_that_is_full_now_and_then_leaves_a_note_for_each_record_that_is_missing(
    small_disk: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.01)
    path = small_disk / name
    target = LogTarget(str(path), lambda: parse_target(str(path)).open(SinkOptions()))
    target.create([SOURCE, OTHER])
    count = 0

    def put(records: int) -> None:
        nonlocal count
        for source in (SOURCE, OTHER):
            each = [record(1, os.urandom(50) + struct.pack("<Q", count + n)) for n in range(records)]
            target.put(Batch(source, each, [PLACE] * records, 0))
        count += records

    def is_failing() -> bool:
        put(7)
        return target.status().problem is not None

    put(3)
    await_true(lambda: target.status().waiting == 0)
    for _ in range(4):
        filler = fill(small_disk)
        await_true(is_failing)
        filler.unlink()
        put(1)
        await_true(lambda: target.status().waiting == 0 and target.status().problem is None)
    for source in (SOURCE, OTHER):
        target.destroy(source)
    status = target.close()
    assert status.written + status.lost == 2 * count
    found = read(path)
    assert sum(each for _, each in found if isinstance(each, int)) == status.lost
    for source in (SOURCE, OTHER):
        at = 0
        for each in (each for who, each in found if who == source.name):
            if isinstance(each, int):
                at += each
            else:
                assert struct.unpack("<Q", each[-8:]) == (at,)
                at += 1
        assert at == count
