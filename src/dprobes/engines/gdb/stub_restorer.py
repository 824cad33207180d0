"""
Process that takes over the connection to a stub if the engine is killed. It removes breakpoints and detaches.

It has a copy of the connection's descriptor, so the connection remains open after the engine's end. The engine sends it
lines of text about each breakpoint before its insertion, and about other changes of the target::

    + ADDRESS SIZE [BYTES]    a breakpoint, and the original bytes if it is written into memory
    - ADDRESS                 removal of the breakpoint
    watch ADDRESS SIZE KIND   a watchpoint, of a kind as stubs number them
    unwatch ADDRESS SIZE KIND removal of the watchpoint
    acknowledgements 0|1      whether packets are acknowledged
    signals 0|1               whether interrupts raise a signal
    process PID               the process, as the stub numbers it
    running 0|1
    last PACKET               a packet to be sent before the target is released
    end                       the target needs no restoration

The target's state changes at each hit. So ``running`` is a byte in shared memory instead of a line.

The command is ``python -m dprobes.engines.gdb.stub_restorer CONNECTION PIPE MEMORY``, with three descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from dprobes.engines.gdb.remote_protocol import SIGINT, Exited, NoThreads, Stopped
from dprobes.engines.gdb.stub_requests import BreakpointKind, Stub
from dprobes.engines.gdb.stub_transports import adopted_transport
from dprobes.errors import EngineError
from dprobes.platform.linux.process_calls import memory_file

if TYPE_CHECKING:
    from dprobes.engines.gdb.remote_protocol import StopReply
    from dprobes.engines.gdb.stub_transports import Transport

__all__ = ["Restorer", "main", "restore"]

_MODULE = "dprobes.engines.gdb.stub_restorer"
_PATIENCE = 2.0
"""Seconds to wait for a stub's answer."""
_STOP_LOOK = 0.3
"""Seconds to wait for a stop that is under way."""
_WAIT = 60.0
_RUNNING = "running "


class Restorer:
    """Handle of the restorer process; there is no process if the connection's descriptor cannot be shared."""

    def __init__(self, transport: Transport) -> None:
        self._pipe = -1
        self._process: subprocess.Popen[bytes] | None = None
        if not transport.can_be_shared:
            return
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        connection = transport.fileno()
        memory = memory_file("dprobes-running", 1)
        self._is_running = mmap.mmap(memory, 1)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(connection), str(theirs), str(memory)],
                pass_fds=[connection, theirs, memory],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
            os.close(memory)
        self._pipe = ours

    def tell(self, line: str) -> None:
        """Send one of the lines above to the process."""
        if self._pipe < 0:
            return
        if line.startswith(_RUNNING):
            self._is_running[0] = int(line.removeprefix(_RUNNING))
        else:
            with contextlib.suppress(OSError):  # the process was killed: then nothing will take over
                os.write(self._pipe, line.encode() + b"\n")

    def leave_to_it(self) -> None:
        """Close the pipe, so that the process restores the target."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def close(self) -> None:
        """End the process without restoration, and wait for its end."""
        self.tell("end")
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._process is not None:
            self._process.wait()


def main(connection: int, pipe: int, memory: int) -> None:
    """
    Read lines until the end of the pipe, and restore the target unless the last one is "end".

    The arguments are descriptors: of the stub's connection, of the pipe with the lines, and of a file (``memory``)
    whose first byte is 0 while the target is stopped.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    text = bytearray()
    while data := os.read(pipe, 1 << 16):
        text += data
    lines = text.decode("ascii").splitlines()
    if lines[-1:] != ["end"]:
        restore(adopted_transport(connection), [*lines, f"{_RUNNING}{os.pread(memory, 1, 0)[0]}"])


class Told:
    """State of the target by the lines that the session has sent: breakpoints, watchpoints, running or stopped."""

    def __init__(self, lines: list[str]) -> None:
        self.breakpoints: dict[int, tuple[int, bytes]] = {}
        self.watched: set[tuple[int, int, int]] = set()
        self.last: list[str] = []
        self.flags = {"acknowledgements": True, "signals": False, "running": False}
        self.process = 0
        for line in lines:
            self._take(line.split())

    def _take(self, words: list[str]) -> None:
        match words:
            case ["+", address, size, *original]:
                self.breakpoints[int(address)] = int(size), bytes.fromhex("".join(original))
            case ["-", address]:
                self.breakpoints.pop(int(address), None)
            case ["watch", address, size, kind]:
                self.watched.add((int(address), int(size), int(kind)))
            case ["unwatch", address, size, kind]:
                self.watched.discard((int(address), int(size), int(kind)))
            case ["acknowledgements" | "signals" | "running" as flag, number]:
                self.flags[flag] = number == "1"
            case ["last", packet]:
                self.last.append(packet)
            case ["process", number]:
                self.process = int(number)


def restore(transport: Transport, lines: list[str]) -> None:
    """Remove the breakpoints and watchpoints that the lines describe, and detach; give up after an error."""
    told = Told(lines)
    stub = Stub(transport, _PATIENCE)
    with contextlib.suppress(EngineError):
        reply = stub.take_over(has_acknowledgements=told.flags["acknowledgements"], patience=_STOP_LOOK)
        is_interrupted = told.flags["running"] and reply is None
        if is_interrupted:
            reply = _stop(stub)
        if isinstance(reply, Exited | NoThreads):
            return
        stub.drain()
        for place, (size, original) in told.breakpoints.items():
            if original:
                stub.write(place, original)
            else:
                stub.ask(f"z{BreakpointKind.SOFTWARE:d},{place:x},{size:x}")
        for place, length, kind in sorted(told.watched):
            stub.ask(f"z{kind:d},{place:x},{length:x}")
        for packet in told.last:
            stub.ask(packet)
        has_stopped = isinstance(reply, Stopped) and reply.signal in (0, SIGINT)
        if is_interrupted and told.flags["signals"] and not has_stopped:
            stub.absorb_interrupt()
        stub.detach(told.process)
    transport.close()


def _stop(stub: Stub) -> StopReply:
    """Interrupt the target, and return the reply about its stop."""
    stub.interrupt()
    reply = stub.wait(_PATIENCE)
    if reply is None:  # the stub may have reported the stop to the killed engine
        with contextlib.suppress(EngineError):
            reply = stub.reason()
    while reply is None:
        reply = stub.wait(_WAIT)
    return reply


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
