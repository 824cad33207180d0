"""
Connections to a stub: TCP, a Unix socket, a serial line, or the input and output of a command.

::

    HOST:PORT    /path/to/socket    /dev/ttyS0[,SPEED]    |command
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dprobes.engines.gdb.remote_protocol import INTERRUPT, MessageKind, PacketReader, packet
from dprobes.errors import EngineError, reason_of

if TYPE_CHECKING:
    from typing import Any

__all__ = ["ConnectionLostError", "DebuggerRelay", "Transport", "adopted_transport", "open_transport"]

_CONNECTION_PATIENCE = 5.0
"""Maximum number of seconds to wait for a connection: a stub that was just started may not listen yet."""
_RETRY: Final = 0.05
_CHUNK = 1 << 16
_SPEED = 115200
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid and gid


class ConnectionLostError(EngineError):
    """Error for the end of an established connection."""


class Transport(ABC):
    """Connection, for one thread at a time. If it is not ``is_reliable``, data may be damaged."""

    name: str
    is_reliable = True
    peer = ""
    """Name of the program at the other end of a Unix socket, which receives packets sent together at once; else ""."""
    can_be_shared = True
    """True if another process can use its descriptor for both directions."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that is readable when data has arrived."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send all of ``data``; raise ``EngineError`` if the connection has ended."""

    @abstractmethod
    def _read(self) -> bytes:
        """Return the received data, b"" at the end of the connection; raise OSError if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def receive(self, timeout: float) -> bytes | None:
        """
        Return the received data, or None if none arrives within ``timeout`` seconds.

        Raise ``EngineError`` if the connection has ended.
        """
        readable, _, _ = select.select([self.fileno()], [], [], max(0.0, timeout))
        if not readable:
            return None
        try:
            data = self._read()
        except OSError as error:
            raise self._failed(error) from None
        if not data:
            raise self._closed()
        return data

    def _closed(self) -> ConnectionLostError:
        return ConnectionLostError(f"the stub {self.name} has closed the connection")

    def _failed(self, error: OSError) -> ConnectionLostError:
        if error.errno in (errno.ECONNRESET, errno.EPIPE):  # with unread data, or with data under way to it
            return self._closed()
        return ConnectionLostError(f"the connection to the stub {self.name} has failed: {reason_of(error)}")


class _Socket(Transport):
    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self._connection = connection
        self.peer = _peer_of(connection)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise self._failed(error) from None

    def _read(self) -> bytes:
        return self._connection.recv(_CHUNK)

    def close(self) -> None:
        self._connection.close()


def _peer_of(connection: socket.socket) -> str:
    """Return the name of the program that listens at a Unix socket, "" if that is unknown."""
    try:
        if connection.family != socket.AF_UNIX:
            return ""
        pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
            return name.read().rstrip("\n")
    except OSError:
        return ""


class _Line(Transport):
    """Connection to a stub by a serial line (a tty)."""

    is_reliable = False

    def __init__(self, name: str, port: Any) -> None:
        self.name = name
        self._port = port

    def fileno(self) -> int:
        number: int = self._port.fileno()
        return number

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                select.select([], [self.fileno()], [])
                view = view[os.write(self.fileno(), view) :]
        except OSError as error:
            raise self._failed(error) from None

    def _read(self) -> bytes:
        return os.read(self.fileno(), _CHUNK)

    def close(self) -> None:
        self._port.close()


class _Command(Transport):
    """A command whose input and output are the connection."""

    can_be_shared = False

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def fileno(self) -> int:
        return self._output.fileno()

    def send(self, data: bytes) -> None:
        try:
            self._input.write(data)
            self._input.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _read(self) -> bytes:
        return os.read(self.fileno(), _CHUNK)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_CONNECTION_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._output.close()


def open_transport(endpoint: str, patience: float = _CONNECTION_PATIENCE) -> Transport:
    """Return a connection to a stub; raise ``EngineError`` if there is none within ``patience`` seconds."""
    if endpoint.startswith("|"):
        return _start(endpoint)
    path, _, speed = endpoint.partition(",")
    if endpoint.startswith("/"):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.stat(path).st_mode):
                return _open_line(endpoint, path, speed)
        return _Socket(endpoint, _connect(endpoint, socket.AF_UNIX, endpoint, patience))
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal() or int(port) >= 1 << 16:
        raise EngineError(
            f"'{endpoint}' does not name a stub",
            hint="write HOST:PORT, the path of a socket or serial line, or |COMMAND",
        )
    address = host.strip("[]") or "localhost", int(port)
    connection = _connect(endpoint, None, address, patience)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Socket(endpoint, connection)


def adopted_transport(descriptor: int) -> Transport:
    """Return the connection with a descriptor that was inherited from another process."""
    name = "that was left"
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return _Socket(name, socket.socket(fileno=descriptor))
    return _Line(name, os.fdopen(descriptor, "r+b", buffering=0))


