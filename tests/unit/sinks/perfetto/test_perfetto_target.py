"""The file of a Perfetto trace: it is continued, never harmed, and whole but for what was being written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from dprobes.errors import SinkError
from dprobes.sinks.perfetto import perfetto_target
from support.perfetto_messages import packets_of, read_perfetto
from unit.sinks.perfetto.traces import batch, entry, opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_a_file_is_continued_by_another_sequence(path: Path) -> None:
    for n in range(2):
        sink = opened(path)
        sink.log_events(batch(entry("f", n)))
        sink.close()
    assert [event.begin for event in read_perfetto(path).events] == [0, 1]
    packets = packets_of(path)
    assert len({packet.trusted_packet_sequence_id for packet in packets[1:]}) == 2
    assert len({packet.track_event.track_uuid for packet in packets if packet.HasField("track_event")}) == 2


def test_a_torn_tail_is_cut_off_wherever_it_is_torn(path: Path) -> None:
    sink = opened(path)
    sink.log_events(batch(entry("f", 1)))
    whole = path.stat().st_size
    sink.log_events(batch(entry("long" * 100, 2)))
    sink.close()
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        sink = opened(path)
        sink.log_events(batch(entry("f", 3)))
        sink.close()
        expected = [1, 2, 3] if size == len(data) else [1, 3] if size >= whole else [3]
        assert [event.begin for event in read_perfetto(path).events] == expected


def test_what_is_no_trace_of_ours_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "a trace cannot be continued after a restart of the machine, nor one of another program"
    opened(path).close()
    with monkeypatch.context() as patch:
        patch.setattr(perfetto_target, "boot_uuid", uuid.uuid4)
        with pytest.raises(SinkError) as caught:
            opened(path)
    assert caught.value.message == f"'{path}' exists already, and is not a trace that can be continued"
    assert caught.value.hint == hint
    for data in (b"\n", b"\n\n\n", b"\n\xff\xff\xff\xff\xff\xff", b"text" * 100):
        path.write_bytes(data)
        if data == b"\n":
            continue  # which is how a trace begins
        with pytest.raises(SinkError) as caught:
            opened(path)
        assert caught.value.message == f"'{path}' exists already, and is not a trace that can be continued"
        assert path.read_bytes() == data


def test_files_that_cannot_be(tmp_path: Path) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / "trace"
    os.mkfifo(pipe)
    keep = opened(path)
    for name, reason in (
        (tmp_path, "cannot be written: is a directory"),
        (tmp_path / "none" / "file", "cannot be written: no such file or directory"),
        (pipe, "is not a regular file, as a Perfetto trace must be"),
        (path, "is being written by another process"),
    ):
        with pytest.raises(SinkError) as caught:
            opened(name)
        assert caught.value.message == f"'{name}' {reason}"
    keep.close()
    opened(path).close()


def test_a_batch_that_finds_no_room_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    room = 0

    def pwrite(descriptor: int, data: memoryview, position: int) -> int:
        if position >= room:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: room - position], position)

    sink = opened(path)
    sink.log_events(batch(entry("f", 1)))
    room = path.stat().st_size + 50
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(SinkError) as caught:
            sink.log_events(batch(entry("g", 2), entry("h", 3)))
    assert (caught.value.message, caught.value.taken) == (f"'{path}' cannot be written: no space left on device", 0)
    assert path.stat().st_size == room - 50
    sink.close()
    sink = opened(path)
    sink.log_events(batch(entry("g", 2), entry("h", 3)))
    assert [event.begin for event in read_perfetto(path).events] == [1, 2, 3]


WRITER = """
import sys
from pathlib import Path
from unit.sinks.perfetto.traces import batch, entry, opened
sink = opened(Path(sys.argv[1]))
for n in range(1_000_000):
    sink.log_events(batch(*[entry("f" * 300, 20 * n + m) for m in range(20)]))
    print(20 * n + 20, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_trace_with_all_that_it_has_taken(path: Path) -> None:
    tests = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{tests.parent / 'src'}:{tests}"}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, env=environment
    ) as writer:
        assert writer.stdout is not None
        for _ in range(50):
            taken = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        taken = max([taken, *map(int, writer.stdout.read().split())])
    opened(path).close()
    begins = [event.begin for event in read_perfetto(path).events]
    assert begins == list(range(len(begins)))
    assert taken <= len(begins) <= taken + 20
