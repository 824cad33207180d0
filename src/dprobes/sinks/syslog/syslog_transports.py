"""
Transports to a syslog server: datagrams (a local socket, or UDP: RFC 5426), and streams (TCP: RFC 6587, TLS: RFC 5425).

In a stream, each message is preceded by its length (octet counting), so line ends have no meaning. TCP acknowledges
data that the other machine has received. Messages that are not acknowledged when a connection breaks are counted as
lost. The sender cannot know which received messages no program has read. UDP reports nothing at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dprobes.errors import RecordsRefusedError, SinkError, reason_of, reason_of_number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Datagrams", "Stream", "Tls"]

_CONNECTING = 10.0
"""Timeout of a connection attempt in seconds."""

_PATIENCE = 30.0
"""Seconds without progress after which sending to a server fails; the records stay in the queue meanwhile."""

_GOODBYE = 5.0
"""Seconds without an acknowledgement at the end after which messages are given up."""

_SILENCE_MS = 30_000
"""Milliseconds without an acknowledgement after which the kernel closes the connection (TCP_USER_TIMEOUT)."""

_CHUNK = 1 << 14
"""Maximum size of a single send in bytes: a TLS record."""

_BYTES_ACKED = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in struct tcp_info (include/uapi/linux/tcp.h)."""


class Datagrams:
    """A socket that sends each message as a datagram, to a path or to a host and port."""

    def __init__(self, name: str, address: str | tuple[str, int]) -> None:
        self._name = name
        self._socket = self._local(address) if isinstance(address, str) else self._remote(*address)

    def _local(self, path: str) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        end.settimeout(_PATIENCE)
        try:
            end.connect(path)
        except OSError as error:
            end.close()
            raise SinkError(f"{self._name}: {_reason(error)}") from error
        return end

    def _remote(self, host: str, port: int) -> socket.socket:
        problem = f"'{host}' has no address"
        for family, kind, protocol, _, address in _addresses(self._name, host, port, socket.SOCK_DGRAM):
            end = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            end.settimeout(_PATIENCE)
            try:
                end.connect(address)
            except OSError as error:
                end.close()
                problem = _reason(error)
            else:
                return end
        raise SinkError(f"{self._name}: {problem}")

    def send(self, messages: Sequence[bytes], *, are_records: bool = True) -> None:
        """
        Send messages.

        In a ``SinkError``, ``taken`` counts the messages that were sent or too long, ``lost`` only those too long.
        Messages count as lost only if they ``are_records``.
        """
        too_long = 0
        for taken, message in enumerate(messages):
            try:
                self._socket.send(message)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise SinkError(f"{self._name}: {_reason(error)}", taken=taken, lost=too_long) from error
                too_long += are_records
        if too_long:
            raise RecordsRefusedError(f"{self._name}: {reason_of_number(errno.EMSGSIZE)}", lost=too_long)

    def close(self) -> None:
        """Close the datagram socket."""
        self._socket.close()


