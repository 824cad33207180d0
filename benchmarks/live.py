"""
Measure what handlers cost in a process that runs, beside Frida and uftrace on the same functions, in one run.

The program measures its own calls: what is shown is the fastest of many rounds with a probe above the fastest without,
and for the function that is not probed what a call of it takes then. Frida's callback is in C (CModule), the fastest
that it has; uftrace needs a program that is compiled for it, and records entry and return with the time. A uprobe is
measured where the kernel emulates the instruction, which is where it costs least.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from table import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["live"]

HERE = Path(__file__).parent
SETTLING = 0.3
SECONDS = 3.0
PATIENCE = 90.0
"""Seconds that a tool may take to attach."""

WORDS = "push r, rdi\npush r, rsi\npush r, rdx\npush r, rcx\nlog 4\nexit\n"
HANDLERS = (
    ("an empty handler", "abort\n", "empty"),
    ("a count", "push 1\ntally c\nabort\n", "count"),
    ("a record of 4 words, with the time", WORDS, "words"),
)
STACK = "log ustack\nexit\n"
MORE = (
    ("a count under a condition", "push r, rdi\npush 1\njge other\nabort\nother:\npush 1\ntally c\nabort\n"),
    ("a value counted by one of 8 keys", "push r, rdi\npush 7\nand\npush 1\ntally by\nabort\n"),
    ("a record of a string of 20 bytes", "push 64\npush r, rcx\nlog str\nexit\n"),
)


class Costs(NamedTuple):
    """Say what a call takes in nanoseconds: of the probed function, and of the other one."""

    hot: float
    cold: float


class _Program:
    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def costs(self, seconds: float = SECONDS) -> Costs:
        """Return the fastest calls of what is printed from now on, for some seconds."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        until = time.monotonic() + SETTLING
        while time.monotonic() < until and select.select([descriptor], [], [], SETTLING)[0]:
            os.read(descriptor, 1 << 16)
        text, until = b"", time.monotonic() + seconds
        while time.monotonic() < until and select.select([descriptor], [], [], seconds)[0]:
            text += os.read(descriptor, 1 << 16)
        rows = [tuple(map(float, line.split())) for line in text.splitlines()[1:-1]]
        return Costs(min(row[0] for row in rows), min(row[1] for row in rows))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def _running(*command: object) -> Iterator[_Program]:
    program = _Program([str(each) for each in command])
    try:
        yield program
    finally:
        program.end()


def _await(process: subprocess.Popen[bytes], text: bytes) -> bool:
    """Wait until a tool has said something; return False if it ends without."""
    stream = process.stdout
    assert stream is not None
    said, until = b"", time.monotonic() + PATIENCE
    while text not in said and time.monotonic() < until:
        if select.select([stream], [], [], 1)[0]:
            if not (more := os.read(stream.fileno(), 1 << 12)):
                return False
            said += more
    return text in said


def _attached(command: list[str], says: bytes, program: _Program) -> Costs | None:
    """Return the costs while a tool is attached, None if it cannot be."""
    tool = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        return program.costs() if _await(tool, says) else None
    finally:
        assert tool.stdin is not None
        assert tool.stdout is not None
        tool.stdin.close()
        tool.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tool.wait(PATIENCE)
        tool.kill()
        tool.wait()
        tool.stdout.close()


def _ours(path: Path, handler: str, engine: str = "inline") -> tuple[Costs | None, Costs]:
    source = path.parent / "live.rpn"
    tables = "table = c, sum\ntable = by, sum, word\n"
    source.write_text(f"name = {path.name}\nlogmax = 64\n{tables}offset = hot\nminor = 1\n{handler}")
    command = [sys.executable, "-m", "dprobes", "run", str(source), "--engine", engine, "-o", os.devnull, "-p"]
    with _running(path) as program:
        bare = program.costs()
        return _attached([*command, str(program.process.pid)], b"active", program), bare


def _frida(path: Path, what: str) -> float | None:
    if importlib.util.find_spec("frida") is None:
        return None
    symbols = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"^([0-9a-f]+) \w hot$", symbols, re.MULTILINE)
    assert found is not None
    with _running(path) as program:
        bare = program.costs()
        command = [sys.executable, str(HERE / "peer_frida.py"), str(program.process.pid), f"0x{found[1]}", what]
        costs = _attached(command, b"ready", program)
    return None if costs is None else costs.hot - bare.hot


def _uftrace(path: Path, directory: Path) -> float | None:
    if shutil.which("uftrace") is None:
        return None
    compiled = directory / "called_pg"
    subprocess.run(["gcc", "-O2", "-pg", "-o", compiled, HERE / "called.c"], check=True)
    with _running(path) as program:
        bare = program.costs()
    data = directory / "uftrace.data"
    with _running("uftrace", "record", "--no-libcall", "-d", data, compiled) as program:
        costs = program.costs()
        for child in Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    return costs.hot - bare.hot


def _beside_a_uprobe(directory: Path) -> Measurement:
    """Return the row about an instruction that the kernel emulates, at the entry of the function."""
    marked = directory / "called_marked"
    subprocess.run(["gcc", "-O2", "-fpatchable-function-entry=1", "-o", marked, HERE / "called.c"], check=True)
    costs, bare = _ours(marked, "abort\n")
    ours = None if costs is None else (costs.hot - bare.hot) / 1000
    figure = None
    if os.geteuid() == 0:
        costs, bare = _ours(marked, "abort\n", "ebpf")
        figure = None if costs is None else (costs.hot - bare.hot) / 1000
    return Measurement("an empty handler at a nop", ours, "uprobe, emulated", figure)


def live(directory: Path) -> list[Measurement]:
    """Measure all handlers."""
    path = directory / "called"
    subprocess.run(["gcc", "-O2", "-o", path, HERE / "called.c"], check=True)
    rows: list[Measurement] = []
    untouched: list[tuple[float, float]] = []
    for what, handler, of_frida in HANDLERS:
        costs, bare = _ours(path, handler)
        ours = None if costs is None else (costs.hot - bare.hot) / 1000
        if costs is not None:
            untouched.append((costs.cold, bare.cold))
        theirs = _frida(path, of_frida)
        figure = None if theirs is None else theirs / 1000
        rows.append(Measurement(f"in a live process, above a call: {what}", ours, "Frida, CModule", figure))
    words = rows[-1].ours
    for what, handler in MORE:
        costs, bare = _ours(path, handler)
        ours = None if costs is None else (costs.hot - bare.hot) / 1000
        rows.append(Measurement(f"in a live process, above a call: {what}", ours))
    rows.append(_beside_a_uprobe(directory))
    theirs = _uftrace(path, directory)
    if theirs is not None:
        rows.append(Measurement("the same record", words, "uftrace, entry and return", theirs / 1000))
    costs, bare = _ours(path, STACK)
    ours = None if costs is None else (costs.hot - bare.hot) / 1000
    rows.append(Measurement("a record with the call stack, followed later", ours, "that of 4 words", words))
    if untouched:
        with_probe, without = (min(figures) / 1000 for figures in zip(*untouched, strict=True))
        rows.append(Measurement("a call of a function beside it, while attached", with_probe, "not attached", without))
    return rows
