"""
Threads that have run into a breakpoint of ours, from the moment at which the kernel reports it.

Such a thread stands behind the breakpoint's byte, in the middle of an instruction. Should we be killed, the kernel lets
it go on: with the SIGTRAP if nobody has waited for its stop yet, else without, and then it would execute whatever the
rest of the instruction happens to mean (the kernel's ``wait_task_stopped`` forgets the signal, ``ptrace_stop`` delivers
what is left of it). So its instruction pointer is put right before the stop is taken from the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Register

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.stepper import Stepper

__all__ = ["Traps"]

_RIP = int(Register.RIP)


class Traps:
    """Put threads that trapped back; ``threads`` is the tracer's table of all of them."""

    def __init__(self, threads: dict[int, Thread], stepper: Stepper) -> None:
        self._threads = threads
        self._stepper = stepper
        self._registers = ptracecalls.Registers()
        self._info = ptracecalls.SignalInfo()
        self._last: Thread | None = None
        """Whose registers were read last, and have not changed since."""

    def forget(self) -> None:
        """Forget the registers that were read before: their thread may have got others."""
        self._last = None

    def secure(self, tid: int) -> None:
        """
        Put a thread that has stopped with SIGTRAP onto the instruction, if it has run into a breakpoint of ours.

        Where the instruction has a copy it is put there, since the thread could execute that without us. ``trapped``
        says where the breakpoint is.
        """
        thread = self._threads.get(tid)
        if thread is None:
            return
        registers, space = self._registers, thread.space
        self._last = None  # whoever's they were: they are overwritten, also where this is no breakpoint of ours
        try:
            ptracecalls.get_registers(tid, registers)
            address = registers[_RIP] - 1
            breakpoint_ = space.breakpoints.get(address)
            if breakpoint_ is None and address not in space.former:
                return
            if ptracecalls.get_signal_info(tid, self._info) != ptracecalls.SI_KERNEL:
                return
            way_on = address
            if breakpoint_ is not None and ptracecalls.runs_as(registers, space.word_size):
                way_on = self._stepper.way_on(thread, breakpoint_)
            ptracecalls.set_instruction_pointer(tid, way_on)
        except OSError:
            return  # killed meanwhile
        thread.trapped = address
        self._last = thread

    def take_registers(
        self, thread: Thread, scratch: ctypes.Array[ctypes.c_ulong]
    ) -> ctypes.Array[ctypes.c_ulong] | None:
        """
        Return the registers of a thread that was secured just now, with ``scratch`` to be used in their place.

        None says that they may have changed. The instruction pointer is that behind the breakpoint.
        """
        if self._last is not thread:
            return None
        registers, self._registers, self._last = self._registers, scratch, None
        return registers
