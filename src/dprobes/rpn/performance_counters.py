"""
Performance counters of ``push pmc`` and of samplers, with their events in perf_event_open(2).

``push pmc`` reads a counter of the thread. Only the difference of two readings has a meaning, because engines may count
from the start of the thread, or from its first reading. A sampler counts the events of a CPU.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import NamedTuple

from dprobes.diagnostics import did_you_mean

__all__ = [
    "COUNTERS",
    "PERIOD_MAX",
    "Counter",
    "CounterKind",
    "counter_named",
    "counter_number",
    "period_problem",
    "unknown_counter_hint",
]

PERIOD_MAX = 0xFFFF_FFFF
"""Largest number of events between two samples."""


class CounterKind(IntEnum):
    """The source of a counter; the values are perf event types (``enum perf_type_id``)."""

    HARDWARE = 0
    """The processor's performance monitoring unit (PMU)."""
    SOFTWARE = 1
    """The kernel."""


class Counter(NamedTuple):
    """
    Performance counter: its name, and its event.

    ``config`` is the event's number in ``enum perf_hw_id`` or ``enum perf_sw_ids`` (include/uapi/linux/perf_event.h).
    ``name`` is perf(1)'s name of the event. ``period_min`` is the smallest number of events between two samples that
    the kernel observes. ``is_in_scheduler`` is True if the events occur in the kernel's scheduler, and so in no module.
    """

    name: str
    kind: CounterKind
    config: int
    doc: str
    period_min: int = 1
    is_in_scheduler: bool = False


COUNTERS: tuple[Counter, ...] = (
    Counter("task-clock", CounterKind.SOFTWARE, 1, "Nanoseconds of CPU time.", period_min=10_000),
    Counter("page-faults", CounterKind.SOFTWARE, 2, "Page faults, minor and major ones."),
    Counter(
        "context-switches",
        CounterKind.SOFTWARE,
        3,
        "Switches of the CPU from this thread to another one.",
        is_in_scheduler=True,
    ),
    Counter("cpu-migrations", CounterKind.SOFTWARE, 4, "Moves of the thread to another CPU.", is_in_scheduler=True),
    Counter("minor-faults", CounterKind.SOFTWARE, 5, "Page faults that needed no I/O."),
    Counter("major-faults", CounterKind.SOFTWARE, 6, "Page faults that needed I/O."),
    Counter("cycles", CounterKind.HARDWARE, 0, "CPU cycles."),
    Counter("instructions", CounterKind.HARDWARE, 1, "Retired instructions."),
    Counter("cache-references", CounterKind.HARDWARE, 2, "Accesses to the last-level cache."),
    Counter("cache-misses", CounterKind.HARDWARE, 3, "Misses of the last-level cache."),
    Counter("branches", CounterKind.HARDWARE, 4, "Retired branch instructions."),
    Counter("branch-misses", CounterKind.HARDWARE, 5, "Mispredicted branch instructions."),
    Counter("bus-cycles", CounterKind.HARDWARE, 6, "Bus cycles."),
    Counter("ref-cycles", CounterKind.HARDWARE, 9, "CPU cycles at a constant frequency."),
)
"""The counters; ``push pmc`` encodes the index in one byte, so new counters are added at the end."""


@cache
def _numbers() -> dict[str, int]:
    return {counter.name: number for number, counter in enumerate(COUNTERS)}


def counter_number(name: str) -> int:
    """Return the index of a counter in ``COUNTERS``; raise KeyError for an unknown name."""
    return _numbers()[name]


def counter_named(name: str) -> Counter:
    """Return a counter; raise KeyError for an unknown name."""
    return COUNTERS[counter_number(name)]


def period_problem(period: int, name: str) -> str | None:
    """Return the reason why there cannot be a sample at each ``period``-th event of a counter, or None."""
    least = counter_named(name).period_min
    return None if least <= period <= PERIOD_MAX else f"a period of {period} {name} is outside {least} to {PERIOD_MAX}"


def unknown_counter_hint(name: str) -> str | None:
    """Return the hint for a name that no counter has, or None for the name of a counter."""
    if name in _numbers():
        return None
    return did_you_mean(name[:40], list(_numbers())) or f"the counters are {', '.join(_numbers())}"
