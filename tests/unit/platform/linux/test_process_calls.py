"""Signals that a process waits for itself, and files of other processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.call_proxy import call_with_file
from dprobes.platform.linux.process_calls import (
    same_file,
    send_file,
    signal_set,
    socket_timeout,
    take_signal,
    terminal_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAITS = """
import signal, sys
from dprobes.platform.linux.process_calls import signal_set, take_signal
wanted = {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
for line in sys.stdin:
    print(take_signal(signal_set(wanted), float(line)), flush=True)
"""


def test_a_signal_is_taken_once() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # others of the process do not block it
        assert take_signal(signal_set({signal.SIGUSR1}), 0) == 0
        assert take_signal(signal_set({signal.SIGUSR1, signal.SIGUSR2}), 5) == signal.SIGUSR2
        assert take_signal(signal_set({signal.SIGUSR1, signal.SIGUSR2}), 0.001) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_time_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        take_signal(signal_set({signal.SIGUSR1}), -1)


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


# Files of other processes

SYS_READ, SYS_GETPID = 0, 39


@contextlib.contextmanager
def owner_of(*files: int) -> Iterator[int]:
    """A process that has copies of some files, under the same numbers, when we may have closed ours."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_file_is_sent_through_a_socket_of_another_process() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver, owner_of(receiver.fileno()) as owner:
        file = os.memfd_create("sent")
        try:
            send_file(owner, owner, receiver.fileno(), file)
            _, (received,), _, _ = socket.recv_fds(receiver, 1, 1)
            assert same_file(file, os.getpid(), received) in (True, None)
            assert same_file(file, os.getpid(), receiver.fileno()) in (False, None)
            os.close(received)
        finally:
            os.close(file)


def _pair() -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1000), socket.MSG_DONTWAIT)
    theirs.detach()
    return ours.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach(),
        lambda: os.pipe()[1],
        _pair,
    ],
    ids=["device", "TCP", "pipe", "a socket whose peer does not read"],
)
def test_another_file_in_the_place_of_the_socket_is_an_error(make: Callable[[], int]) -> None:
    number = make()
    with owner_of(number) as owner, pytest.raises(OSError, match=r"\w"):
        send_file(owner, owner, number, 0)
    os.close(number)


def test_a_file_that_lets_us_wait_is_left_alone() -> None:
    empty, writer = os.pipe()
    with owner_of(empty) as owner:
        process = os.pidfd_open(owner)
        buffer = bytearray(8)
        at = (ctypes.c_char * 8).from_buffer(buffer)

        def read(taken: int) -> list[tuple[int, ...]]:
            return [(SYS_READ, taken, ctypes.addressof(at), 8)]

        with pytest.raises(TimeoutError):
            call_with_file(process, empty, read, memory=[buffer])
        assert call_with_file(process, empty, lambda _: [(SYS_GETPID,)])[0] > 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            call_with_file(process, 1 << 20, read)
        os.close(process)
    os.close(empty)
    os.close(writer)


def test_the_timeout_of_a_socket_is_that_of_its_owner() -> None:
    with socket.socket(socket.AF_UNIX) as local, socket.socket() as other, owner_of() as owner:
        local.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 500_000))
        assert socket_timeout(owner, owner, local.fileno(), sending=False) == (3.5, True)
        assert socket_timeout(owner, owner, local.fileno(), sending=True) == (0.0, True)
        assert socket_timeout(owner, owner, other.fileno(), sending=False) == (0.0, False)
        with pytest.raises(OSError, match="socket"):
            socket_timeout(owner, owner, 0, sending=False)


def test_the_modes_of_a_terminal_are_those_that_it_has() -> None:
    leader, terminal = os.openpty()
    nothing = os.open("/dev/null", os.O_RDONLY)
    with owner_of(terminal, nothing) as owner:
        attributes = termios.tcgetattr(terminal)
        modes, characters = terminal_modes(owner, owner, terminal)
        assert modes == attributes[3]
        assert characters[termios.VTIME : termios.VTIME + 1] == attributes[6][termios.VTIME]
        with pytest.raises(OSError, match="ioctl"):
            terminal_modes(owner, owner, nothing)
    for file in (leader, terminal, nothing):
        os.close(file)
