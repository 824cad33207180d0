"""
The calls that handlers in a process keep there (``bpf.calltable``), as the tracer sees them.

While handlers run, the tracer takes what it wants to know of a call that returns where there is a breakpoint, after a
tail call for instance: the slot belongs to the thread that has stopped. It adds calls only while no thread runs.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.calltable import REGISTERS, call_key
from dprobes.engines.ptrace.tracer.entries import Entry
from dprobes.native.processpage import PROCESS_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.native.patches import NativeMemory
    from dprobes.engines.ptrace.tracer.programs import Probe

__all__ = ["add_calls", "take_call"]

_HEAD = struct.Struct("=QQ")
_FREE = bytes(8)

Kept = tuple[tuple[int, int | None], ...]
"""What is kept of the entry: ``Site.kept``."""


def take_call(space: AddressSpace, probe: Probe, frame: int, kept: Kept) -> Entry | None:
    """Return the entry of a call that returns, None if it is not kept in the process; it is kept no longer."""
    memory = space.patches.memories.get(probe.program.number)
    if memory is None or memory.calls is None:
        return None
    table, key = memory.calls, call_key(probe.number, frame)
    window = table.window(key)
    start = memory.page + PROCESS_SIZE
    try:
        data = os.pread(space.memory, len(window) * table.slot, start + window.start)
        for at in range(0, len(data) - table.slot + 1, table.slot):
            found, time = _HEAD.unpack_from(data, at)
            if found != key:
                continue
            os.pwrite(space.memory, _FREE, start + window.start + at + 8)
            os.pwrite(space.memory, _FREE, start + window.start + at)
            values = struct.unpack_from(f"={len(kept)}Q", data, at + REGISTERS)
            return Entry(time, {index: value for (index, _), value in zip(kept, values, strict=True)}) if time else None
    except OSError:
        pass
    return None


def add_calls(space: AddressSpace, memory: NativeMemory, probe: Probe, calls: Sequence[tuple[int, Entry]]) -> None:
    """Keep calls in the process that the tracer knows of by their frames, while no thread of it runs."""
    assert memory.calls is not None
    table, start = memory.calls, memory.page + PROCESS_SIZE
    for frame, entry in calls:
        key = call_key(probe.number, frame)
        window = table.window(key)
        try:
            data = os.pread(space.memory, len(window) * table.slot, start + window.start)
            heads = [(*_HEAD.unpack_from(data, at), at) for at in range(0, len(data) - table.slot + 1, table.slot)]
            if not heads:
                return  # the process has taken the memory away
            free = [at for found, _, at in heads if found in (0, key)]
            at = free[0] if free else min(heads, key=lambda head: head[1])[2]
            registers = [entry.registers[index] for index in sorted(entry.registers)]
            slot = _HEAD.pack(key, entry.time) + struct.pack(f"={len(registers)}Q", *registers)
            os.pwrite(space.memory, slot, start + window.start + at)
        except OSError:
            return
