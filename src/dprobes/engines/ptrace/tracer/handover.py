"""
The tracer's part of ``exit 1``: a process is handed over to a debugger, stopped at the probed instruction.

A process has one tracer, so all its threads are detached before the debugger attaches. A SIGSTOP that waits for them
keeps them from running code of their own in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import HandedOver
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.wire import Left, Warned

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.detachment import Detacher
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram

__all__ = ["HandOver"]

_INIT = 1


class HandOver:
    """Hand processes over; the client is told and sees to the debugger."""

    def __init__(self, connection: Connection, detacher: Detacher) -> None:
        self._connection = connection
        self._detacher = detacher

    def __call__(self, thread: Thread, program: InsertedProgram, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
        """
        Let go of the process of a stopped thread for a program; the registers are those at the probed instruction.

        Return False, with a word to the user, if that is not possible and the thread is to go on.
        """
        address = registers[Register.RIP]
        if thread.pid == _INIT:
            # The kernel does not let process 1 be stopped: it would run away from the probed instruction.
            text = "process 1 cannot be stopped for a debugger: it goes on, without the probe"
            self._connection.send(Warned(text, program=program.number))
            return False
        name = _command_name(thread.tid)
        if self._detacher.detach_process(thread.pid, halted=True):
            self._connection.send(Left(program.number, HandedOver(thread.pid, thread.tid, name, address)))
            return True
        text = f"process {thread.pid} ({name}) executed another program before a debugger could take it"
        self._connection.send(Warned(text, program=program.number))
        return False


def _command_name(tid: int) -> str:
    try:
        with open(f"/proc/{tid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "?"
