"""Commands that start a stub themselves (``-c``), stubs that die, and connections that drop and come back."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from integration.gdb.processors import PROCESSORS
from integration.gdb.test_user_stubs import StubbedProgram, handler
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

LOG = "push r, arg0; log 1; exit\n"


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_gdbserver_is_started(build: Builder, run: Runner) -> None:
    path, port = build("hotloop.c"), free_port()
    command = f"gdbserver --once localhost:{port} {path} 30"
    result = run(handler(path, LOG), ["-c", command], ["--engine", f"gdb=localhost:{port}", "--exit-status"])
    assert result.status == 0, result.stderr
    assert result.words() == [[n] for n in range(30)]
    assert "435\n" in result.stdout


@pytest.mark.parametrize("name", ["s390x", "riscv64"])
def test_an_emulator_is_started(build: Builder, run: Runner, tmp_path: Path, name: str) -> None:
    processor = PROCESSORS[name]
    path, endpoint = processor.build(build, "hotloop.c", "-static"), tmp_path / "stub"
    command = f"{processor.emulator} -g {endpoint} {path} 30"
    result = run(handler(path, LOG), ["-c", command], ["--engine", f"gdb={endpoint}"])
    assert result.status == 0, result.stderr
    assert result.words(order=processor.order) == [[n] for n in range(30)]
    assert result.stdout == "435\n"


@pytest.mark.parametrize("command", [[], ["-c", "false"]])
def test_no_output_is_opened_where_no_stub_answers(
    build: Builder, run: Runner, tmp_path: Path, command: list[str]
) -> None:
    output = tmp_path / "records.dpt"
    options = ["--engine", f"gdb={tmp_path / 'none'}", "-o", str(output)]
    result = run(handler(build("hotloop.c"), LOG), command, options)
    assert (result.status, output.exists()) == (1, False)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"dprobes: error: there is no stub at {tmp_path / 'none'}: no such file or directory")


def test_a_command_that_is_no_stub(build: Builder, run: Runner, tmp_path: Path) -> None:
    path = build("hotloop.c")
    result = run(handler(path, LOG), ["-c", "false"], ["--engine", f"gdb={tmp_path / 'none'}"])
    assert result.status == 1
    assert result.stderr.splitlines()[-1] == (
        f"dprobes: error: there is no stub at {tmp_path / 'none'}: no such file or directory; "
        "the command 'false' has ended with status 1"
    )


def test_a_command_whose_program_cannot_be_probed_is_ended(build: Builder, run: Runner, tmp_path: Path) -> None:
    path, other, endpoint = build("hotloop.c"), build("hotloop.c", "-static", i386=True), tmp_path / "stub"
    result = run(handler(path, LOG), ["-c", f"qemu-i386 -g {endpoint} {other} 5"], ["--engine", f"gdb={endpoint}"])
    assert result.status == 1
    assert "serves a processor 'i386'" in result.stderr
    listed = subprocess.run(["pgrep", "-f", f"qemu-i386 -g {endpoint}"], capture_output=True, text=True, check=False)
    assert listed.stdout == ""


def test_the_stub_is_killed(build: Builder, run: Runner, tmp_path: Path) -> None:
    path = build("hotloop.c")
    program = StubbedProgram("qemu-x86_64", tmp_path, [str(path), "100000000"])
    client, output = run.start(handler(path, LOG), [], program.options)
    await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
    program.process.send_signal(signal.SIGKILL)
    _, error = client.communicate(timeout=TIMEOUT)
    program.process.wait(TIMEOUT)
    assert client.returncode == 0
    assert "closed the connection: the run ends\n" in error or "connection reset by peer: the run ends\n" in error
    assert error.count("tick ") == 1  # the counts are there


class DroppingRelay:
    """Forward a connection to a port, and drop it once, after so many bytes from there."""

    def __init__(self, port: int, after: int) -> None:
        self._port, self._after = port, after
        self._listener = socket.create_server(("localhost", 0))
        self.endpoint = f"localhost:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            self.connections += 1
            with ours, socket.create_connection(("localhost", self._port)) as theirs:
                self._forward(ours, theirs, self._after if self.connections == 1 else 1 << 40)

    def _forward(self, ours: socket.socket, theirs: socket.socket, left: int) -> None:
        for each in (ours, theirs):  # as both ends have it: small packets are not held back
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while left > 0:
            for readable in select.select([ours, theirs], [], [])[0]:
                data = os.read(readable.fileno(), 1 << 16)
                if not data:
                    return
                left -= len(data) if readable is theirs else 0
                (theirs if readable is ours else ours).sendall(data)


def test_a_connection_that_drops_and_comes_back(build: Builder, run: Runner, tmp_path: Path) -> None:
    """gdbserver keeps the program for whoever comes next: no hit is lost, as the program stands still meanwhile."""
    path, port = build("hotloop.c"), free_port()
    log = (tmp_path / "gdbserver.log").open("wb")
    with log, subprocess.Popen(["gdbserver", f"localhost:{port}", str(path), "400"], stdout=log, stderr=log) as server:
        relay = DroppingRelay(port, 100_000)
        result = run(handler(path, LOG), [], ["--engine", f"gdb={relay.endpoint}"])
        server.terminate()
    assert relay.connections == 2
    assert result.status == 0, result.stderr
    # Which of the two it is depends on what the relay had not read yet when it closed.
    stub = f"the stub {relay.endpoint}"
    lost = f"{stub} has closed the connection|the connection to {stub} has failed: connection reset by peer"
    assert re.search(f"({lost}), and was reached again: hits meanwhile are missed", result.stderr), result.stderr
    numbers = [n for (n,) in result.words()]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 399
    assert "79800\n" in (tmp_path / "gdbserver.log").read_text()
