"""What is said of a process that another one traces already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dprobes.engines import refusals
from dprobes.engines.refusals import RESTORER, check_traceable, is_dprobes
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRACED = """
import ctypes, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER_ANY
print("runs", flush=True)
sys.stdin.readline()
"""
TRACES = """
import ctypes, sys
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long] * 4
assert ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
print("traces", flush=True)
sys.stdin.readline()  # it lets go when it ends
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()


@contextmanager
def traced(*words: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Give the id of a process, and another process that traces it, with these words at the end of its command line."""
    with running(TRACED) as target, running(TRACES, str(target.pid), *words) as tracer:
        yield target.pid, tracer


def let_sleep(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], passed: float = 0) -> list[float]:
    """Have an action carried out where ``check_traceable`` sleeps, after which so much time has passed."""
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        action()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: time.monotonic() + passed * len(sleeps))
    monkeypatch.setattr(refusals, "time", clock)
    return sleeps


def test_a_restorer_of_ours_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(RESTORER) as (pid, restorer):
        assert restorer.stdin is not None
        end = restorer.stdin.close
        sleeps = let_sleep(monkeypatch, lambda: (end(), restorer.wait()))
        check_traceable(pid)
    assert len(sleeps) == 1


def test_a_restorer_that_stays_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(RESTORER) as (pid, restorer):
        sleeps = let_sleep(monkeypatch, lambda: None, passed=4)
        with pytest.raises(EngineError, match=f"is traced by process {restorer.pid} "):
            check_traceable(pid)
    assert len(sleeps) == 3


def test_a_restorer_of_another_user_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(RESTORER) as (pid, restorer):
        sleeps = let_sleep(monkeypatch, lambda: None)
        monkeypatch.setattr("dprobes.engines.refusals.os.geteuid", lambda: 4242)
        with pytest.raises(EngineError, match=f"is traced by process {restorer.pid} "):
            check_traceable(pid)
    assert sleeps == []


def test_another_tracer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced() as (pid, tracer):
        sleeps = let_sleep(monkeypatch, lambda: None)
        with pytest.raises(EngineError) as caught:
            check_traceable(pid)
        by = Path(f"/proc/{pid}/comm").read_text().strip()
    assert caught.value.message == f"process {pid} ({by}) is traced by process {tracer.pid} ({by}) already"
    assert caught.value.hint == "end that first: a process has one tracer"
    assert sleeps == []


@pytest.mark.parametrize("first", ["cat", "dprobes"])
def test_another_program_with_the_name_among_its_words_is_no_dprobes(tmp_path: Path, first: str) -> None:
    read = tmp_path / "dprobes"
    os.mkfifo(read)
    with subprocess.Popen([first, str(read)], executable=shutil.which("cat")) as process, read.open("w"):
        assert not is_dprobes(process.pid)


def test_a_python_that_runs_dprobes_is_one_unless_another_user_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "dprobes"
    script.write_text("print(flush=True); input()")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_dprobes(process.pid)
        monkeypatch.setattr("dprobes.engines.refusals.os.geteuid", lambda: 4242)
        assert not is_dprobes(process.pid)
        process.kill()
