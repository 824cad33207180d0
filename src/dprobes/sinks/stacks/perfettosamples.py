"""
Profiles as Perfetto traces: each record with a stack is a sample (PerfSample), on the track of its thread at its time.

The messages are those of protos/perfetto/trace/perfetto_trace.proto. Function names, frames and stacks are interned:
written once, before the samples that name them by numbers::

    TracePacket   2 process_tree (ProcessTree: 1 Process (1 pid, 3 cmdline), 2 Thread (1 tid, 3 tgid, 2 name))
                  8 timestamp | 10 sequence | 12 interned_data | 13 sequence_flags | 58 clock | 59 defaults | 66 sample
    InternedData  5 function_names, 17 mapping_paths (1 iid, 2 str) | 6 frames (1 iid, 2 function, 3 mapping)
                  7 callstacks (1 iid, 2 frame iids, the outermost first) | 19 mappings (1 iid, 7 path iids)
    PerfSample    1 cpu | 2 pid | 3 tid | 4 callstack | 5 cpu_mode | 6 timebase_count
    defaults      12 perf_sample_defaults (1 timebase (1 period, 4 counter, 10 name, 11 clock))
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dprobes.sinks.perfetto.messages import Packets
from dprobes.sinks.perfetto.protobuf import length_field, text_field, varint_field

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.sinks.stacks.profile import StackSample

__all__ = ["perfetto_samples"]

_PACKET = 1
_MONOTONIC = 3
"""The clock of times, by its number in BuiltinClock."""

_SEQUENCE = 1
_NEEDS_STATE, _STATE_CLEARED = 2, 1
_SW_CPU_CLOCK, _PERF_CLOCK_MONOTONIC = 1, 2
_KERNEL_MODE, _USER_MODE = 1, 2
_KERNEL = "_[k]"
"""What names of functions of the kernel end in."""

_INTERNED_MAX = 1 << 12
"""Stacks in one packet."""


def perfetto_samples(samples: Sequence[StackSample], title: str, unit: str, wall_offset: int) -> bytes:
    """
    Return the bytes of a trace with samples, which weigh so many of a ``unit`` each.

    ``wall_offset`` turns their times into nanoseconds since 1970.
    """
    return b"".join(_packets(samples, title, unit, wall_offset))


def _packets(samples: Sequence[StackSample], title: str, unit: str, wall_offset: int) -> Iterator[bytes]:
    end = max((sample.time for sample in samples), default=0)
    asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    yield Packets(_SEQUENCE).clocks(end, max(end + wall_offset, 0), end + max(asleep, 0), is_first=True)
    yield _packet(length_field(2, _tree(samples)))
    timebase = varint_field(1, 1) + varint_field(4, _SW_CPU_CLOCK) + text_field(10, unit)
    timebase += varint_field(11, _PERF_CLOCK_MONOTONIC)
    defaults = varint_field(58, _MONOTONIC) + length_field(12, length_field(1, timebase))
    yield _packet(length_field(59, defaults) + varint_field(13, _STATE_CLEARED))
    interned = _Interned(title)
    ordered = sorted(samples, key=lambda sample: sample.time)
    for first in range(0, len(ordered), _INTERNED_MAX):
        part = ordered[first : first + _INTERNED_MAX]
        numbers = [interned.number(sample.stack) for sample in part]
        if said := interned.take():
            yield _packet(length_field(12, said) + varint_field(13, _NEEDS_STATE))
        for sample, number in zip(part, numbers, strict=True):
            yield _packet(_sample(sample, number))


def _packet(content: bytes) -> bytes:
    return length_field(_PACKET, content + varint_field(10, _SEQUENCE))


def _tree(samples: Sequence[StackSample]) -> bytes:
    """Return the processes and threads of samples, with the names that records have."""
    processes = {sample.pid: sample.name for sample in samples}
    threads = {sample.tid: sample for sample in samples}
    found = b"".join(
        length_field(1, varint_field(1, pid) + text_field(3, name)) for pid, name in sorted(processes.items())
    )
    return found + b"".join(
        length_field(2, varint_field(1, tid) + text_field(2, each.name) + varint_field(3, each.pid))
        for tid, each in sorted(threads.items())
    )


def _sample(sample: StackSample, number: int) -> bytes:
    is_kernel = bool(sample.stack) and sample.stack[-1].endswith(_KERNEL)
    said = varint_field(2, sample.pid) + varint_field(3, sample.tid) + varint_field(4, number)
    said += varint_field(5, _KERNEL_MODE if is_kernel else _USER_MODE) + varint_field(6, sample.weight)
    if sample.cpu is not None:
        said = varint_field(1, sample.cpu) + said
    return (
        varint_field(8, sample.time)
        + length_field(66, said)
        + varint_field(58, _MONOTONIC)
        + (varint_field(13, _NEEDS_STATE))
    )


class _Interned:
    """Give numbers to stacks and what they are made of, and say what is new of them."""

    def __init__(self, title: str) -> None:
        self._stacks: dict[tuple[str, ...], int] = {}
        self._frames: dict[str, int] = {}
        self._parts: list[bytes] = []
        for number, path in ((1, title), (2, "kernel")):
            self._parts.append(length_field(17, varint_field(1, number) + length_field(2, path.encode())))
            self._parts.append(length_field(19, varint_field(1, number) + varint_field(7, number)))

    def number(self, stack: tuple[str, ...]) -> int:
        """Return the number of a stack."""
        known = self._stacks.get(stack)
        if known is None:
            known = self._stacks[stack] = len(self._stacks) + 1
            frames = b"".join(varint_field(2, self._frame(name)) for name in stack)
            self._parts.append(length_field(7, varint_field(1, known) + frames))
        return known

    def _frame(self, name: str) -> int:
        known = self._frames.get(name)
        if known is None:
            known = self._frames[name] = len(self._frames) + 1
            function = name.removesuffix(_KERNEL)
            data = function.encode("utf-8", "backslashreplace")
            self._parts.append(length_field(5, varint_field(1, known) + length_field(2, data)))
            mapping = 2 if function != name else 1
            frame = varint_field(1, known) + varint_field(2, known) + varint_field(3, mapping)
            self._parts.append(length_field(6, frame))
        return known

    def take(self) -> bytes:
        """Return what is new since the last time."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
