"""
What threads of probed processes are called, and whose they are: the part of a record that handlers do not write.

A handler that asked the kernel would make system calls, which may end a process that has a filter for them. So a record
names its thread, and the reader looks in ``/proc``: when it sees the thread for the first time, and some times in a
second as long as that makes records. Of processes that are made, and of threads that have ended, the tracer tells while
it has them: so nothing is missed of the short-lived.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from dprobes.engines.inline.memory.shared_memory import Region, SharedHash, Words
from dprobes.native.routines.entry_walk import NAMES, NOBODY_KNOWS
from dprobes.platform.linux.procfs import identity_of, program_of

if TYPE_CHECKING:
    from dprobes.platform.linux.procfs import ThreadIdentity

__all__ = ["ThreadNames", "thread_key"]

_ROW = struct.Struct("<16sII")
_LOOK_AGAIN = 10_000_000
"""Nanoseconds after which it is looked again what threads are called."""
_LOOKS_MAX = 32
"""How many threads are looked at in a row."""
_SPACE = 1 << 16

_PID_LIMIT = 1 << 22
"""PID_MAX_LIMIT (include/linux/threads.h)."""
_LEARNT_MAX = 1024
"""How many threads are looked for in a reading that were not known before."""


def thread_key(pid: int, tid: int) -> int:
    """Return the key of a thread."""
    return pid << 32 | tid


class ThreadNames:
    """The threads of which something is known; ``seen`` is where a walk lists those that it has found records of."""

    def __init__(self) -> None:
        self._region = Region(NAMES.size + _SPACE)
        self._region.place = self._region.own_address
        self._table = SharedHash(self._region, NAMES)
        self._nameless: set[int] = set()
        self._programs: dict[int, tuple[int, int] | None] = {}
        """What processes execute, as far as that was looked at: device and inode of the file."""
        self._last: dict[int, bytes] = {}
        """What was known last of a thread of each process, for those of which nothing else is."""
        self._met: set[int] = set()
        """Processes that have got memory for handlers, or were met in records before."""
        self.awaits_tracer = True
        """Whether what the tracer has to say may still be on its way."""
        self._looked = 0
        self._learned = 0
        """How many threads were met in this reading of which nothing was known."""
        self._due: list[int] = []
        self.seen = Words(NAMES.entries * 8)

    @property
    def table_address(self) -> int:
        """Where the table is."""
        return self._table.place.address

    def learn(self, key: int) -> None:
        """
        Find out about a thread that has made a record; if that is not possible, note that nobody knows.

        That a process has been made, the tracer has said before its first record; but that may not have been read yet,
        and the process execute something else by now. So the first record of one waits for the next reading.
        """
        pid, tid = key >> 32, key & 0xFFFF_FFFF
        identity = None
        self._learned += 1
        if pid >= _PID_LIMIT or self._learned > _LEARNT_MAX:
            pass  # no thread has such a number, or nobody has so many new ones at once
        elif pid in self._programs or pid in self._met or not self.awaits_tracer:
            identity = identity_of(pid, tid)
        if len(self._met) < _PID_LIMIT >> 6:
            self._met.add(pid)
        if identity is None:
            self._nameless.add(key)
            self._set(key, _ROW.pack(b"", 0, NOBODY_KNOWS))
            return
        if pid not in self._programs:
            self._programs[pid] = program_of(pid)
        self._know(key, identity)

    def told(self, identity: ThreadIdentity) -> None:
        """Take notice of what the tracer tells of a new process, or of a thread that has ended."""
        if identity.program is not None:
            self._programs[identity.pid] = identity.program
        key = thread_key(identity.pid, identity.tid)
        self._nameless.discard(key)
        self._know(key, identity)

    def begin_program(self, pid: int) -> None:
        """Forget what is known of a process, which executes another program by now."""
        self._programs.pop(pid, None)
        self._met.add(pid)
        for key in list(self._table):
            if int.from_bytes(key, "little") >> 32 == pid:
                self._table.discard(key)

    def settle(self) -> None:
        """Let threads of which nobody knows be called as another one of their process."""
        for key in self._nameless:
            self._set(key, self._last.get(key >> 32, _ROW.pack(b"", 0, 0)))
        self._nameless.clear()

    def look_again(self, seen_end: int) -> None:
        """Look again at threads that make records; ``seen_end`` is where the list of the last reading ends."""
        for key in self._nameless:
            self._table.discard(_bytes(key))
        self._nameless.clear()
        self._learned = 0
        now = time.monotonic_ns()
        if now < self._looked + _LOOK_AGAIN:
            return
        self._looked = now
        if not self._due:
            self._due = list(self.seen.words[: max(0, seen_end - self.seen.address) // 8])
        due, self._due = self._due[:_LOOKS_MAX], self._due[_LOOKS_MAX:]
        for key in due:
            pid, tid = key >> 32, key & 0xFFFF_FFFF
            identity = identity_of(pid, tid)
            # What executes another program has another name, and its records have not come yet.
            if identity is not None and (tid != pid or self._programs.get(pid) == program_of(pid)):
                self._know(key, identity)

    def _know(self, key: int, identity: ThreadIdentity) -> None:
        row = _ROW.pack(identity.name, identity.uid, 0)
        self._last[key >> 32] = row
        self._set(key, row)

    def _set(self, key: int, row: bytes) -> None:
        self._table[_bytes(key)] = row

    def close(self) -> None:
        """Give the memory up."""
        self.seen.close()
        self._region.close()


def _bytes(key: int) -> bytes:
    return key.to_bytes(8, "little")
