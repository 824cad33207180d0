"""The kernel's log, serial lines and files."""

from __future__ import annotations

import os
import pty
import resource
import secrets
import shutil
import signal
import subprocess
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.record.line_frames import Frame, FrameDecoder, Lost
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.local import klog_target, serial_target
from dprobes.sinks.local.file_target import FileOutlet
from dprobes.sinks.local.klog_target import DEVICE, KernelLogOutlet
from dprobes.sinks.local.serial_target import SerialOutlet
from dprobes.sinks.target_kinds import parse_target
from dprobes.trace.trace_content import LostRecords, TraceRecord
from dprobes.trace.trace_reader import TraceReader
from unit.sinks.records import PLACE, SOURCE, batch, record

if TYPE_CHECKING:
    from collections.abc import Iterator


SHORT = "a record needs 12 bytes, found 4 (at byte 4)"


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


def test_dmesg_shows_long_lines_in_pieces_and_no_torn_character() -> None:
    if not os.access(DEVICE, os.W_OK):
        pytest.skip(f"{DEVICE} cannot be used by this user")
    if shutil.which("dmesg") is None:
        pytest.skip("dmesg is not installed (package util-linux)")
    mark = secrets.token_hex(8)
    outlet = KernelLogOutlet()
    outlet.write([f"{mark}{'é' * 1000}end"])
    outlet.write([f"{mark} {n}" for n in range(30)])  # more than the kernel takes from one opening of the device
    outlet.close()
    done = subprocess.run(["dmesg", "--notime"], check=True, capture_output=True, timeout=60)
    lines = done.stdout.decode().splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith(f"{mark}é"))
    strings = [line for line in lines[start:] if mark in line or not line.strip("é") or line.endswith("éend")]
    assert "".join(strings[:5]) == f"{mark}{'é' * 1000}end"
    assert strings[5:] == [f"{mark} {n}" for n in range(30)]


def test_a_kernel_log_that_takes_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klog_target, "DEVICE", "/proc/1/no/such")
    with pytest.raises(SinkError) as caught:
        KernelLogOutlet()
    assert caught.value.message == "'/proc/1/no/such' cannot be opened: no such file or directory"

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("dprobes.sinks.local.klog_target.os.open", refuse)
    with pytest.raises(SinkError) as caught:
        KernelLogOutlet()
    assert caught.value.message == "'/proc/1/no/such' cannot be opened: operation not permitted"
    assert caught.value.hint == "this needs root, and that 'sysctl kernel.printk_devkmsg' is not 'off'"


@pytest.fixture
def line() -> Iterator[tuple[int, str]]:
    """Return our end of a serial line, and the name of the other one."""
    main, other = pty.openpty()
    yield main, os.ttyname(other)
    os.close(main)
    os.close(other)


def test_a_serial_line_gets_lines_with_cr_lf(line: tuple[int, str]) -> None:
    main, name = line
    sink = parse_target(f"serial:{name}").open(SinkOptions())
    sink.create_event(SOURCE)
    sink.log_events(batch(1, lost=2))
    assert os.read(main, 100) == b"<2 records of 'app' were lost here>\r\nmain  01 02\r\n"
    sink.log_events(batch(lost=3))
    assert os.read(main, 100) == b"<3 records of 'app' were lost here>\r\n"
    sink.close()


def test_a_serial_line_gets_frames(line: tuple[int, str]) -> None:
    main, name = line
    sink = parse_target(f"serial:{name}").open(SinkOptions("binary"))
    sink.create_event(SOURCE)
    sink.log_events(batch(1, 2, lost=2))
    assert list(FrameDecoder().feed(os.read(main, 100))) == [Lost(2), Frame(record(1)), Frame(record(2))]
    sink.close()


