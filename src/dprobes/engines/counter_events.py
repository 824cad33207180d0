"""Performance counters that probe programs read, as perf events: a check of the machine, and the events of a thread."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from dprobes.errors import NotSupportedError, PrivilegeError, reason_of
from dprobes.platform.linux.perf_calls import open_counter, open_cpu_counter, read_counter
from dprobes.platform.linux.procfs import online_cpus
from dprobes.rpn.performance_counters import COUNTERS, PERIOD_MAX, Counter, CounterKind, counter_named
from dprobes.rpn.program_needs import counters_read, counters_sampled

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

__all__ = ["EventCounters", "check_counters"]

_PARANOID = "/proc/sys/kernel/perf_event_paranoid"


def check_counters(program: Program) -> None:
    """Raise ``EngineError`` if a program needs a counter that this machine does not have, or the user may not use."""
    for name in counters_read(program):
        counter = counter_named(name)
        try:
            os.close(open_counter(counter.kind, counter.config, tid=0))
        except OSError as error:
            raise _refusal(counter, "read", 1, error) from None
    for name in counters_sampled(program):
        counter = counter_named(name)
        try:
            os.close(open_cpu_counter(online_cpus()[0], counter.kind, counter.config, PERIOD_MAX))
        except OSError as error:
            raise _refusal(counter, "sampled", 0, error) from None


def _refusal(counter: Counter, use: str, allowed: int, error: OSError) -> NotSupportedError | PrivilegeError:
    # perf_event_paranoid allows events of own threads up to 1, and events of a CPU up to 0.
    what = f"the counter '{counter.name}' cannot be {use}"
    if error.errno in (errno.EACCES, errno.EPERM):
        with open(_PARANOID, encoding="ascii") as file:
            level = file.read().strip()
        hint = f"run dprobes as root, give it CAP_PERFMON, or set kernel.perf_event_paranoid to {allowed}"
        return PrivilegeError(f"{what}: kernel.perf_event_paranoid is {level}", hint=hint)
    if counter.kind is CounterKind.SOFTWARE:
        return NotSupportedError(f"{what}: {reason_of(error)}")
    there_are = ", ".join(each.name for each in COUNTERS if each.kind is CounterKind.SOFTWARE)
    hint = f"virtual machines often hide the processor's counters; those of the kernel are {there_are}"
    return NotSupportedError(f"{what}: the processor shows no such counter (PMU)", hint=hint)


class EventCounters:
    """
    The counters of one thread that were read at least once: an event for each, by its index in ``COUNTERS``.

    A counter begins at 0 with its first reading.
    """

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._events: dict[int, int] = {}

    def read(self, number: int) -> int | None:
        """
        Return the value of the performance counter ``number``, an index in ``COUNTERS``.

        None: perf_event_open(2) refuses it, it cannot be read, or it was multiplexed and has not counted all the time.
        """
        try:
            event = self._events.get(number)
            if event is None:
                counter = COUNTERS[number]
                event = self._events[number] = open_counter(counter.kind, counter.config, tid=self._tid)
            return read_counter(event)
        except OSError:
            return None

    def close(self) -> None:
        """Close the perf events of all counters. The next reading of a counter begins at 0 again."""
        while self._events:
            os.close(self._events.popitem()[1])
