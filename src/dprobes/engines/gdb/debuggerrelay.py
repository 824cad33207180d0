"""
A socket at which GDB takes over a stub's connection, which is passed on to it.

Most stubs let their target go, or end it, when the connection ends: so that has to stay. GDB acknowledges packets until
it has agreed with the stub not to, as we may have done before: then acknowledgements are given, and taken, here.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.gdb.protocol.packets import INTERRUPT, MessageKind, PacketReader, packet
from dprobes.engines.gdb.transports import ConnectionLostError

if TYPE_CHECKING:
    from dprobes.engines.gdb.transports import Transport

__all__ = ["DebuggerRelay"]

_CHUNK = 1 << 16
_NO_ACKNOWLEDGEMENTS = b"QStartNoAckMode"


class DebuggerRelay:
    """
    Wait for a debugger at ``path``, and pass on what it and the stub say to each other.

    The stub at the other end of ``transport`` stands still and owes no answer; ``acknowledges`` is whether packets are
    acknowledged there. When the debugger leaves, the connection is to end. ``has_served`` is whether one has been
    there: then what the target does is its business.
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
        """Whether a debugger's packets are acknowledged here."""
        self._reader = PacketReader()
        self.has_served = False

    @property
    def is_serving(self) -> bool:
        """Whether a debugger is there."""
        return self._debugger is not None

    def serve(self, timeout: float) -> bool:
        """Pass on what comes in so many seconds, or the first of it; return whether more can come."""
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
        """Serve no longer; the stub's connection stays."""
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
        """Pass on what the debugger says; return whether it is still there."""
        assert self._debugger is not None, "it was readable"
        try:
            data = self._debugger.recv(_CHUNK)
        except OSError:
            return False
        try:
            self._pass_on(data)
        except ConnectionLostError:  # the stub has ended; the debugger acknowledges what it said last
            self._pass_last_words()
            return False
        return bool(data)

    def _pass_on(self, data: bytes) -> None:
        """Tell the stub what a debugger says."""
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
        """Tell the debugger what the stub has said before it ended."""
        with contextlib.suppress(ConnectionLostError):
            while self._debugger is not None and (data := self._transport.receive(0)):
                self._send(data)

    def _send(self, data: bytes) -> None:
        assert self._debugger is not None, "it is there"
        try:
            self._debugger.sendall(data)
        except OSError:
            self._leave()
