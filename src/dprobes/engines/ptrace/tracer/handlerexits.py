"""
What a handler ends with besides its hit: ``exit 1`` and ``exit 3``, which concern the whole process.

With ``exit 1`` the process goes to a debugger, stopped at the probed instruction. A process has one tracer, so all its
threads are detached before the debugger attaches. A SIGSTOP that waits for them keeps them from running code of their
own in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.hits.probes import CORE_DUMP, HANDING_OVER
from dprobes.engines.interface import HandedOver
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.processes import Leaving
from dprobes.engines.ptrace.wire import Left, Warned

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.coredump import CoreDumps
    from dprobes.engines.ptrace.tracer.detachment import Detacher
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled, InsertedProgram

__all__ = ["DebuggerHandoff", "Exits"]


class Exits:
    """Note what handlers want, and carry it out when the hit has been seen to."""

    def __init__(self, connection: Connection, hand_over: DebuggerHandoff, dumps: CoreDumps) -> None:
        self._connection = connection
        self._hand_over = hand_over
        self._dumps = dumps
        self._registers = ptracecalls.Registers()

    def note(self, thread: Thread, handled: Iterable[Handled]) -> None:
        """Note what is to become of a thread's process; of several handlers that say so the first one decides."""
        for probe, outcome, _, _ in handled:
            if outcome is None or outcome.exit_code not in HANDING_OVER:
                continue
            if thread.leaving is None:
                thread.leaving = Leaving(outcome.exit_code, probe.program)
                continue
            text = f"'exit {outcome.exit_code}' was not carried out in process {thread.pid}: another handler"
            text += f" ended with 'exit {thread.leaving.code}' at the same moment"
            self._connection.send(Warned(text, program=probe.program.number))

    def carry_out(self, thread: Thread) -> bool:
        """Begin with what was noted for the process of a stopped thread; return False if the thread is to go on."""
        leaving, thread.leaving = thread.leaving, None
        assert leaving is not None
        if leaving.code == CORE_DUMP:
            return self._dumps.start(thread, leaving.program)
        ptracecalls.get_registers(thread.tid, self._registers)
        return self._hand_over(thread, leaving.program, self._registers)


_INIT = 1


class DebuggerHandoff:
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
