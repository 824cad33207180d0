"""
Whose a breakpoint is that stands where a program wants its own: that of another dprobes, as far as /proc says so.

A process's tracer is in its status. Uprobes belong to nobody's memory: what is known is which processes of dprobes hold
links to some.
"""

from __future__ import annotations

import os
from pathlib import Path

from dprobes.engines.linux.procfs import process_field
from dprobes.engines.refusals import is_dprobes, probed_by

__all__ = ["jump_text", "tracer_text", "uprobe_holders"]

_UPROBE_LINKS = (b"link_type:\tuprobe_multi\n", b"link_type:\tperf\n")


def tracer_text(tracer: int) -> str:
    """Return the words for the breakpoint of a process that traces another one."""
    if (module := probed_by(tracer)) is not None:
        owner = process_field(tracer, "PPid")
        return f"a breakpoint of the dprobes of process {owner}, which began with a program for '{module}', is there"
    return f"a breakpoint of process {tracer} ({process_field(tracer, 'Name')}) is there"


def jump_text(tracer: int) -> str | None:
    """Return the words for what a process that traces another one has written there; None if it is no dprobes."""
    module = probed_by(tracer) if tracer else None
    if module is None:
        return None
    owner = process_field(tracer, "PPid")
    return f"a jump of the dprobes of process {owner}, which began with a program for '{module}', needs its bytes"


def uprobe_holders() -> list[int]:
    """Return the other processes of dprobes that hold links to uprobes and that this user may look at, in order."""
    own = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return sorted(pid for pid in pids if pid != own and is_dprobes(pid) and _holds_uprobes(pid))


def _holds_uprobes(pid: int) -> bool:
    try:
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            if any(link in path.read_bytes() for link in _UPROBE_LINKS):
                return True
    except OSError:
        pass  # it has ended, or is another user's
    return False
