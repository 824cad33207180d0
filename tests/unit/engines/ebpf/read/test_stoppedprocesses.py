"""Processes that a handler has stopped: what becomes of each."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.debugger import Debuggers
from dprobes.engines.ebpf.read.heldrecords import Ended
from dprobes.engines.ebpf.read.stoppedprocesses import CORE_DUMP, DEBUGGER, StoppedProcesses
from dprobes.engines.interface import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stopped() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process.pid
        process.kill()


def taken(tmp_path: Path, pid: int, reason: int) -> str:
    """Return what is said of a process without a debugger, and where no core file can be made."""
    processes = StoppedProcesses(Debuggers(None, keep_input=False), str(tmp_path / "missing"), lambda _: {})
    (notice,) = processes.take(Ended(0, reason, pid, pid))
    assert isinstance(notice, Notice)
    assert processes.is_idle
    return notice.message


def test_exit_1_leaves_a_process_to_the_debugger(tmp_path: Path, stopped: int) -> None:
    assert f"process {stopped} (" in taken(tmp_path, stopped, DEBUGGER)
    assert "core" not in taken(tmp_path, stopped, DEBUGGER)


def test_exit_3_asks_for_its_core(tmp_path: Path, stopped: int) -> None:
    assert f"no core of process {stopped} (" in taken(tmp_path, stopped, CORE_DUMP)
