"""Log targets that the manager writes to: the kernel's log, serial lines, files; and what they make of failures."""

from __future__ import annotations

import os
import pty
import secrets
import threading
import time
from pathlib import Path

import pytest

from dprobes.errors import SinkError
from dprobes.manager.targets import LogTarget
from dprobes.record.codec import encode_record
from dprobes.record.layout import LogRecord
from dprobes.record.place import Place
from dprobes.sinks.base import sink_opener
from dprobes.sinks.klog import DEVICE, KernelLogSink
from dprobes.sinks.serial import SerialSink

PLACE = Place("app", "main")


def record(minor: int) -> bytes:
    return encode_record(LogRecord(major=1, minor=minor, data=b"\x01\x02"))


def test_the_kernels_log_shows_each_line() -> None:
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        pytest.skip(f"{DEVICE} cannot be used by this user")
    mark = secrets.token_hex(8)
    with Path(DEVICE).open("rb", buffering=0) as kernel:
        os.set_blocking(kernel.fileno(), False)
        os.lseek(kernel.fileno(), 0, os.SEEK_END)
        sink = KernelLogSink()
        sink.write(f"{mark} one\n{mark} {'x' * 1500}")
        sink.write("\n".join(f"{mark} {n}" for n in range(20)))
        sink.close()
        messages: list[tuple[int, str]] = []
        while len(messages) < 23:
            prefix, _, text = os.read(kernel.fileno(), 8192).decode().partition(";")
            if mark in text or not text.strip("x\n"):
                messages.append((int(prefix.split(",")[0]), text.rstrip("\n")))
    assert messages[0] == (8 + 6, f"{mark} one")  # LOG_USER, info
    assert messages[1][1] + messages[2][1] == f"{mark} {'x' * 1500}"
    assert [text for _, text in messages[3:]] == [f"{mark} {n}" for n in range(20)]


def test_a_serial_line_gets_lines_with_cr_lf() -> None:
    main, other = pty.openpty()
    device = os.ttyname(other)
    sink = SerialSink(device)
    sink.write("DProbes(1,2)\n0a 0b")
    sink.close()
    assert os.read(main, 100) == b"DProbes(1,2)\r\n0a 0b\r\n"
    os.close(main)
    os.close(other)


def test_what_is_no_serial_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SinkError) as caught:
        SerialSink(str(path))
    assert caught.value.message == f"'{path}' is no serial line: inappropriate ioctl for device"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "there is no log target 'nowhere'"),
        ("file:relative", "log target 'file:relative': the path of a file must be absolute"),
        ("LTT", "log target LTT is not there: its successor's format is CTF"),
        ("evl", "log target EVL is not there: its successor is the systemd journal"),
    ],
)
def test_names_that_are_no_targets(name: str, message: str) -> None:
    with pytest.raises(SinkError) as caught:
        sink_opener(name)
    assert caught.value.message == message


def await_written(target: LogTarget, count: int) -> None:
    until = time.monotonic() + 20
    while target.status().written < count:
        assert time.monotonic() < until, target.status()
        time.sleep(0.002)


def test_a_file_is_appended_to_and_only_with_the_programs_records(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    target = LogTarget(str(path), sink_opener(str(path)), module="app", format_name="text")
    target.put("app", [record(1), record(2)], [PLACE, PLACE])
    target.put("other", [record(3)], [PLACE])
    await_written(target, 2)
    status = target.close()
    assert (status.written, status.lost, status.problem) == (2, 0, None)
    assert path.read_text() == "before\nDProbes(1,1)\n01 02\nDProbes(1,2)\n01 02\n"


class BrokenSink:
    """Fail as often as it is told to."""

    def __init__(self, failures: list[str], taken: list[str], gate: threading.Event) -> None:
        self._failures = failures
        self._taken = taken
        self._gate = gate

    def write(self, text: str) -> None:
        self._gate.wait()
        if self._failures:
            raise SinkError(self._failures.pop())
        self._taken.append(text)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_target_that_blocks_holds_nobody_up_and_counts_what_it_loses() -> None:
    taken: list[str] = []
    gate = threading.Event()
    target = LogTarget("blocked", lambda: BrokenSink([], taken, gate), module=None, format_name="hex")
    for _ in range(70):
        target.put("app", [record(1)] * 1000, [PLACE] * 1000)
    status = target.status()
    assert (status.written, status.waiting, status.lost) == (0, 65_536, 70_000 - 65_536)
    gate.set()
    await_written(target, 65_536)
    assert target.close().lost == 70_000 - 65_536
    assert sum(text.count("DProbes(") for text in taken) == 65_536


def test_a_target_that_fails_is_tried_again_and_doubles_nothing() -> None:
    taken: list[str] = []
    gate = threading.Event()
    gate.set()
    failures: list[str] = []
    target = LogTarget("broken", lambda: BrokenSink(failures, taken, gate), module=None, format_name="hex")
    failures.append("it is broken")
    target.put("app", [record(1)], [PLACE])
    until = time.monotonic() + 20
    while target.status().problem is None and not taken:
        assert time.monotonic() < until
    target.put("app", [record(2)], [PLACE])
    await_written(target, 2)
    assert [text.split("\n")[0] for text in taken] == ["DProbes(1,1)", "DProbes(1,2)"]
    status = target.close()
    assert (status.lost, status.problem) == (0, None)
