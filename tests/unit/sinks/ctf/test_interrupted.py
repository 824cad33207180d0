"""What becomes of a trace when its writer is killed, or finds no room: nothing but what was not taken is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.sinks import Batch
from support.babeltrace import NEEDS_BABELTRACE
from unit.sinks.ctf.traces import PLACE, SOURCE, batch, opened, times_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.record.record_origin import Place

pytestmark = NEEDS_BABELTRACE


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "rename"])
def test_a_failure_anywhere_leaves_what_was_there_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = 0
    real_write, real_truncate, real_rename = os.pwrite, os.ftruncate, Path.rename

    def fails() -> bool:
        nonlocal made
        made += 1
        return made == failing

    def pwrite(descriptor: int, data: memoryview, position: int) -> int:
        if fails():
            if len(data) > 8:  # the kernel does not write half of what is in one page
                real_write(descriptor, data[: len(data) // 2], position)
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data, position)

    def ftruncate(descriptor: int, size: int) -> None:
        if fails():
            raise OSError(28, "No space left on device")
        real_truncate(descriptor, size)

    def rename(path: Path, other: Path) -> None:
        if fails():
            raise OSError(28, "No space left on device")
        real_rename(path, other)

    failing, failures = 0, 0
    taken: list[int] = []
    said: set[tuple[str, int]]
    for failing in range(1, 20):
        directory = tmp_path / str(failing)
        sink = opened(directory)
        made, taken, failures, said = 0, [], 0, set()
        with monkeypatch.context() as patch:
            match call:
                case "pwrite":
                    patch.setattr(os, "pwrite", pwrite)
                case "ftruncate":
                    patch.setattr(os, "ftruncate", ftruncate)
                case "rename":
                    patch.setattr(Path, "rename", rename)
            for n in range(4):
                both = Batch(SOURCE, *_on_two_cpus(range(10 * n, 10 * n + 10), bytes(700)), 0)
                try:
                    sink.log_events(both)
                except SinkError as error:
                    said.add((error.message, error.taken))
                    failures += 1
                    sink = opened(directory)
                else:
                    taken += range(10 * n, 10 * n + 10)
        assert times_in(directory) == taken
        assert said <= {(f"'{directory}' cannot be written: no space left on device", 0)}
        if not failures:
            break
    assert failures == 0
    assert failing > 2


def _on_two_cpus(times: range, data: bytes) -> tuple[list[bytes], list[Place]]:
    records = [encode_record(LogRecord(1, 2, time % 2, time=time, data=data)) for time in times]
    return records, [PLACE] * len(records)


WRITER = """
import sys
from pathlib import Path
from unit.sinks.ctf.traces import batch, opened
sink = opened(Path(sys.argv[1]))
for n in range(1_000_000):
    sink.log_events(batch(range(20 * n, 20 * n + 20), cpu=n % 2, data=bytes(300)))
    print(20 * n + 20, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_trace_with_all_that_it_has_taken(tmp_path: Path) -> None:
    for kill in range(4):
        directory = tmp_path / str(kill)
        tests = Path(__file__).parents[3]
        environment = os.environ | {"PYTHONPATH": f"{tests.parent / 'src'}:{tests}"}
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, directory], stdout=subprocess.PIPE, text=True, env=environment
        ) as writer:
            assert writer.stdout is not None
            for _ in range(5 + 40 * kill):
                taken = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            taken = max([taken, *map(int, writer.stdout.read().split())])
        times = times_in(directory)
        assert times == list(range(len(times)))
        assert len(times) - taken in (0, 20)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_disk_that_is_full_takes_records_again_when_there_is_room(small: Path) -> None:
    filler, directory = small / "filler", small / "traces"
    filler.write_bytes(bytes(60_000))
    sink, taken, failed = opened(directory), 0, 0
    said: set[str] = set()
    for n in range(30):
        while True:
            try:
                sink.log_events(batch(range(10 * n, 10 * n + 10), data=bytes(400)))
            except SinkError as error:
                said.add(error.message)
                failed += 1
                if failed == 3:
                    filler.unlink()
                if failed == 10:
                    break
                sink = opened(directory)
            else:
                taken += 10
                break
        if failed == 10:
            break
    assert said == {f"'{directory}' cannot be written: no space left on device"}
    assert failed == 10
    assert taken > 120
    assert times_in(directory) == list(range(taken))
    assert len(list(directory.iterdir())) == 2