def _connect(endpoint: str, family: int | None, address: str | tuple[str, int], patience: float) -> socket.socket:
    """Return a connected socket; wait up to ``patience`` seconds for a server that does not listen yet."""
    deadline = time.monotonic() + patience
    while True:
        try:
            if isinstance(address, tuple):
                return socket.create_connection(address, timeout=patience)
            assert family is not None
            connection = socket.socket(family)
            try:
                connection.connect(address)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            is_hopeless = error.errno not in (errno.ECONNREFUSED, errno.ENOENT, errno.EAGAIN)
            if is_hopeless or time.monotonic() > deadline:
                raise EngineError(f"there is no stub at {endpoint}: {reason_of(error)}") from None
            time.sleep(_RETRY)
        else:
            return connection


def _open_line(endpoint: str, path: str, speed: str) -> Transport:
    if speed and not speed.isdecimal():
        raise EngineError(f"'{speed}' is not a speed of a serial line", hint=f"write {path},{_SPEED}")
    try:
        serial = importlib.import_module("serial")
    except ImportError:
        raise EngineError("a serial line needs pyserial", hint="pip install 'dprobes[serial]'") from None
    try:
        return _Line(endpoint, serial.Serial(path, int(speed or _SPEED), timeout=0))
    except OSError as error:
        raise EngineError(f"the serial line {path} cannot be used: {reason_of(error)}") from None


def _start(endpoint: str) -> Transport:
    command = shlex.split(endpoint[1:])
    if not command:
        raise EngineError("no command follows '|'", hint="write |gdbserver - PROGRAM, for instance")
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    except OSError as error:
        raise EngineError(f"'{command[0]}' cannot be started: {reason_of(error)}") from None
    return _Command(endpoint, process)


# Most stubs resume or kill their target when the connection ends: so the connection must remain. GDB acknowledges
# packets until it has agreed with the stub not to. If this process has agreed on that before, the relay itself
# acknowledges GDB's packets, and discards GDB's acknowledgements.


_NO_ACKNOWLEDGEMENTS = b"QStartNoAckMode"


class DebuggerRelay:
    """
    Relay at a socket ``path`` through which GDB takes over a stub's connection, in both directions.

    The target of the stub at the other end of ``transport`` is stopped, and no reply is outstanding. ``acknowledges``
    is True if packets are acknowledged there. When the debugger disconnects, the caller must close the stub's
    connection. ``has_served`` is True if a debugger was connected, and has resumed or killed the target as it liked.
    """

    def __init__(self, transport: Transport, *, acknowledges: bool) -> None:
        self._transport = transport
        self._stub_acknowledges = acknowledges
        self._directory = tempfile.mkdtemp(prefix="dprobes-stub-")
        self.path = Path(self._directory) / "gdb"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._debugger: socket.socket | None = None
        self._acknowledges = not acknowledges
        """True if the relay acknowledges a debugger's packets."""
        self._reader = PacketReader()
        self.has_served = False

    @property
    def is_serving(self) -> bool:
        """True while a debugger is connected to the relay."""
        return self._debugger is not None

    def serve(self, timeout: float) -> bool:
        """Relay the first data that arrives within ``timeout`` seconds; return False once a connection has ended."""
        near = self._listener if self._debugger is None else self._debugger
        sources: list[socket.socket | Transport] = [near, self._transport]
        for readable in select.select(sources, [], [], timeout)[0]:
            if readable is self._listener:
                self._accept()
            elif readable is self._transport:
                try:
                    data = self._transport.receive(0)
                except ConnectionLostError:
                    return False
                if data is not None and self._debugger is not None:
                    self._send(data)
            elif not self._take():
                return False  # as if it had been connected to the stub itself
        return True

    def close(self) -> None:
        """Close the socket and the debugger's connection; the stub's connection remains open."""
        self._leave()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        self._debugger, _ = self._listener.accept()
        self.has_served = True
        self._acknowledges = not self._stub_acknowledges
        self._reader = PacketReader()

    def _leave(self) -> None:
        debugger, self._debugger = self._debugger, None
        if debugger is not None:
            debugger.close()

    def _take(self) -> bool:
        """Relay data from the debugger; return True if it is still connected."""
        assert self._debugger is not None, "it was readable"
        try:
            data = self._debugger.recv(_CHUNK)
        except OSError:
            return False
        try:
            self._pass_on(data)
        except ConnectionLostError:  # the stub has ended; the debugger acknowledges its last packet
            self._pass_last_words()
            return False
        return bool(data)

    def _pass_on(self, data: bytes) -> None:
        """Forward bytes that the debugger has sent to the stub."""
        if not self._acknowledges:
            self._transport.send(data)
            return
        if data == INTERRUPT:
            self._transport.send(data)
        for message in self._reader.feed(data):
            if message.kind is MessageKind.PACKET:
                self._send(b"+")
                self._acknowledges &= message.payload != _NO_ACKNOWLEDGEMENTS
                self._transport.send(packet(message.payload))

    def _pass_last_words(self) -> None:
        """Send the debugger what the stub sent before it ended."""
        with contextlib.suppress(ConnectionLostError):
            while self._debugger is not None and (data := self._transport.receive(0)):
                self._send(data)

    def _send(self, data: bytes) -> None:
        assert self._debugger is not None, "it is there"
        try:
            self._debugger.sendall(data)
        except OSError:
            self._leave()