def test_a_serial_lines_settings_are_put_back(line: tuple[int, str]) -> None:
    main, name = line
    before = termios.tcgetattr(main)
    sink = parse_target(f"serial:{name}@9600").open(SinkOptions())
    during = termios.tcgetattr(main)
    assert (during[4], during[5]) == (termios.B9600, termios.B9600)
    assert not during[3] & (termios.ICANON | termios.ECHO)
    with pytest.raises(SinkError) as caught:
        SerialOutlet(name)
    assert caught.value.message == f"'{name}' cannot be set up for 115200 baud: resource temporarily unavailable"
    sink.close()
    assert termios.tcgetattr(main) == before


def test_a_serial_line_that_takes_nothing_is_an_error(line: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial_target, "_PATIENCE", 0.1)
    _, name = line
    outlet = SerialOutlet(name)
    with pytest.raises(SinkError) as caught:
        outlet.write([b"0123456789\r\n"] * 100_000)
    assert caught.value.message == f"'{name}': no data was accepted for 0 s"
    assert 0 < caught.value.taken < 100_000
    outlet.close()


def test_a_serial_line_needs_pyserial(line: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SinkError) as caught:
        SerialOutlet(line[1])
    assert caught.value.message == "a serial line needs the package pyserial, which is not installed"
    assert caught.value.hint == "pip install 'dprobes[serial]'"


@pytest.mark.parametrize("name", ["serial:/dev/ttyS9@fast", "serial:/dev/ttyS9@", "serial:/dev/ttyS9@0"])
def test_a_speed_is_a_number(name: str) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(name).open(SinkOptions())
    speed = name.partition("@")[2]
    assert caught.value.message == f"log target '{name}': expected a speed in baud after '@', found '{speed}'"


@pytest.mark.parametrize("name", ["KLOG", "journal"])
def test_what_takes_text_refuses_bytes(name: str) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(name).open(SinkOptions("binary"))
    assert caught.value.message == f"log target '{name}' takes text, not the format 'binary'"
    assert caught.value.hint == "files, serial lines and commands take it: file:PATH, serial:DEVICE, command:CMD"


def test_a_pipe_that_nobody_reads_is_an_error_and_one_that_is_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(SinkError) as caught:
        FileOutlet(str(path))
    assert caught.value.message == f"'{path}' cannot be written: no process reads this pipe"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = parse_target(f"file:{path}").open(SinkOptions("binary"))
    sink.log_events(batch(1))
    sink.close()
    assert list(FrameDecoder().feed(os.read(reader, 100))) == [Frame(record(1))]
    os.close(reader)


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("text", f"main  01 02\n<a malformed record of 'app': {SHORT}>\n03 00 00 00\nmain  01 02\n"),
        ("json", f'{{"malformed": "{SHORT}", "program": "app", "data": "03000000"}}'),
        ("csv", f'\n{"," * 23}"<malformed: {SHORT}: 03 00 00 00>"\r\n'),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_formatted_is_shown_and_holds_up_nobody(
    tmp_path: Path, format_name: str, text: str
) -> None:
    path = tmp_path / "log"
    sink = parse_target(str(path)).open(SinkOptions(format_name))
    sink.create_event(SOURCE)
    sink.log_events(Batch(SOURCE, [record(1), b"\3\0\0\0", record(2)], [PLACE] * 3, 0))
    sink.close()
    with path.open(newline="") as file:
        content = file.read()
    assert text in content
    assert content.count("\n") >= 3


def test_what_is_no_serial_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SinkError) as caught:
        SerialOutlet(str(path))
    assert caught.value.message == f"'{path}' is not a serial line: inappropriate ioctl for device"


def test_a_file_that_is_full_keeps_whole_records_and_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "log"
    outlet = FileOutlet(str(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))
        with pytest.raises(SinkError) as caught:
            outlet.write([b"0123456789\n", b"abcdefghij\n", b"ABCDEFGHIJ\n"])
        assert (caught.value.message, caught.value.taken) == (f"'{path}': file too large", 2)
        assert path.read_text() == "0123456789\nabcdefghij\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    outlet.write([b"ABCDEFGHIJ\n"])
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
