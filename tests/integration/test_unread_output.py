"""Standard output that nobody reads holds up no run: a signal ends it, the target is left as it was, all is counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    environment,
    read_counts,
    read_memory,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from integration.support import Builder

HITS = 20
WAITING = "dprobes: note: records wait until standard output is read; Ctrl-C discards them"


def fill(writer: int) -> None:
    """Write into a pipe until it takes nothing more."""
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(1 << 12))
    except BlockingIOError:
        os.set_blocking(writer, True)


class FullPipe:
    """A pipe that is full, and that somebody could read."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fill(self.writer)
        self._clients: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, both: bool = False) -> subprocess.Popen[str]:
        """Start a command of ours that writes there; with ``both`` also what is for standard error."""
        client = subprocess.Popen(
            [*DPROBES, *map(str, arguments)],
            stdout=self.writer,
            stderr=subprocess.STDOUT if both else subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            if client.poll() is None:
                client.kill()
                client.wait(TIMEOUT)
            if client.stderr is not None:
                client.stderr.close()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    found = FullPipe()
    yield found
    found.close()


def is_waiting_for_reader(pid: int) -> bool:
    """Return whether the first thread waits to write to standard output, by poll(2) or by write(2)."""
    number, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
    if number == "7":
        return int(arguments[1], 16) == 2 and int(arguments[2], 16) & 0xFFFFFFFF == 0xFFFFFFFF
    return number == "1" and int(arguments[0], 16) == 1


def code_of(pid: int, path: Path) -> list[bytes]:
    """Return the code of a program's file in the memory of a process."""
    spans = [
        [int(each, 16) for each in line.split()[0].split("-")]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if line.endswith(str(path)) and "x" in line.split()[1]
    ]
    assert spans
    return [read_memory(pid, start, end - start) for start, end in spans]


def ask(target: subprocess.Popen[str], count: int) -> None:
    """Have ``asked`` call its function so often, and wait until it has."""
    assert target.stdin is not None
    target.stdin.write(f"{count}\n")
    target.stdin.flush()
    assert await_line(target).split()[1] == str(count * (count + 1) // 2)


def program(path: Path, directory: Path) -> Path:
    source = directory / "answer.rpn"
    source.write_text(f'name = "{path}"\noffset = answer\nminor = 1\npush r, pc\nlog 1\nexit\n')
    return source


@pytest.fixture(params=["ebpf", "ptrace", "inline"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ebpf":
        require_bpf()
    name: str = request.param
    return name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_gives_up_what_nobody_reads(
    build: Builder, tmp_path: Path, pipe: FullPipe, engine: str, number: signal.Signals
) -> None:
    path = build("asked.c")
    with running(path, stdin=subprocess.PIPE) as target:
        await_line(target)
        code = code_of(target.pid, path)
        client = pipe.start("run", "--explain", program(path, tmp_path), "--engine", engine, "-p", target.pid)
        await_message(client, "1 probepoint is active")
        ask(target, HITS)
        client.send_signal(number)
        await_message(client, WAITING)
        assert code_of(target.pid, path) == code
        client.send_signal(number)
        _, said = client.communicate(timeout=TIMEOUT)
        ask(target, 3)
    counts = read_counts(said)[1]
    assert (counts.hits, counts.records, counts.lost) == (HITS, 0, HITS)
    problem = "dprobes: error: standard output: its reader did not read in time; the probepoints are removed"
    assert problem in said.splitlines()
    assert client.returncode == 1


def test_one_signal_gives_up_what_nobody_reads_for_long(
    build: Builder, tmp_path: Path, pipe: FullPipe, engine: str
) -> None:
    path = build("asked.c")
    with running(path, stdin=subprocess.PIPE) as target:
        await_line(target)
        code = code_of(target.pid, path)
        client = pipe.start("run", "--explain", program(path, tmp_path), "--engine", engine, "-p", target.pid)
        await_message(client, "1 probepoint is active")
        ask(target, HITS)
        client.send_signal(signal.SIGTERM)
        _, said = client.communicate(timeout=TIMEOUT)
        assert code_of(target.pid, path) == code
        ask(target, 3)
    counts = read_counts(said)[1]
    assert (counts.hits, counts.records, counts.lost) == (HITS, 0, HITS)
    assert "dprobes: error: standard output: no data was accepted for 10 s; the probepoints are removed" in said
    assert client.returncode == 1


def test_what_is_read_after_all_is_not_lost(build: Builder, tmp_path: Path, pipe: FullPipe, engine: str) -> None:
    path = build("asked.c")
    with running(path, stdin=subprocess.PIPE) as target, os.fdopen(os.dup(pipe.reader), "rb") as file:
        await_line(target)
        client = pipe.start(
            "run", "--explain", program(path, tmp_path), "--engine", engine, "-p", target.pid, "--format", "json"
        )
        await_message(client, "1 probepoint is active")
        ask(target, HITS)
        client.send_signal(signal.SIGINT)
        await_message(client, WAITING)
        data = b""
        while data.count(b"\n") < HITS:
            data += os.read(file.fileno(), 1 << 16)
        _, said = client.communicate(timeout=TIMEOUT)
    lines = data.lstrip(b"\0").decode().splitlines()
    assert [json.loads(line)["minor"] for line in lines] == [1] * HITS
    counts = read_counts(said)[1]
    assert (counts.hits, counts.records, counts.lost) == (HITS, HITS, 0)
    assert client.returncode == 0


def test_a_program_behind_a_stub_is_let_go(build: Builder, tmp_path: Path, pipe: FullPipe) -> None:
    path = build("asked.c")
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    # gdbserver interrupts the process group that a program leads.
    with running(path, stdin=subprocess.PIPE, process_group=0) as target:
        await_line(target)
        code = code_of(target.pid, path)
        stub = subprocess.Popen(
            ["gdbserver", "--once", "--attach", endpoint, str(target.pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            await_message(stub, "Listening on port")
            client = pipe.start("run", "--explain", program(path, tmp_path), "--engine", f"gdb={endpoint}")
            await_true(lambda: code_of(target.pid, path) != code, "a breakpoint", TIMEOUT)
            assert target.stdin is not None
            target.stdin.write(f"{HITS}\n")
            target.stdin.flush()
            await_true(lambda: is_waiting_for_reader(client.pid), "a write that waits", TIMEOUT)
            client.send_signal(signal.SIGINT)
            await_message(client, WAITING)
            client.send_signal(signal.SIGINT)
            _, said = client.communicate(timeout=TIMEOUT)
            assert await_line(target).split()[1] == str(HITS * (HITS + 1) // 2)
            assert code_of(target.pid, path) == code
        finally:
            stub.kill()
            stub.wait(TIMEOUT)
            assert stub.stderr is not None
            stub.stderr.close()
    counts = read_counts(said)[1]
    assert counts.hits > 0
    assert (counts.records, counts.lost) == (0, counts.hits)


def test_a_replay_ends(build: Builder, tmp_path: Path, pipe: FullPipe) -> None:
    path, recording = build("asked.c"), tmp_path / "hits.jsonl"
    hits: Sequence[dict[str, object]] = [{"symbol": "answer", "registers": {"rip": 1}}] * 20_000
    recording.write_text("".join(json.dumps(hit) + "\n" for hit in hits))
    client = pipe.start("run", "--explain", program(path, tmp_path), "--engine", f"replay={recording}")
    await_true(lambda: is_waiting_for_reader(client.pid), "a write that waits", TIMEOUT)
    client.send_signal(signal.SIGINT)
    await_message(client, WAITING)
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=TIMEOUT)
    counts = read_counts(said)[1]
    assert counts.hits > 0
    assert (counts.records, counts.lost) == (0, counts.hits)


def test_messages_that_nobody_reads_hold_up_nothing_either(build: Builder, tmp_path: Path, pipe: FullPipe) -> None:
    path = build("asked.c")
    with running(path, stdin=subprocess.PIPE) as target:
        await_line(target)
        code = code_of(target.pid, path)
        client = pipe.start(
            "run", "--explain", program(path, tmp_path), "--engine", "ptrace", "-p", target.pid, both=True
        )
        # The note about active probepoints is the first thing that is written.
        await_true(lambda: is_waiting_for_reader(client.pid), "a write that waits", TIMEOUT)
        client.send_signal(signal.SIGTERM)
        assert client.wait(TIMEOUT) == 128 + signal.SIGTERM
        assert code_of(target.pid, path) == code
        ask(target, 3)


@pytest.mark.parametrize(
    ("verb", "status"),
    [
        (["list", sys.executable], 130),
        (["examples", "--help"], 130),
        (["doctor"], 130),
        (["log", "{trace}"], 0),  # Ctrl-C is how it ends
    ],
)
def test_a_query_ends(build: Builder, tmp_path: Path, pipe: FullPipe, verb: list[str], status: int) -> None:
    trace = tmp_path / "x.dpt"
    if "{trace}" in verb:
        path = build("hotloop.c")
        line = f'"{path}":tick(n) {{ printf("%d", n); }}'
        command = [*DPROBES, "run", "-e", line, "-o", str(trace), "--", str(path), "20"]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    client = pipe.start(*(word.format(trace=trace) for word in verb))
    await_true(lambda: is_waiting_for_reader(client.pid), "a write that waits", TIMEOUT)
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=TIMEOUT)
    assert client.returncode == status
    assert "Traceback" not in said
    problem = "standard output: its reader did not read in time; the remaining output is lost"
    assert f"dprobes: warning: {problem}" in said.splitlines()
