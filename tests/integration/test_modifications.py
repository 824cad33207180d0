"""
Prototype a change of a system without changing it: what a program asks its libraries for is rewritten in flight.

Each test has the run without probes as its control; the programs are those of the system, and what they print or send
shows what was done.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from integration.support import Result, Runner


def without(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout


def modified(run: Runner, source: str, command: Sequence[str]) -> Result:
    result = run(f'name = "libc.so.6"\n{source}', ["--exit-status", "--", *command], ["--allow-write"])
    assert result.status == 0, result.stderr
    return result


# The last eight bytes of a path are compared with "original"; then "modified" is written in their place.
OTHER_PATH = """
offset = open
minor = 1
    push r, arg0
    push {distance}
    add
    push mem, u64
    push {original}
    sub
    jnz other
    push r, arg0
    push {distance}
    add
    push {modified}
    pop mem, u64
    push 1
    log 1
    exit
other:
    abort
"""


def test_open_is_sent_to_another_path(run: Runner, tmp_path: Path) -> None:
    for name in ("original", "modified"):
        (tmp_path / name).write_text(f"this is the {name} file\n")
    command = ["cat", str(tmp_path / "original")]
    assert without(command) == "this is the original file\n"
    values = {name: int.from_bytes(name.encode(), "little") for name in ("original", "modified")}
    source = OTHER_PATH.format(distance=len(os.fsencode(tmp_path)) + 1, **values)
    result = modified(run, source, command)
    assert result.stdout == "this is the modified file\n"
    assert result.counts[1].records == len(result.records) == 1
    assert without(command) == "this is the original file\n"


# struct sockaddr_in: u16 family, u16 port in network order.
OTHER_PORT = """
offset = connect
minor = 1
    push r, arg1
    push 2
    add
    push mem, u16
    push {original}
    sub
    jnz other
    push r, arg1
    push 2
    add
    push {modified}
    pop mem, u16
    push r, arg0
    log 1
    exit
other:
    abort
"""


@pytest.fixture
def greeting_ports() -> Iterator[tuple[int, int]]:
    """Listen on two ports, and greet whoever connects with the number of the port."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            threading.Thread(target=greet, args=(listener,), daemon=True).start()
        yield first.getsockname()[1], second.getsockname()[1]
        for listener in (first, second):
            listener.shutdown(socket.SHUT_RDWR)


def greet(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(f"port {listener.getsockname()[1]}\n".encode())


def test_connect_is_sent_to_another_port(run: Runner, greeting_ports: tuple[int, int]) -> None:
    original, other = greeting_ports
    command = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{original}; read line <&3; echo $line"]
    assert without(command) == f"port {original}\n"
    source = OTHER_PORT.format(original=socket.htons(original), modified=socket.htons(other))
    result = modified(run, source, command)
    assert result.stdout == f"port {other}\n"
    assert result.counts[1].records == len(result.records) == 1
    assert without(command) == f"port {original}\n"


OTHER_SIZE = """
offset = malloc
minor = 1
    push r, arg0
    push 123457
    sub
    jnz other
    push 654321
    pop r, arg0
    push r, arg0
    log 1
    exit
other:
    abort
"""


def test_malloc_gets_another_size(run: Runner) -> None:
    code = (
        "import ctypes; c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p\n"
        "c.malloc_usable_size.argtypes = [ctypes.c_void_p]; c.malloc_usable_size.restype = ctypes.c_size_t\n"
        "print(c.malloc_usable_size(c.malloc(ctypes.c_size_t(123457))) // 1000)"
    )
    command = [sys.executable, "-c", code]
    assert without(command) == "123\n"
    result = modified(run, OTHER_SIZE, command)
    # malloc maps a block of this size by itself and rounds it up to pages.
    assert 654 <= int(result.stdout) <= 654 + 5
    assert [words[0] for words in result.words(1)] == [654321]
    assert without(command) == "123\n"
