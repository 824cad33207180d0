"""
What the tracer tells of threads that have handlers in their memory: what they are called, and whose they are.

The client looks that up itself, but for a process that has just been made, which may soon execute something else, and
for a thread that has ended, and is there only until somebody waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.linux.threadidentity import identity_of, program_of
from dprobes.engines.ptrace.tracer.native.idtables import leave_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["Identities"]


class Identities:
    """Tell of threads by ``send``."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send

    def born(self, pid: int, space: AddressSpace) -> None:
        """Tell of a process that has not run yet."""
        if space.patches.memories and (identity := identity_of(pid, pid)) is not None:
            self._send(replace(identity, program=program_of(pid)))

    def ended(self, thread: Thread) -> None:
        """Tell of a thread that has ended, and has not been waited for: until then nobody else gets its ids."""
        if thread.space.patches.memories and (identity := identity_of(thread.pid, thread.tid)) is not None:
            self._send(identity)
        leave_thread(thread.space, thread.tid)
