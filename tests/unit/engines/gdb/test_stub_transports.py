"""Stubs are reached by TCP, by a socket, by a terminal line, and through a command, or it is said why not."""

from __future__ import annotations

import os
import pty
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path


def echo(server: socket.socket) -> threading.Thread:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(100).upper())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_sockets(tmp_path: Path, family: str) -> None:
    if family == "tcp":
        server = socket.create_server(("localhost", 0))
        endpoint = f"localhost:{server.getsockname()[1]}"
    else:
        endpoint = str(tmp_path / "stub")
        server = socket.socket(socket.AF_UNIX)
        server.bind(endpoint)
        server.listen()
    with server:
        thread = echo(server)
        transport = open_transport(endpoint)
        assert transport.is_reliable
        assert transport.name == endpoint
        transport.send(b"hello")
        assert transport.receive(5) == b"HELLO"
        thread.join()
        with pytest.raises(EngineError) as caught:
            transport.receive(5)
        assert caught.value.message == f"the stub {endpoint} has closed the connection"
        transport.close()


def test_a_stub_that_listens_a_little_later(tmp_path: Path) -> None:
    endpoint = str(tmp_path / "stub")

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(endpoint)
            server.listen()
            echo(server).join()

    timer = threading.Timer(0.3, listen)
    timer.start()
    transport = open_transport(endpoint)
    transport.send(b"late")
    assert transport.receive(5) == b"LATE"
    transport.close()
    timer.join()


def test_a_line() -> None:
    pytest.importorskip("serial", reason="pyserial is not installed")
    ours, theirs = pty.openpty()
    transport = open_transport(f"{os.ttyname(theirs)},57600")
    assert not transport.is_reliable
    transport.send(b"ping")
    assert os.read(ours, 100) == b"ping"
    os.write(ours, b"pong")
    assert transport.receive(5) == b"pong"
    assert transport.receive(0.01) is None
    transport.close()
    os.close(ours)
    os.close(theirs)


def test_a_command() -> None:
    transport = open_transport("|cat -u")
    transport.send(b"hello")
    assert transport.receive(5) == b"hello"
    transport.close()


@pytest.mark.parametrize(
    ("endpoint", "problem", "hint"),
    [
        (
            "nonsense",
            "'nonsense' does not name a stub",
            "write HOST:PORT, the path of a socket or serial line, or |COMMAND",
        ),
        (
            "host:99999",
            "'host:99999' does not name a stub",
            "write HOST:PORT, the path of a socket or serial line, or |COMMAND",
        ),
        ("|", "no command follows '|'", "write |gdbserver - PROGRAM, for instance"),
        ("|/no/such/command", "'/no/such/command' cannot be started: no such file or directory", None),
        ("/dev/null,fast", "'fast' is not a speed of a serial line", "write /dev/null,115200"),
        ("/no/such/socket", "there is no stub at /no/such/socket: no such file or directory", None),
    ],
)
def test_what_is_no_stub(endpoint: str, problem: str, hint: str | None) -> None:
    with pytest.raises(EngineError) as caught:
        open_transport(endpoint, patience=0.05)
    assert (caught.value.message, caught.value.hint) == (problem, hint)
