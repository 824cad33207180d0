"""Run ``dprobes run`` on programs compiled for the tests, and read what it says."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROGRAMS = Path(__file__).parents[1] / "programs"
PATIENCE = int(os.environ.get("DPROBES_TEST_PATIENCE", "1"))
"""How many times slower than usual programs may be: emulated processors are."""

TIMEOUT = 60 * PATIENCE
DPROBES = (sys.executable, "-m", "dprobes")
NOBODY = 65534

I386_COMPILER = "i686-linux-gnu-gcc"
I386_LIBRARIES = "/usr/i686-linux-gnu/lib"
I386_FLAGS = (f"-Wl,-rpath,{I386_LIBRARIES}", f"-Wl,--dynamic-linker={I386_LIBRARIES}/ld-linux.so.2")

_ROW = re.compile(r"^(\d+),(\d+) +(\S+(?: \S+)*?) +(\d+) +(\d+) +(\d+) +(\d+) +(\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Counts:
    hits: int
    records: int
    lost: int
    passed: int
    executed: str = ""


@dataclass
class Result:
    """Hold what a run of ``dprobes run`` left behind; ``counts`` are those of the summary, by minor code."""

    status: int
    stdout: str
    stderr: str
    records: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[int, Counts] = field(default_factory=dict)

    def words(
        self, minor: int | None = None, size: int = 8, order: Literal["little", "big"] = "little"
    ) -> list[list[int]]:
        """Return what ``log <count>`` logged in each record, as words of ``size`` bytes."""
        logs = [bytes.fromhex(r["data"]) for r in self.records if minor is None or r["minor"] == minor]
        return [[int.from_bytes(d[n : n + size], order) for n in range(0, len(d), size)] for d in logs]


class Builder:
    """
    Compile programs of ``tests/programs``, each once.

    ``compiled`` is a directory with what another builder has made, for where there is no compiler.
    """

    def __init__(self, directory: Path, compiled: Path | None = None) -> None:
        self._directory = directory
        self._compiled = compiled
        self._made: dict[tuple[str, ...], Path] = {}

    def __call__(self, source: str, *flags: str, i386: bool = False, name: str = "", compiler: str = "") -> Path:
        compiler = compiler or (I386_COMPILER if i386 else "gcc")
        linking = I386_FLAGS if i386 and not {"-static", "-static-pie", "-shared"} & set(flags) else ()
        key = (source, name, compiler, *flags, *linking)
        place = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        if self._compiled is not None:
            output = self._compiled / place / (name or Path(source).stem)
            assert output.exists(), f"{key} has not been compiled before"
            return output
        if shutil.which(compiler) is None:
            pytest.skip(f"{compiler} is not installed")
        if key not in self._made:
            directory = self._directory / place
            directory.mkdir()
            output = directory / (name or Path(source).stem)
            command = [compiler, "-O1", "-g", "-o", str(output), str(PROGRAMS / source), *flags, *linking, "-lpthread"]
            subprocess.run(command, check=True, timeout=TIMEOUT)
            self._made[key] = output
        assert self._made[key].exists(), f"an earlier test has removed {self._made[key]}"
        return self._made[key]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def command_line(program: Path, output: Path, target: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    engine = [] if "--engine" in options else ["--engine", os.environ.get("DPROBES_TEST_ENGINE", "ptrace")]
    return [
        *DPROBES,
        "run",
        str(program),
        *engine,
        "--format",
        "json",
        "--explain",
        "-o",
        str(output),
        *options,
        *target,
    ]


def _with_numbers(line: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its addresses as numbers."""
    is_record = "word_size" in line  # and not what a handler called so
    return line | {name: int(line[name], 16) for name in ("ip", "sp") if is_record and name in line}


def read_counts(said: str) -> dict[int, Counts]:
    """Return the counts of a summary by minor code."""
    counts = {}
    for row in _ROW.finditer(said):
        hits, emitted, lost, passed = (int(number) for number in row.groups()[3:7])
        counts[int(row[2])] = Counts(hits, emitted, lost, passed, row[8])
    return counts


