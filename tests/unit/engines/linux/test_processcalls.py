"""Signals that a process waits for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dprobes.engines.linux.processcalls import take_signal

WAITS = """
import signal, sys
from dprobes.engines.linux.processcalls import take_signal
wanted = {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
for line in sys.stdin:
    print(take_signal(wanted, float(line)), flush=True)
"""


def test_a_signal_is_taken_once() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # others of the process do not block it
        assert take_signal({signal.SIGUSR1}, 0) == 0
        assert take_signal({signal.SIGUSR1, signal.SIGUSR2}, 5) == signal.SIGUSR2
        assert take_signal({signal.SIGUSR1, signal.SIGUSR2}, 0.001) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_time_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        take_signal({signal.SIGUSR1}, -1)


def test_a_stop_during_the_wait_makes_up_no_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "ready\n"
        for _ in range(3):
            waiter.stdin.write("0.2\n")
            waiter.stdin.flush()
            time.sleep(0.1)
            os.kill(waiter.pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(waiter.pid, signal.SIGCONT)
            assert waiter.stdout.readline() == "0\n"
        os.kill(waiter.pid, signal.SIGHUP)
        waiter.stdin.write("5\n")
        waiter.stdin.close()
        assert waiter.stdout.readline() == f"{int(signal.SIGHUP)}\n"
