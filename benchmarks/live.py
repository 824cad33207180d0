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
    with _running(path) as program:
        bare = program.costs()
        command = [sys.executable, str(HERE / "peer_frida.py"), str(program.process.pid), _offset_of_hot(path), what]
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


CHANGES = 100
"""Number of times that a function is patched and restored."""


def _patches(directory: Path) -> list[Measurement]:
    """
    Return the rows about live patches: a call of a patched function, and a patch with its removal.

    The program is one whose callers rely on no registers that the function happens to preserve.
    """
    from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch

    path = directory / "called_patched"
    subprocess.run(["gcc", "-O2", "-fno-ipa-ra", "-o", path, HERE / "called.c"], check=True)
    replacement = directory / "replacement.so"
    flags = ("-O2", "-shared", "-fPIC", "-nostartfiles")
    subprocess.run(["gcc", *flags, "-o", replacement, HERE / "replacement.c"], check=True)
    changes, stops = [], []
    with _running(path) as program:
        bare = program.costs()
        planned = plan_patch(program.process.pid, replacement, "hot", None, None)
        for _ in range(CHANGES):
            begin = time.monotonic()
            inserted = insert_patch(planned)
            remove_patch(program.process.pid, inserted.record)
            changes.append(time.monotonic() - begin)
            stops.append(inserted.seconds)
        costs = []
        for symbol in ("hot", "same"):
            inserted = insert_patch(plan_patch(program.process.pid, replacement, symbol, "hot", None))
            costs.append((program.costs().hot - bare.hot) / 1000)
            remove_patch(program.process.pid, inserted.record)
    theirs = _frida_replacement(path)
    call, change = (None, None) if theirs is None else theirs
    middle = sorted(changes)[CHANGES // 2] * 1e6, sorted(stops)[CHANGES // 2] * 1e6
    return [
        Measurement("a patch that counts its calls, above a call", costs[0], "Frida, replaceFast", call),
        Measurement("a patch that calls the original, above a call", costs[1]),
        Measurement("patch a function and restore it", middle[0], "Frida, replaceFast and revert", change),
        Measurement("of that, the threads stand still for the patch", middle[1]),
    ]


def _frida_replacement(path: Path) -> tuple[float, float] | None:
    """Return the microseconds of a call of a function that Frida replaces, above the bare call, and of a change."""
    if importlib.util.find_spec("frida") is None:
        return None
    with _running(path) as program:
        bare = program.costs()
        command = [sys.executable, str(HERE / "peer_frida.py"), str(program.process.pid), _offset_of_hot(path)]
        tool = subprocess.Popen([*command, "replace"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert tool.stdout is not None
        assert tool.stdin is not None
        try:
            said = tool.stdout.readline().split()
            hot = program.costs().hot
        finally:
            tool.stdin.close()
            tool.wait(PATIENCE)
            tool.stdout.close()
    if len(said) < 2 or said[0] != b"microseconds":
        return None
    return (hot - bare.hot) / 1000, float(said[1])


def _offset_of_hot(path: Path) -> str:
    symbols = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"^([0-9a-f]+) \w hot$", symbols, re.MULTILINE)
    assert found is not None
    return f"0x{found[1]}"


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
    rows += _patches(directory)
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
