"""
Hardware breakpoints that are there before it is known what they are to watch.

To open a breakpoint on a CPU, the kernel waits until all CPUs have passed through user space or the scheduler
(``percpu_down_write`` in ``kernel/events/hw_breakpoint.c``), which takes milliseconds, and for ever if a process waits
in a BPF program meanwhile. To move one that is open takes microseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.cpulinks import ACCESSES
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.linux import perfcalls
from dprobes.engines.linux.bpfcalls import link_perf_event
from dprobes.engines.linux.cpus import online_cpus
from dprobes.errors import reason_of_number
from dprobes.resolve.probestate import ProbeState, impossible_address

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from dprobes.engines.linux.perfcalls import Access
    from dprobes.resolve.probepoints import WatchedMemory

__all__ = ["IN_USE", "USER_END", "MovableBreakpoint", "Watch"]

USER_END = (1 << 47) - 4096
"""Where the addresses of programs end on x86-64, with four levels of page tables."""

IN_USE = "all debug registers of a CPU are in use"
"""Why there is no register for a watchpoint."""

_NOWHERE = 0


class MovableBreakpoint(Descriptors):
    """
    Own a breakpoint on all CPUs that runs a PERF_EVENT program, for ``size`` bytes.

    It watches nothing until ``move``. OSError as the kernel answers: ENOSPC if the four of a CPU are in use.
    The program must stay loaded as long as CPUs may come.
    """

    def __init__(self, program: int, size: int, access: Access) -> None:
        super().__init__()
        self._program = program
        self._size = size
        self._access = access
        self._address: int | None = None
        self._events: dict[int, tuple[int, int]] = {}
        """Event and link, by the CPU."""
        try:
            for cpu in online_cpus():
                self.renew(cpu)
        except BaseException:
            self.close()
            raise

    def renew(self, cpu: int) -> None:
        """Watch on a CPU that has come online, with an event in place of the one before (see ``cpulinks``)."""
        for old in self._events.pop(cpu, ()):
            os.close(self.remove(old))
        try:
            event = self.add(perfcalls.open_breakpoint(_NOWHERE, self._size, self._access, cpu=cpu))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # it has gone offline meanwhile
            raise
        self._events[cpu] = event, self.add(link_perf_event(self._program, event))
        if self._address is not None:
            perfcalls.move_breakpoint(event, self._address, self._size, self._access)

    def move(self, address: int) -> None:
        """Watch an address from now on."""
        for event, _ in self._events.values():
            perfcalls.move_breakpoint(event, address, self._size, self._access)
        self._address = address

    def rest(self) -> None:
        """Watch nothing until the next ``move``."""
        self._address = None
        for event, _ in self._events.values():
            perfcalls.disable(event)


class Watch(Descriptors):
    """
    Own the breakpoints of one watchpoint, by the load bias for which they are; ``close`` ends it.

    One more is ready for the next place (``prepare``). ``on_close`` is called then.
    """

    def __init__(
        self,
        number: int,
        memory: WatchedMemory,
        program: int,
        lock: threading.Lock,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__()
        self.number = number
        self._memory = memory
        self._program = program
        self._lock = lock
        self._on_close = on_close
        self._placed: dict[int, MovableBreakpoint] = {}
        self._spare: MovableBreakpoint | None = None
        self.is_closed = False

    @property
    def is_absolute(self) -> bool:
        """Whether a number is watched, the same in each process."""
        return self._memory.absolute

    def attach(self, bias: int) -> tuple[ProbeState, str] | None:
        """Watch the address that a load bias gives; return why if that cannot be. The lock is held."""
        place = 0 if self._memory.absolute else bias
        if self.is_closed or place in self._placed:
            return None
        address = self._memory.address + place
        if address + self._memory.length > USER_END:
            return ProbeState.INVALID_OFFSET, impossible_address(address)
        try:
            if self._spare is None:
                self._spare = self._opened()
            self._spare.move(address)
            self._placed[place], self._spare = self._spare, None
        except OSError as error:
            reason = f"the kernel does not watch {address:#x}: {reason_of_number(error.errno or 0)}"
            return ProbeState.DEBUGREG_UNAVAIL, IN_USE if error.errno == errno.ENOSPC else reason
        return None

    def prepare(self) -> None:
        """Have a breakpoint ready for the next place, if there is one to be had. The lock is held."""
        if self._spare is None and not self.is_closed and not self._memory.absolute:
            with contextlib.suppress(OSError):
                self._spare = self._opened()

    def _opened(self) -> MovableBreakpoint:
        return MovableBreakpoint(self._program, self._memory.length, ACCESSES[self._memory.access])

    def release(self, bias: int) -> None:
        """Watch there no longer. The lock is held."""
        if self._memory.absolute or (left := self._placed.pop(bias, None)) is None:
            return
        if self._spare is None:
            left.rest()
            self._spare = left
        else:
            left.close()

    def renew(self, cpu: int) -> None:
        """Watch on a CPU that has come online; OSError as the kernel answers."""
        with self._lock:
            for each in (*self._placed.values(), *([self._spare] if self._spare is not None else ())):
                each.renew(cpu)

    def close(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self.is_closed = True
            left = list(self._placed.values())
            if self._spare is not None:
                left.append(self._spare)
            self._placed.clear()
            self._spare = None
        for each in left:
            each.close()
        self._on_close()
