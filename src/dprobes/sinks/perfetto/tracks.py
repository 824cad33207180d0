"""
The tracks of a trace: one for each thread, below that of its process, and one for each program, above its counters.

A track is described before its first event, and again when its process or thread has got another name.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING

from dprobes.sinks.perfetto.messages import counter_track, named_track, process_track, thread_track

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord
    from dprobes.record.origin import RecordSource
    from dprobes.sinks.perfetto.messages import Packets

__all__ = ["Tracks"]

_KNOWN_MAX = 1 << 16
"""Tracks that are known to be described; those of more processes are described again."""

_MASK = (1 << 64) - 1


class Tracks:
    """Number tracks, and describe them."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        # The numbers of tracks are unique among all writers of a trace.
        self._first = secrets.randbits(64)
        self._described: dict[int, str | None] = {}

    def of_record(self, out: list[bytes], source: RecordSource, record: LogRecord) -> int:
        """Return the track of a record; what describes it is added to ``out``."""
        pid, tid, name = record.pid, record.tid, record.process_name
        if pid is None:
            return self.of_program(out, source)
        process = (self._first + (pid << 32)) & _MASK
        if process not in self._described or (pid == tid and self._is_new(process, name)):
            self._describe(out, process, name, process_track(process, pid, name))
        if tid is None:
            return process
        thread = (process + 1 + tid) & _MASK
        if self._is_new(thread, name):
            self._describe(out, thread, name, thread_track(thread, process, pid, tid, name))
        return thread

    def of_program(self, out: list[bytes], source: RecordSource) -> int:
        """Return the track of what is about a program and no process."""
        track = (self._first - 1 - source.number) & _MASK
        if self._is_new(track, source.name):
            self._describe(out, track, source.name, named_track(track, f"dprobes: {source.name}"))
        return track

    def of_counter(self, out: list[bytes], source: RecordSource, name: str) -> int:
        """Return the track of a number of a program's tables."""
        parent = self.of_program(out, source)
        # The same in all traces of a writer, and unlike those of threads, as far as 64 bits can be.
        digest = blake2b(f"{source.number} {name}".encode("utf-8", "backslashreplace"), digest_size=8).digest()
        track = (self._first ^ int.from_bytes(digest, "little")) & _MASK
        if self._is_new(track, name):
            self._describe(out, track, name, counter_track(track, parent, name))
        return track

    def _is_new(self, track: int, name: str | None) -> bool:
        return self._described.get(track, ...) != name

    def _describe(self, out: list[bytes], track: int, name: str | None, descriptor: bytes) -> None:
        if len(self._described) >= _KNOWN_MAX:
            self._described.clear()
        self._described[track] = name
        out.append(self._packets.track(descriptor))
