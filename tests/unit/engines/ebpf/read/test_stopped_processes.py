"""Processes that a handler has stopped: what becomes of each."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.core_stop_layout import COUNT, FIRST, STOPS_SIZE
from dprobes.engines.command_launcher import Debuggers
from dprobes.engines.ebpf.read.held_records import Ended
from dprobes.engines.ebpf.read.stopped_processes import DEBUGGER, StoppedProcesses
from dprobes.engines.engine_interface import Notice
from dprobes.rpn.program_needs import CORE_DUMP
from integration.support import await_true, kernel_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.engine_interface import Event


@pytest.fixture
def stopped() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        time.sleep(0.05)  # longer than the ticks in which a start is measured
        process.send_signal(signal.SIGSTOP)
        await_true(lambda: kernel_state(process.pid) == "T", "the stop")
        yield process.pid
        process.kill()


@pytest.fixture
def noted() -> Iterator[int]:
    """A list of stops, in which nothing is."""
    descriptor = os.memfd_create("stops")
    os.ftruncate(descriptor, 2 * STOPS_SIZE)  # whole pages are mapped
    yield descriptor
    os.close(descriptor)


def taken(tmp_path: Path, pid: int, reason: int, noted: int) -> str:
    """Return what is said of a process without a debugger, and where no core file can be made."""
    processes = StoppedProcesses(Debuggers(None, keep_input=False), str(tmp_path / "missing"), lambda _: {})
    processes.begin(noted)
    (notice,) = processes.take(Ended(0, reason, pid, pid))
    assert isinstance(notice, Notice)
    assert processes.is_idle
    processes.close()
    return notice.message


def test_exit_1_leaves_a_process_to_the_debugger(tmp_path: Path, stopped: int, noted: int) -> None:
    said = taken(tmp_path, stopped, DEBUGGER, noted)
    assert f"process {stopped} (" in said
    assert "core" not in said
    assert kernel_state(stopped) == "T"


def test_exit_3_asks_for_its_core(tmp_path: Path, stopped: int, noted: int) -> None:
    os.pwrite(noted, struct.pack("=IIQ", stopped, 0, time.monotonic_ns()), FIRST)
    os.pwrite(noted, struct.pack("=Q", 1), COUNT)
    assert f"no core of process {stopped} (sleep) in " in taken(tmp_path, stopped, CORE_DUMP, noted)
    await_true(lambda: kernel_state(stopped) == "S", "its going on")


def test_a_process_that_could_not_be_stopped_has_no_core(tmp_path: Path, stopped: int, noted: int) -> None:
    said = taken(tmp_path, stopped, CORE_DUMP, noted)
    assert said == f"no core of process {stopped} (sleep): too many others are stopped; it has continued"


def test_a_guard_that_cannot_live_is_reported_once(tmp_path: Path, noted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    processes = StoppedProcesses(Debuggers(None, keep_input=False), str(tmp_path), lambda _: {})
    processes.begin(noted)
    said: list[Event] = []

    def look() -> bool:
        said.extend(processes.look())
        return bool(said)

    await_true(look, "the notice")
    time.sleep(0.6)
    said += processes.look()
    (notice,) = said
    assert isinstance(notice, Notice)
    assert "ends again and again" in notice.message
    processes.close()
