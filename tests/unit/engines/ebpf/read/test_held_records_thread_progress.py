"""Where a thread is, as the kernel shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from dprobes.engines.ebpf.read.held_records import BEYOND, progress

SPIN = "print('ready', flush=True)\nwhile True: pass"


def test_a_thread_that_sleeps_in_a_system_call_is_beyond() -> None:
    with subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 20
        while progress(process.pid) != BEYOND:
            assert time.monotonic() < until
        process.kill()


def test_a_thread_that_has_ended_is_beyond() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert progress(process.pid) == BEYOND


def test_a_thread_is_beyond_when_it_has_run_for_some_time() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mark = progress(process.pid)
        assert mark != BEYOND
        until = time.monotonic() + 20
        while progress(process.pid, mark) != BEYOND:
            assert time.monotonic() < until
        # One that is stopped goes on with nothing.
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        mark = progress(process.pid)
        assert mark != BEYOND
        assert progress(process.pid, mark) == mark
        process.kill()
