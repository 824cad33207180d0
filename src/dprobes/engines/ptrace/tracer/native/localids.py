"""The ids that threads of a process have in a PID namespace of its own, as data."""

from __future__ import annotations

from dataclasses import field

from dprobes.engines.linux.procfs import ids_of
from dprobes.lazydataclass import dataclass

__all__ = ["LocalIds"]


@dataclass(slots=True, eq=False)
class LocalIds:
    """
    The threads of a process in a nested namespace: the local ids of those that its handlers know, by our ids.

    Other processes that run in its memory, after vfork, are not among them.
    """

    pid: int
    by_thread: dict[int, int] = field(default_factory=dict)
    is_full: bool = False
    """Whether there was a thread that had no room: handlers would not know it."""

    @classmethod
    def of(cls, pid: int) -> LocalIds | None:
        """Return room for the threads of a process, None if they have the same ids there as here."""
        return cls(pid) if len(ids_of(pid)) > 1 else None

    def local_of(self, tid: int) -> int | None:
        """Return the id that a thread of the process has in its own namespace, None if it is gone."""
        local = self.by_thread.get(tid)
        if local is None and (found := ids_of(tid)):
            local = self.by_thread[tid] = found[-1]
        return local