def read_result(process: subprocess.Popen[str], output: Path, timeout: float = TIMEOUT) -> Result:
    """Wait for a client's end and read what it wrote; a client that does not end is killed, and the test fails."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"dprobes did not end; it had printed:\n{stdout}\n{stderr}") from None
    records = (
        [json.loads(line, object_hook=_with_numbers) for line in output.read_text().splitlines()]
        if output.exists()
        else []
    )
    return Result(process.returncode, stdout, stderr, records, read_counts(stderr))


class Runner:
    """Write probe programs to a directory and run them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._clients: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        """End the clients that a failed test left behind."""
        for client in self._clients:
            if client.poll() is None:
                client.kill()
                client.wait(TIMEOUT)
            for stream in (client.stdout, client.stderr):
                assert stream is not None
                stream.close()

    def start(
        self, program: str, target: Sequence[str], options: Sequence[str] = (), **popen: Any
    ) -> tuple[subprocess.Popen[str], Path]:
        self._number += 1
        source = self._directory / f"{self._number}.rpn"
        source.write_text(program)
        output = self._directory / f"{self._number}.json"
        process = subprocess.Popen(
            command_line(source, output, target, options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            **popen,
        )
        self._clients.append(process)
        return process, output

    def __call__(
        self, program: str, target: Sequence[str], options: Sequence[str] = (), timeout: float = TIMEOUT, **popen: Any
    ) -> Result:
        process, output = self.start(program, target, options, **popen)
        return read_result(process, output, timeout)

    def end(self, client: subprocess.Popen[str], output: Path) -> Result:
        """End a client as Ctrl-C does, and read what it wrote."""
        client.send_signal(signal.SIGINT)
        return read_result(client, output)

    def command(self, program: str, *arguments: object, **keywords: Any) -> Result:
        """Run a program on a command that must end well."""
        result = self(program, ["--exit-status", "--", *map(str, arguments)], **keywords)
        assert result.status == 0, result.stderr + result.stdout
        return result


def accepts_connections(path: Path) -> bool:
    """Return whether a server listens at a socket; the file exists a little earlier."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def await_true(condition: Callable[[], bool], what: str, timeout: float = TIMEOUT) -> None:
    """Look at a condition again and again until it holds."""
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not come about in {timeout} s")
        time.sleep(0.002)


def await_message(client: subprocess.Popen[str], text: str) -> str:
    """Wait until a client has said something on standard error, and return all that it said so far."""
    assert client.stderr is not None
    said = ""
    while text not in said:
        line = client.stderr.readline()
        assert line, f"dprobes did not say '{text}', but:\n{said}"
        said += line
    return said


def status_field(pid: int, name: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def kernel_state(pid: int) -> str:
    """Return the letter for a process's state, as proc(5) has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def processor_time(pid: int) -> int:
    """Return the CPU time that a process has used so far, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def children_of(pid: int) -> list[int]:
    """Return the children that the threads of a process have started."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended: its children are another's
            found += map(int, (thread / "children").read_text().split())
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, with a NUL behind each word; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape")
    return ""


def tracer_of(pid: int) -> int:
    return int(status_field(pid, "TracerPid"))


def is_traced(pid: int) -> bool:
    """Return whether a thread of a process has a tracer."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return any(tracer_of(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def await_traced(pid: int) -> int:
    """
    Wait until a process is traced, and return the tracer's process id.

    The process may run on for a moment before the tracer stops it to set breakpoints: see ``await_breakpoint``.
    """
    await_true(lambda: tracer_of(pid) != 0, f"process {pid} being traced")
    return tracer_of(pid)


def await_breakpoint(pid: int, path: Path, symbol: str) -> None:
    """Wait until the first byte of a function in a process is a breakpoint."""
    await_true(lambda: memory_at(pid, path, symbol, 1) == b"\xcc", f"a breakpoint at {symbol}")


def await_line(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    assert ready, "the program printed nothing"
    return process.stdout.readline()


def symbols_of(path: Path) -> dict[str, int]:
    """Return the link addresses of a file's symbols, as nm sees them."""
    rows = [line.split() for line in _said_of(path, _contents_of(path), "nm").splitlines()]
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


def executable_segments(path: Path) -> list[tuple[int, int, int]]:
    """Return offset, address and size in the file of each executable segment, as readelf sees them."""
    text = _said_of(path, _contents_of(path), "readelf", "-lW")
    return [
        (int(row[1], 16), int(row[2], 16), int(row[4], 16))
        for row in (line.split() for line in text.splitlines())
        if row[:1] == ["LOAD"] and "E" in row[6:-1]
    ]


def _contents_of(path: Path) -> tuple[int, ...]:
    """Return what is another for other contents of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


@functools.cache
def _said_of(path: Path, _contents: tuple[int, ...], *command: str) -> str:
    """Return what a program says of a file; whoever waits for something in a process asks many times."""
    return subprocess.run([*command, str(path)], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout


def load_bias(pid: int, path: Path) -> int:
    """Return the load bias of a file in a process, once it is mapped: the parent goes on in the midst of execve(2)."""
    ((offset, address, _),) = executable_segments(path)
    found: list[int] = []

    def is_mapped() -> bool:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            row = line.split()
            if row[-1] == str(path.resolve()) and "x" in row[1]:
                found.append(int(row[0].split("-")[0], 16) - int(row[2], 16) + offset - address)
                return True
        return False

    await_true(is_mapped, f"a mapping of {path}")
    return found[0]


def read_memory(pid: int, address: int, size: int) -> bytes:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        file.seek(address)
        return file.read(size)


def memory_at(pid: int, path: Path, symbol: str, size: int) -> bytes:
    return read_memory(pid, load_bias(pid, path) + symbols_of(path)[symbol], size)


def code_is_original(pid: int, path: Path) -> bool:
    """Return whether the code of a process is, byte for byte, what its file holds."""
    bias = load_bias(pid, path)
    data = path.read_bytes()
    return all(
        read_memory(pid, bias + address, size) == data[offset : offset + size]
        for offset, address, size in executable_segments(path)
    )


@contextlib.contextmanager
def running(*arguments: object, **popen: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program that is not probed from its start; it is gone at the end."""
    process = subprocess.Popen([str(a) for a in arguments], stdout=subprocess.PIPE, text=True, **popen)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(TIMEOUT)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def as_nobody() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def nobody_python() -> str:
    for candidate in (sys.executable, "/usr/bin/python3"):
        done = (
            subprocess.run(
                [candidate, "-c", "import sys; assert sys.version_info >= (3, 11)"],
                capture_output=True,
                user=NOBODY,
                cwd="/",
                check=False,
            )
            if os.access(candidate, os.X_OK) and readable_by_all(candidate)
            else None
        )
        if done is not None and done.returncode == 0:
            return candidate
    pytest.skip("no Python that an ordinary user may run")


def readable_by_all(path: str) -> bool:
    """Return whether all users may come to a file, by its path and by that to which its links lead."""
    directories = {*Path(path).absolute().parents, *Path(path).resolve().parents}
    return all(directory.stat().st_mode & 0o005 == 0o005 for directory in directories)
