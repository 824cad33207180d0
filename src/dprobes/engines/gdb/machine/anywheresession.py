"""
The run of a program about whatever runs on a machine: it gets to know the kernel when it is there, if there is one.

It needs no kernel to find its probepoints. So it asks on the connection of the run: many stubs serve but one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guestkernel import GuestKernel
from dprobes.engines.gdb.machine.kernelfacts import KernelFacts
from dprobes.engines.gdb.machine.machinesession import MachineSession
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.baremachine import BareMachine
    from dprobes.engines.gdb.program import Resolved
    from dprobes.engines.gdb.session import StubSession
    from dprobes.engines.gdb.sharedstub import SharedStub
    from dprobes.engines.gdb.stopreplies import ThreadId
    from dprobes.engines.interface import Job

__all__ = ["AnywhereSession"]


class AnywhereSession(MachineSession):
    """One run, on whatever a machine executes; ``machine`` gets the names of the kernel that is found."""

    def __init__(self, job: Job, places: Resolved, shared: SharedStub[StubSession], machine: BareMachine) -> None:
        super().__init__(job, places, shared, None)
        self._machine = machine

    def _learn(self, thread: ThreadId | None) -> None:
        try:
            kernel = GuestKernel(self._target, self._target.registers(thread))
            facts = KernelFacts.of(kernel)
        except EngineError:  # firmware, or another system
            return
        self._facts = facts
        self._machine.know(kernel)
