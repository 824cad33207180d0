"""
What is in the kernel of a guest, for ``Guest.call``: what a run may leave there, and modules to be unloaded.

These functions run in the guest.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Leftovers", "leftovers", "nothing_left", "unload_module"]

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_BPF = 321
_SYS_DELETE_MODULE = 176
_BPF_PROG_GET_NEXT_ID = 11
_BPF_LINK_GET_NEXT_ID = 31
_TIMEOUT = 20.0
_REGISTERS = 4

Leftovers = dict[str, str]
"""What is there, by where it was found; things that are nowhere do not appear."""

_TRACING = Path("/sys/kernel/tracing")
_FILES = (
    Path("/sys/kernel/debug/kprobes/list"),
    _TRACING / "kprobe_events",
    _TRACING / "uprobe_events",
    _TRACING / "enabled_functions",
)


def leftovers() -> Leftovers:
    """Return what is in the kernel, of whomever."""
    found = {str(path): path.read_text() for path in _FILES}
    found["programs"] = _ids(_BPF_PROG_GET_NEXT_ID)
    found["links"] = _ids(_BPF_LINK_GET_NEXT_ID)
    found["debug registers in use"] = _registers_in_use()
    return {name: text for name, text in found.items() if text}


def nothing_left() -> Leftovers:
    """Return what is still in the kernel after some time; the kernel takes links away in the background."""
    until = time.monotonic() + _TIMEOUT
    while (found := leftovers()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def unload_module(name: str) -> int:
    """Unload a kernel module; return the number of the error if it is in use, or 0."""
    result = _libc.syscall(_SYS_DELETE_MODULE, name.encode(), os.O_NONBLOCK)
    return ctypes.get_errno() if result else 0


def _ids(command: int) -> str:
    """Return the numbers of all programs, or links."""
    attributes = (ctypes.c_uint32 * 4)()
    ids: list[int] = []
    while _libc.syscall(_SYS_BPF, command, attributes, ctypes.sizeof(attributes)) == 0:
        ids.append(attributes[1])
        attributes[0] = attributes[1]
    return " ".join(map(str, ids))


def _registers_in_use() -> str:
    """Return how many debug registers of CPU 0 are in use, if any."""
    from dprobes.platform.linux.perf_calls import Access, open_breakpoint

    events: list[int] = []
    try:
        with suppress(OSError):
            while len(events) < _REGISTERS:
                events.append(open_breakpoint(0, 8, Access.WRITE, cpu=0))
        used = _REGISTERS - len(events)
        return str(used) if used else ""
    finally:
        for event in events:
            os.close(event)
