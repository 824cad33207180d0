"""Processes behind a stub of GDB's protocol, gdbserver's and QEMU's: the same records and counts as with any engine."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from integration.support import Builder, Runner


class StubbedProgram:
    """A program that a stub has started and holds at its beginning."""

    def __init__(self, name: str, directory: Path, command: Sequence[str]) -> None:
        self.name = name
        self._log = directory / "stub.log"
        self.endpoint = ""
        if name == "gdbserver":
            with socket.create_server(("localhost", 0)) as server:
                port = server.getsockname()[1]
            self.endpoint = f"localhost:{port}"
            argv = ["gdbserver", "--once", self.endpoint, *command]
        else:
            self.endpoint = str(directory / "stub.socket")
            argv = [name, "-g", self.endpoint, *command]
        if shutil.which(argv[0]) is None:
            pytest.skip(f"{argv[0]} is not installed")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def options(self) -> list[str]:
        return ["--engine", f"gdb={self.endpoint}"]

    @property
    def log(self) -> str:
        """What was printed so far."""
        return self._log.read_text()

    def output(self) -> str:
        """Return what the program printed, and gdbserver besides, after its end."""
        self.process.wait(TIMEOUT)
        return self._log.read_text()


@pytest.fixture(params=["gdbserver", "qemu-x86_64", "qemu-i386"])
def stub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made: list[StubbedProgram] = []

    def start(*command: str) -> StubbedProgram:
        made.append(StubbedProgram(request.param, tmp_path, command))
        return made[-1]

    start.endpoint_is_gdbserver = request.param == "gdbserver"  # type: ignore[attr-defined]
    start.is_i386 = request.param == "qemu-i386"  # type: ignore[attr-defined]
    yield start
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait(TIMEOUT)


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hotloop(build: Builder, stub: Any) -> Path:
    return build("hotloop.c", *(("-static",) if stub.is_i386 else ()), i386=stub.is_i386)


def handler(path: Path, text: str, *keywords: str) -> str:
    return f'name = "{path}"\noffset = tick\nminor = 1\n' + "".join(f"{each}\n" for each in keywords) + text


LOG = "push r, arg0; log 1; exit\n"


def test_every_hit_makes_its_record(build: Builder, run: Runner, stub: Any) -> None:
    path = hotloop(build, stub)
    program = stub(str(path), "300")
    result = run(handler(path, LOG), [], program.options)
    assert result.status == 0, result.stderr
    assert result.words(size=4 if stub.is_i386 else 8) == [[n] for n in range(300)]
    assert result.counts[1].hits == result.counts[1].records == 300
    assert "44850" in program.output()
    assert program.process.returncode == 0


def test_passcount_and_maxhits(build: Builder, run: Runner, stub: Any) -> None:
    path = hotloop(build, stub)
    program = stub(str(path), "100")
    result = run(handler(path, LOG, "passcount = 10", "maxhits = 5"), [], program.options)
    assert result.words(size=4 if stub.is_i386 else 8) == [[n] for n in range(10, 15)]
    assert "4950" in program.output()


def test_remove(build: Builder, run: Runner, stub: Any) -> None:
    path = hotloop(build, stub)
    program = stub(str(path), "100")
    result = run(handler(path, "push r, arg0; log 1; remove\n"), [], program.options)
    assert result.words(size=4 if stub.is_i386 else 8) == [[0]]
    assert "4950" in program.output()


def test_a_register_is_changed(build: Builder, run: Runner, stub: Any) -> None:
    """The second call gets 101 for 1: the program notices that the answer is wrong, and aborts."""
    path = hotloop(build, stub)
    program = stub(str(path), "9")
    argument = "push r, edi"
    change = "push 101; pop r, edi"
    if stub.is_i386:
        argument = "push 4; push r, esp; add; push mem, u32"
        change = "push 4; push r, esp; add; push 101; pop mem, u32"
    target = f"{argument}; log 1; {argument}; push 1; eq; jz out; {change}; out: exit\n"
    result = run(handler(path, target), [], [*program.options, "--allow-write"])
    assert len(result.records) == 2, result.stderr
    program.process.wait(TIMEOUT)
    assert program.name == "gdbserver" or program.process.returncode == -signal.SIGABRT


def test_ctrl_c_lets_the_program_go_on(build: Builder, run: Runner, stub: Any) -> None:
    path = hotloop(build, stub)
    program = stub(str(path), "100000000")
    client, output = run.start(handler(path, LOG), [], program.options)
    await_that(lambda: output.exists() and output.stat().st_size > 0)
    client.send_signal(signal.SIGINT)
    _, error = client.communicate(timeout=TIMEOUT)
    assert client.returncode == 0, error
    assert program.name == "gdbserver" or program.process.poll() is None  # gdbserver ends, its program does not


def test_a_library_that_comes_and_goes(build: Builder, run: Runner, stub: Any) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="plugin.so", i386=stub.is_i386)
    path = build("loader.c", "-ldl", i386=stub.is_i386)
    program = stub(str(path), str(library), "6")
    text = f'name = "{library}"\noffset = plugin_call\nminor = 1\npush 1; log 1; exit\n'
    result = run(text, [], program.options)
    assert result.status == 0, f"{result.stderr}\nthe program: {program.output()}"
    assert len(result.records) == result.counts[1].hits == 18
    program.process.wait(TIMEOUT)
    assert program.process.returncode == 0


def test_faults_make_no_records(build: Builder, run: Runner, stub: Any) -> None:
    """The instruction faults five times, is repaired, and completes five times."""
    flags = ("-static",) if stub.is_i386 else ()
    path = build("faults.c", *flags, i386=stub.is_i386)
    program = stub(str(path), "protected", "5")
    text = f'name = "{path}"\noffset = at_protected\nminor = 1\npush 1; log 1; exit\n'
    result = run(text, [], program.options)
    assert result.status == 0, result.stderr
    assert len(result.records) == result.counts[1].hits == 5
    program.process.wait(TIMEOUT)
    assert program.process.returncode == 0


def test_returns_are_those_of_the_ptrace_engine(build: Builder, run: Runner, stub: Any) -> None:
    """Recursion and tail calls: each return is told in its order, with the argument of the entry."""
    path = build("tails.c", *(("-static",) if stub.is_i386 else ()), i386=stub.is_i386)
    text = "".join(
        f"offset = {function}\nreturn = yes\nminor = {minor}\npush entry, arg0; push r, retval; log 2; exit\n"
        for minor, function in enumerate(("fib", "tail"), 1)
    )
    program = stub(str(path))
    result = run(f'name = "{path}"\n{text}', [], program.options)
    expected = run(f'name = "{path}"\n{text}', ["-c", str(path)], ["--engine", "ptrace"])
    assert result.status == 0, result.stderr
    size = 4 if stub.is_i386 else 8
    assert [(r["minor"], r["data"]) for r in result.records] == [(r["minor"], r["data"]) for r in expected.records]
    assert result.words(2, size) == [[2, 3]]
    assert result.counts[1].hits == expected.counts[1].hits > 10


def test_processes_that_are_forked_go_on_without_breakpoints(build: Builder, run: Runner, stub: Any) -> None:
    path = build("copies.c", *(("-static",) if stub.is_i386 else ()), i386=stub.is_i386)
    again = ["again"] if stub.endpoint_is_gdbserver else []  # after an exec nothing is left of an emulator
    program = stub(str(path), *again)
    result = run(f'name = "{path}"\noffset = step\nminor = 1\npush 1; log 1; exit\n', [], program.options)
    assert result.status == 0, result.stderr
    assert len(result.records) == (10 if again else 5)
    assert "0\n" in program.output()
    assert program.process.returncode == 0


@pytest.mark.parametrize("after", [0.0, 0.02, 0.3])
def test_a_program_goes_on_unharmed_when_dprobes_is_killed(
    build: Builder, run: Runner, stub: Any, after: float
) -> None:
    path = hotloop(build, stub)
    program = stub(str(path), "20000")
    client, output = run.start(handler(path, LOG), [], program.options)
    await_that(lambda: output.exists() and output.stat().st_size > 0)
    time.sleep(after)
    client.kill()
    client.communicate(timeout=TIMEOUT)
    await_that(lambda: "199990000" in program.log)


def test_what_is_not_a_stub(build: Builder, run: Runner, tmp_path: Path) -> None:
    path = build("hotloop.c")
    result = run(handler(path, LOG), [], ["--engine", f"gdb={tmp_path / 'none'}"])
    assert result.status == 1
    assert result.stderr.splitlines()[-1] == (
        f"dprobes: error: there is no stub at {tmp_path / 'none'}: no such file or directory"
    )
    result = run(handler(path, LOG), [], ["--engine", "gdb=nonsense"])
    assert result.stderr.splitlines()[-2:] == [
        "dprobes: error: 'nonsense' does not name a stub",
        "hint: write HOST:PORT, the path of a socket or serial line, or |COMMAND",
    ]


def test_a_stub_of_another_processor(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = StubbedProgram("qemu-i386", tmp_path, [str(build("hotloop.c", "-static", i386=True)), "5"])
    path = build("hotloop.c")
    result = run(handler(path, LOG), [], program.options)
    assert result.status == 1
    assert result.stderr.splitlines()[-1] == (
        f"dprobes: error: the stub {program.endpoint} serves a processor 'i386', '{path}' is for x86_64"
    )
    program.process.kill()
    program.process.wait(TIMEOUT)
