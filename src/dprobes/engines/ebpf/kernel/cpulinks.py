"""
Attach loaded programs to clocks and hardware breakpoints, mostly to one of each CPU.

A CPU that goes offline takes its events with it: the kernel removes them from the CPU for good
(``perf_event_exit_cpu_context`` in ``kernel/events/core.c``), though their descriptors stay, and the debug registers
that are reserved for them. So a CPU that comes online needs new ones, whether it was there before or not.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import link_events
from dprobes.engines.linux import perfcalls
from dprobes.engines.linux.cpus import online_cpus
from dprobes.rpn.program import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ACCESSES", "CpuLinks", "attach_breakpoint", "attach_clock"]


ACCESSES = {
    Access.EXECUTE: perfcalls.Access.EXECUTE,
    Access.WRITE: perfcalls.Access.WRITE,
    Access.READ_WRITE: perfcalls.Access.READ | perfcalls.Access.WRITE,
}
"""What the kernel calls the accesses that a watchpoint is hit by."""


class CpuLinks(Descriptors):
    """
    Own the links of a program to an event of each CPU, which ``open_event`` opens. OSError as the kernel answers.

    The program must stay loaded as long as CPUs may come.
    """

    def __init__(self, program: int, open_event: Callable[[int], int], cookie: int = 0) -> None:
        super().__init__()
        self._program = program
        self._open_event = open_event
        self._cookie = cookie
        self._links: dict[int, int] = {}
        try:
            for cpu in online_cpus():
                self.renew(cpu)
        except BaseException:
            self.close()
            raise

    def renew(self, cpu: int) -> None:
        """Attach to an event of a CPU that has come online, in place of the one before."""
        if cpu in self._links:
            os.close(self.remove(self._links.pop(cpu)))
        try:
            event = self._open_event(cpu)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # it has gone offline meanwhile
            raise
        (link,) = link_events(self._program, [(event, self._cookie)], Descriptors()).detach()
        self._links[cpu] = self.add(link)


def attach_breakpoint(
    program: int,
    address: int,
    size: int,
    access: perfcalls.Access,
    *,
    cookie: int = 0,
    threads: Iterable[int] | None = None,
) -> Descriptors:
    """
    Attach a PERF_EVENT program to a hardware breakpoint on ``size`` bytes of user addresses.

    It watches every process, in which the address may mean anything; with ``threads`` these, and all threads and
    processes that they start. Then the program must not ask for the cookie: events that a thread inherits run it, but
    forget that (``perf_event_alloc``). OSError as the kernel answers: ENOSPC if the processor's four are in use.
    """
    if threads is None:
        return CpuLinks(program, lambda cpu: perfcalls.open_breakpoint(address, size, access, cpu=cpu), cookie)
    events = ((perfcalls.open_breakpoint(address, size, access, pid=tid, inherit=True), cookie) for tid in threads)
    return link_events(program, events, Descriptors())


def attach_clock(program: int, cookie: int, *, period: int = 0, frequency: int = 0) -> Descriptors:
    """
    Attach a PERF_EVENT program to a clock on every CPU.

    It runs each ``period`` nanoseconds or ``frequency`` times a second, on what runs there: a program or the kernel.
    """
    return CpuLinks(program, lambda cpu: perfcalls.open_cpu_clock(cpu, period=period, frequency=frequency), cookie)