class Stream:
    """A TCP connection that sends each message preceded by its length."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self._name = name
        _addresses(name, host, port, socket.SOCK_STREAM)
        try:
            self._tcp = socket.create_connection((host, port), timeout=_CONNECTING)
            self._tcp.settimeout(_PATIENCE)
            self._tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
        except OSError as error:
            raise SinkError(f"{name}: {_reason(error)}") from error
        self._socket = self._tcp
        self._sent: deque[int] = deque()
        """The end offset in the byte stream of each message that may not have arrived."""

    def send(self, messages: Sequence[bytes], *, are_records: bool = True) -> None:
        """
        Send messages; raise ``SinkError`` if the connection fails.

        ``SinkError.taken`` is the number of messages that were sent completely. ``SinkError.lost`` is the number of
        sent records that the other machine has not acknowledged. Messages are records if ``are_records`` is True.
        """
        frames = [b"%d %b" % (len(message), message) for message in messages]
        data = memoryview(b"".join(frames))
        sent = taken = whole = 0
        try:
            self._check_open()
            self._forget_acknowledged()
            while sent < len(data):
                before = self._position()
                count = self._socket.send(data[sent : sent + _CHUNK])
                after = self._position()
                sent += count
                while taken < len(frames) and whole + len(frames[taken]) <= sent:
                    whole += len(frames[taken])
                    taken += 1
                    if are_records:
                        # Without TLS the offset where a message ends on the line is exact.
                        self._sent.append(after - (sent - whole) if after - before == count else after)
        except OSError as error:
            self._abort()
            raise SinkError(f"{self._name}: {_reason(error)}", taken=taken, lost=self._unacknowledged()) from error

    def _abort(self) -> None:
        """Discard the kernel's send buffer: its messages are counted as lost, and must not arrive later."""
        with contextlib.suppress(OSError):
            self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))

    def _check_open(self) -> None:
        """Raise ConnectionError if the server has closed the connection: a send would only appear to succeed."""
        self._socket.settimeout(0)
        try:
            while self._socket.recv(1024):
                pass  # replies are ignored
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        finally:
            self._socket.settimeout(_PATIENCE)
        raise ConnectionError("the server has closed the connection")

    def _acknowledged(self) -> int:
        info = self._tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (count,) = _BYTES_ACKED.unpack(info)
        return int(count)

    def _in_flight(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._tcp.fileno(), termios.TIOCOUTQ, bytes(4)), "little")

    def _position(self) -> int:
        """Return the number of bytes passed to the connection so far."""
        return self._acknowledged() + self._in_flight()

    def _forget_acknowledged(self) -> None:
        arrived = self._acknowledged()
        while self._sent and self._sent[0] <= arrived:
            self._sent.popleft()

    def _unacknowledged(self) -> int:
        """Return and reset the number of messages that the other machine has not acknowledged."""
        self._forget_acknowledged()
        count = len(self._sent)
        self._sent.clear()
        return count

    def close(self) -> None:
        """Close the connection; raise ``SinkError`` if the other machine has not acknowledged everything."""
        try:
            with contextlib.suppress(OSError):
                self._say_goodbye()
            self._await_acknowledged()
            if lost := self._unacknowledged():
                self._abort()
                raise SinkError(f"{self._name}: {lost} messages were not acknowledged", lost=lost)
        finally:
            self._socket.close()
            self._tcp.close()

    def _say_goodbye(self) -> None:
        self._tcp.shutdown(socket.SHUT_WR)

    def _await_acknowledged(self) -> None:
        """Wait until the peer has acknowledged all sent bytes (TCP), or acknowledgements stop arriving."""
        until = time.monotonic() + _GOODBYE
        while self._sent and time.monotonic() < until and self._is_connected():
            before = len(self._sent)
            self._forget_acknowledged()
            if len(self._sent) < before:
                until = time.monotonic() + _GOODBYE
            elif self._sent:
                time.sleep(0.01)

    def _is_connected(self) -> bool:
        with contextlib.suppress(OSError):
            self._tcp.getpeername()
            return True
        return False


class Tls(Stream):
    """Stream over TLS. The server's certificate is verified for the name by which it was reached."""

    def __init__(self, name: str, host: str, port: int, context: ssl.SSLContext) -> None:
        super().__init__(name, host, port)
        self._tcp.settimeout(_CONNECTING)
        try:
            self._socket = context.wrap_socket(self._tcp.dup(), server_hostname=host)
        except (OSError, ValueError) as error:
            self._tcp.close()
            raise SinkError(f"{name}: {_reason(error)}") from error
        self._socket.settimeout(_PATIENCE)

    def _say_goodbye(self) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)
        self._socket.settimeout(1)
        with contextlib.suppress(OSError, ValueError):
            self._socket.unwrap()  # wait for the server's close_notify, which is optional
        super()._say_goodbye()


def _addresses(name: str, host: str, port: int, kind: socket.SocketKind) -> list[tuple[int, int, int, str, Any]]:
    try:
        return socket.getaddrinfo(host, port, type=kind)  # type: ignore[return-value]
    except (OSError, UnicodeError) as error:
        raise SinkError(f"{name} is not found: {reason_of(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the reason of a failure, without the library details in messages of ``ssl``."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"the server's certificate is refused: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
        case TimeoutError():
            return "there is no answer" if error.errno is None else reason_of(error)
        case ConnectionError() if error.errno is None:
            return str(error)
        case OSError():
            return reason_of(error)
    return str(error)
