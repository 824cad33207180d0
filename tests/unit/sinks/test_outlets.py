"""The kernel's log, serial lines and files."""

from __future__ import annotations

import os
import pty
import resource
import secrets
import signal
from pathlib import Path

import pytest

from dprobes.errors import SinkError
from dprobes.record.tracecontent import LostRecords, TraceRecord
from dprobes.record.tracereader import TraceReader
from dprobes.sinks.base import SinkOptions
from dprobes.sinks.file import FileOutlet
from dprobes.sinks.kinds import parse_target
from dprobes.sinks.klog import DEVICE, KernelLogOutlet
from dprobes.sinks.serial import SerialOutlet
from unit.sinks.records import SOURCE, batch, record


def test_the_kernels_log_shows_each_line() -> None:
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        pytest.skip(f"{DEVICE} cannot be used by this user")
    mark = secrets.token_hex(8)
    with Path(DEVICE).open("rb", buffering=0) as kernel:
        os.set_blocking(kernel.fileno(), False)
        os.lseek(kernel.fileno(), 0, os.SEEK_END)
        outlet = KernelLogOutlet()
        outlet.write([f"{mark} one\n{mark} {'x' * 1500}"])
        outlet.write([f"{mark} {n}" for n in range(20)])
        outlet.close()
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
    outlet = SerialOutlet(os.ttyname(other))
    outlet.write(["DProbes(1,2)\n0a 0b"])
    outlet.close()
    assert os.read(main, 100) == b"DProbes(1,2)\r\n0a 0b\r\n"
    os.close(main)
    os.close(other)


def test_what_is_no_serial_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SinkError) as caught:
        SerialOutlet(str(path))
    assert caught.value.message == f"'{path}' is no serial line: inappropriate ioctl for device"


def test_a_file_that_is_full_keeps_whole_records_and_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "log"
    outlet = FileOutlet(str(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))
        with pytest.raises(SinkError) as caught:
            outlet.write(["0123456789", "abcdefghij", "ABCDEFGHIJ"])
        assert (caught.value.message, caught.value.taken) == (f"'{path}': file too large", 2)
        assert path.read_text() == "0123456789\nabcdefghij\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    outlet.write(["ABCDEFGHIJ"])
    outlet.close()
    assert path.read_text() == "0123456789\nabcdefghij\nABCDEFGHIJ\n"


def test_a_name_in_dpt_is_a_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "log.dpt"
    sink = parse_target(str(path)).open(SinkOptions())
    sink.create_event(SOURCE)
    sink.log_events(batch(1, 2))
    sink.log_events(batch(3, lost=7))
    sink.destroy_event(SOURCE)
    sink.close()
    found: list[bytes | int] = []
    reader = TraceReader(path)
    for each in reader.read():
        match each:
            case TraceRecord():
                assert (each.program.name, each.program.place(each.probe)[0]) == ("app", "main")
                found.append(each.record)
            case LostRecords(_, count):
                found.append(count)
    reader.close()
    assert found == [record(1), record(2), 7, record(3)]
