"""Log targets of the real command and of the real manager, while receivers fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.record.line_frames import Frame, FrameDecoder
from dprobes.sinks import SinkOptions
from dprobes.sinks.sink_thread import LogTarget
from dprobes.sinks.target_kinds import parse_target
from integration.manager.sandbox import Sandbox, Service, service
from integration.sinks.test_syslog import structured
from integration.support import DPROBES, TIMEOUT, await_message, await_true
from unit.sinks.records import SOURCE, batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.sinks.rsyslog import Rsyslog
    from integration.support import Builder

COUNTING = """name = "{library}"
major = 5
vars = 1
offset = write_file
minor = 1
inc lv, 0
push lv, 0
log 1
exit
"""

TEMPLATES = {"templates.lst": "5 five.fmt\n", "five.fmt": 'major = 5\nminor = 1\nfmt = "number=%d"\n'}


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    (tmp_path / "templates").mkdir()
    for name, text in TEMPLATES.items():
        made.write(f"templates/{name}", text)
    yield made
    made.close()


@pytest.fixture
def target(build: Builder) -> Iterator[Service]:
    with service(build) as started:
        yield started


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("counting.rpn", COUNTING.format(library=target.library))


def targets_of(sandbox: Sandbox) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in sandbox.json("dprobes log-target list --json")["targets"]}


def test_a_server_is_killed_and_restarted_under_a_hundred_thousand_records(
    sandbox: Sandbox, target: Service, source: Path, rsyslog: Rsyslog
) -> None:
    tcp = f"syslog:tcp://127.0.0.1:{rsyslog.tcp_port}"
    command = f'command:{sys.executable} -c \'import shutil, sys; shutil.copyfileobj(sys.stdin, open("copy", "w"))\''
    copy = sandbox.directory / "copy"
    script = sandbox.write(
        "copying.py", f"import sys\nwith open({str(copy)!r}, 'w') as f:\n  f.writelines(sys.stdin)\n"
    )
    command = f"command:{sys.executable} {script}"
    sandbox(
        f"dprobes insert {source} --as svc -p {target.pid} --templates templates "
        f"--log-format text --log-target '{tcp}' --log-target '{command}'"
    )
    total = 0

    def is_idle() -> bool:
        return all(each["written"] + each["lost"] == total for each in targets_of(sandbox).values())

    def call(count: int) -> None:
        nonlocal total
        total += count
        target.start("write_file", count)

    call(20_000)
    target.finish(20_000)
    rsyslog.await_count(5_000)
    call(40_000)
    rsyslog.end(kill=True)
    target.finish(40_000)
    call(40_000)
    rsyslog.start()
    target.finish(40_000)
    await_true(is_idle, "the end of what waits")
    call(1)
    target.finish(1)
    await_true(is_idle, "one more record")
    tcp_counts, command_counts = targets_of(sandbox)[tcp], targets_of(sandbox)[command]
    sandbox("dprobes stop --manager")
    assert command_counts["lost"] == 0, "a command that reads is held up by nobody"
    assert numbers_in(copy) == list(range(1, total + 1))

    def last_is_there() -> bool:
        return any(f'number="{total}"' in message["structured"] for message in rsyslog.received()[-1:])

    await_true(last_is_there, "the last record")
    messages = [message for message in rsyslog.received() if message["kind"] == "5.1"]
    received = [int(structured(message)["fields@32473"]["number"]) for message in messages]
    assert received == sorted(set(received)), "nothing comes twice, and all in order"
    # What TCP cannot know is what rsyslogd's system had taken, and rsyslogd had not written when it was killed.
    assert len(received) <= tcp_counts["written"]
    log = (sandbox.runtime / "manager.log").read_text()
    assert log.count(f"log target {tcp}: syslog at 'tcp://127.0.0.1:{rsyslog.tcp_port}': ") in (1, 2)


def numbers_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"  number=(\d+)$", path.read_text(), re.MULTILINE)]


def test_targets_that_come_and_go_under_load_get_what_is_there_and_take_nothing_from_others(
    sandbox: Sandbox, target: Service, source: Path
) -> None:
    always = sandbox.directory / "always.txt"
    options = f"-p {target.pid} --templates templates --log-format text"
    sandbox(f"dprobes insert {source} --as svc {options} --log-target {always}")
    late = [sandbox.directory / f"late{n}.txt" for n in range(4)]
    for path in late:
        target.start("write_file", 10_000)
        sandbox(f"dprobes log-target add {path} --format text")
        sandbox(f"dprobes log-target remove {path}")
        target.finish(10_000)
    sandbox(f"dprobes log-target add {late[0]} --format text")
    target.call("write_file", 100)
    await_true(lambda: numbers_in(late[0])[-1:] == [40_100], "the last record")
    assert numbers_in(always) == list(range(1, 40_101))
    for path in late[1:]:
        numbers = numbers_in(path)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    again = numbers_in(late[0])
    assert again == sorted(set(again))
    assert again[-100:] == list(range(40_001, 40_101))


def test_a_run_writes_everything_that_waits_before_it_ends(
    sandbox: Sandbox, target: Service, source: Path, rsyslog: Rsyslog
) -> None:
    slow = sandbox.write(
        "slow.py",
        "import sys, time\n"
        "with open('slow.txt', 'wb') as output:\n"
        "    while data := sys.stdin.buffer.read1(65536):\n"
        "        output.write(data)\n"
        "        time.sleep(0.02)\n",
    )
    command = f"command:{sys.executable} {slow}"
    unix = f"syslog:unix://{rsyslog.socket}"
    done = sandbox.shell(
        f"dprobes run {source} --templates templates --log-target '{command}' --log-target '{unix}' "
        f"--log-format json -c 'sh -c \"echo write_file 20000 | {target.program}\"'"
    )
    assert done.returncode == 0, done.stderr
    assert "has lost" not in done.stderr
    lines = (sandbox.directory / "slow.txt").read_text().splitlines()
    assert [json.loads(line)["fields"]["number"] for line in lines] == list(range(1, 20_001))
    messages = rsyslog.await_count(20_000)
    assert [int(structured(message)["fields@32473"]["number"]) for message in messages] == list(range(1, 20_001))


def test_a_run_says_what_a_target_has_lost(sandbox: Sandbox, target: Service, source: Path) -> None:
    done = sandbox.shell(
        f"dprobes run {source} --log-target 'command:false' -c 'sh -c \"echo write_file 10 | {target.program}\"'"
    )
    assert done.returncode == 0
    assert (
        done.stderr.count("dprobes: warning: log target command:false: command 'false' has ended with status 1\n") == 1
    )
    assert (
        "dprobes: warning: log target command:false has lost 10 records: command 'false' has ended with status 1\n"
        in done.stderr
    )


def test_frames_go_through_a_serial_line(sandbox: Sandbox, target: Service, source: Path) -> None:
    main, other = os.openpty()
    done = sandbox.shell(
        f"dprobes run {source} --log-target serial:{os.ttyname(other)}@9600 --log-format binary "
        f"-c 'sh -c \"echo write_file 100 | {target.program}\"'"
    )
    assert done.returncode == 0, done.stderr
    decoder = FrameDecoder()
    frames: list[object] = []
    while len(frames) < 100:
        frames += decoder.feed(os.read(main, 1000))
    os.close(main)
    os.close(other)
    assert [frame.record[-8:] for frame in frames if isinstance(frame, Frame)] == [
        n.to_bytes(8, "little") for n in range(1, 101)
    ]


@pytest.fixture
def full_disk(short_path: Path) -> Iterator[Path]:
    """Return a file system of 64 KiB."""
    mounted = short_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "dprobes-test", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT).returncode:
        pytest.skip("only root can mount a small file system, and this machine must allow it")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True, timeout=TIMEOUT)


def test_a_full_disk_loses_nothing_that_can_wait(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.02)
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY_MAX", 0.02)
    ballast = full_disk / "ballast"
    ballast.write_bytes(bytes(32_768))
    path = full_disk / "log"
    problems: list[str] = []
    target = LogTarget("file", lambda: parse_target(str(path)).open(SinkOptions()), on_problem=problems.append)
    target.create([SOURCE])
    target.put(batch(*range(3000)))  # 36 KB
    await_true(lambda: target.status().problem is not None, "a full disk")
    assert target.status().problem == f"'{path}': no space left on device"
    # What each new attempt leaves of a record is taken back: in between there are whole records only.
    await_true(lambda: path.read_text() == "main  01 02\n" * target.status().written, "whole records only")
    target.put(batch(*range(3000, 3100)))
    ballast.unlink()
    status = target.close()
    assert (status.written, status.lost, status.problem) == (3100, 0, None)
    assert path.read_text() == "main  01 02\n" * 3100
    assert problems == [f"'{path}': no space left on device"]


def test_a_full_disk_is_what_a_run_says(full_disk: Path, sandbox: Sandbox, target: Service, source: Path) -> None:
    path = full_disk / "log"
    done = sandbox.shell(
        f"dprobes run {source} --log-target {path} -c 'sh -c \"echo write_file 5000 | {target.program}\"'"
    )
    assert done.returncode == 0
    text = path.read_text()
    written = text.count("  write_file  lv0=")
    assert text.endswith("\n")
    assert f"log target file:{path} has lost {5000 - written} records: '{path}': no space left on device" in done.stderr


def test_ctrl_c_gives_up_what_waits_and_leaves_no_command_behind(
    sandbox: Sandbox, target: Service, source: Path
) -> None:
    hanging = sandbox.write(
        "hanging.py", "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    arguments = [*DPROBES, "run", str(source), "--log-target", f"command:{sys.executable} {hanging}"]
    arguments += ["-c", f'sh -c "echo write_file 5000 | {target.program}"']
    with subprocess.Popen(
        arguments, env=sandbox.environment, cwd=sandbox.directory, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = await_message(process, "; Ctrl-C gives up\n")
        assert re.search(
            r"dprobes: note: log target command:\S+ \S+: \d+ records are not written yet; Ctrl-C gives up", said
        )
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(TIMEOUT) == 0
    assert " has lost 5000 records" in rest
    assert not Path(f"/proc/{(sandbox.directory / 'pid').read_text()}").exists()


@pytest.mark.parametrize(
    ("output", "problem"),
    [("/dev/full", "standard output: no space left on device"), ("/dev/null", None)],
)
def test_a_console_that_takes_nothing_loses_records_and_says_so(
    sandbox: Sandbox, target: Service, source: Path, output: str, problem: str | None
) -> None:
    line = f"dprobes run {source} --log-target console -c 'sh -c \"echo write_file 10 | {target.program} >/dev/null\"'"
    done = sandbox.shell(f"{line} > {output}")
    assert done.returncode == 0
    if problem is None:
        assert "log target" not in done.stderr
    else:
        assert f"dprobes: warning: log target console: {problem}\n" in done.stderr
        assert f"dprobes: warning: log target console has lost 10 records: {problem}\n" in done.stderr


def test_a_console_takes_frames(sandbox: Sandbox, target: Service, source: Path) -> None:
    program = f"echo write_file 10 | {target.program} >/dev/null"
    sandbox(f"dprobes run {source} --log-target console --log-format binary -c 'sh -c \"{program}\"' > frames")
    frames = list(FrameDecoder().feed((sandbox.directory / "frames").read_bytes()))
    assert len(frames) == 10
    assert all(isinstance(frame, Frame) for frame in frames)
