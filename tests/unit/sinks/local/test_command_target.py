"""A command's standard input as a log target."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.record.line_frames import Frame, FrameDecoder, Lost
from dprobes.sinks import SinkOptions
from dprobes.sinks.local import command_target
from dprobes.sinks.sink_thread import LogTarget
from dprobes.sinks.target_kinds import parse_target
from unit.sinks.records import SOURCE, batch, record
from unit.sinks.test_sink_thread import await_true

if TYPE_CHECKING:
    from collections.abc import Callable

READER = """
import os, sys, time
with open(sys.argv[1], "ab", buffering=0) as output:
    output.write(b"<%d>" % os.getpid())
    while data := os.read(0, 4096):
        output.write(data)
    output.write(b"<end>")
"""


def log_target(text: str, format_name: str = "text", on_problem: Callable[[str], None] | None = None) -> LogTarget:
    target = LogTarget(text, lambda: parse_target(text).open(SinkOptions(format_name)), on_problem=on_problem)
    target.create([SOURCE])
    return target


@pytest.fixture
def reader(tmp_path: Path) -> str:
    """Return the name of a target that writes what it gets to the file ``out``, with its process id before."""
    script = tmp_path / "reader.py"
    script.write_text(READER)
    return f"command:{sys.executable} '{script}' '{tmp_path}/out'"


def test_a_command_gets_lines(reader: str, tmp_path: Path) -> None:
    target = log_target(reader)
    target.put(batch(1))
    target.put(batch(2, lost=3))
    status = target.close()
    assert (status.written, status.lost, status.problem) == (2, 0, None)
    text = (tmp_path / "out").read_text()
    assert text.partition(">")[2] == ("main  01 02\n<3 records of 'app' were lost here>\nmain  01 02\n<end>")


def test_a_command_gets_frames(reader: str, tmp_path: Path) -> None:
    target = log_target(reader, "binary")
    target.put(batch(1))
    target.put(batch(2, lost=3))
    assert target.close().written == 2
    data = (tmp_path / "out").read_bytes().partition(b">")[2].removesuffix(b"<end>")
    assert list(FrameDecoder().feed(data)) == [Frame(record(1)), Lost(3), Frame(record(2))]


def test_a_command_that_dies_is_started_again_and_doubles_nothing(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.01)
    output = tmp_path / "out"
    problems: list[str] = []
    target = log_target(reader, on_problem=problems.append)
    target.put(batch(1))
    await_true(lambda: output.exists() and output.read_text().endswith("01 02\n"))
    first = int(output.read_text()[1:].partition(">")[0])
    os.kill(first, signal.SIGKILL)
    await_true(lambda: " Z " in Path(f"/proc/{first}/stat").read_text())

    def is_noticed() -> bool:
        target.put(batch(2))
        return output.read_text().count("<") == 2

    await_true(is_noticed)
    sent = target.status().written + target.status().waiting + target.status().lost
    status = target.close()
    assert problems == [f"command '{sys.executable}' was ended by SIGKILL"]
    assert status.written + status.lost == sent
    assert output.read_text().count("main  01 02") == status.written


def test_what_a_command_has_not_read_is_lost() -> None:
    # It reads one byte, and ends; 20 records are in the pipe.
    outlet = command_target.CommandOutlet([sys.executable, "-c", "import os; os.read(0, 1); os._exit(3)"])
    outlet.write([b"0123456789"] * 20)
    with pytest.raises(SinkError) as caught:
        outlet.close()
    assert caught.value.message == f"command '{sys.executable}' has ended with status 3"
    assert caught.value.lost == 20


def test_records_that_were_in_a_full_pipe_are_counted() -> None:
    outlet = command_target.CommandOutlet([sys.executable, "-c", "import os, time; os.read(0, 30); time.sleep(1)"])
    with pytest.raises(SinkError) as caught:
        outlet.write([b"0123456789"] * 100_000)
    # A page of the pipe is free again when all of it has been read: what is counted is what is still there.
    assert (caught.value.message, caught.value.taken - caught.value.lost) == (
        f"command '{sys.executable}' has ended with status 0",
        3,
    )
    outlet.close()  # what was said is not said again


def test_a_command_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_target, "_PATIENCE", 0.1)
    monkeypatch.setattr(command_target, "_LAST_WORDS", 0.3)
    outlet = command_target.CommandOutlet(["sleep", "1000"])
    with pytest.raises(SinkError) as caught:
        outlet.write([b"0123456789"] * 100_000)
    assert caught.value.message == "command 'sleep': no data was accepted for 0 s"
    assert 0 < caught.value.taken == caught.value.lost
    with pytest.raises(SinkError) as caught:
        outlet.close()
    assert caught.value.message == "command 'sleep' did not end within 0 s after its input, and was ended"
    assert outlet._process.returncode == -signal.SIGTERM


def test_a_command_that_hangs_is_gone_when_nobody_waits_any_more(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(1000)\n")
    pid = tmp_path / "pid"
    target = log_target(f"command:{sys.executable} {script} {pid}")
    await_true(lambda: pid.exists() and pid.read_text() != "")
    for _ in range(60):
        target.put(batch(*[1] * 1000))
    await_true(lambda: target.status().written > 0)
    status = target.close(patience=0.5)
    assert status.written + status.lost == 60_000
    assert not target._thread.is_alive()
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert target.status().written == 0, "it has read nothing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("command:", "log target 'command' needs a command: command:CMD ARGS"),
        ("command:'", "log target 'command:'': no closing quotation"),
        ("command:/no/such --thing", "command '/no/such' cannot be started: no such file or directory"),
    ],
)
def test_what_is_no_command_is_refused(name: str, message: str) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(name).open(SinkOptions())
    assert caught.value.message == message
