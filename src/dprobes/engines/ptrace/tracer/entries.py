"""
The entries of functions: when the calls that have not returned were made, and with what registers.

A call is known by its process, its probepoint, and its frame: the address of its return address. No two calls of a
function that go on have the same one, on whatever stack and whichever thread, but for those that a tail call leads to:
the entry of a function that is left by a jump is taken away, and kept with the return that is awaited. A function that
was left without a return (``longjmp``, an exception) leaves its entry behind, until the same frame is entered again or
there are too many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.ptrace.tracer.programs import Probe

__all__ = ["ENTRIES_MAX", "Entries", "Entry"]

ENTRIES_MAX = 1 << 14
"""How many entries are kept at a time; of more the oldest ones are forgotten. The eBPF engine keeps as many."""


class Entry(NamedTuple):
    """Hold the beginning of a call: the time, and registers by their index."""

    time: int
    registers: Mapping[int, int]


class Entries:
    """The entries of an address space."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Probe, int], Entry] = {}

    def enter(self, process: int, probe: Probe, frame: int, entry: Entry) -> None:
        """Keep the entry of a call."""
        key = (process, probe, frame)
        self._entries.pop(key, None)
        if len(self._entries) >= ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = entry

    def take(self, process: int, probe: Probe, frame: int) -> Entry | None:
        """Return the entry of a call, None if nobody has seen it; it is kept no longer."""
        return self._entries.pop((process, probe, frame), None)

    def take_all(self, probe: Probe) -> list[tuple[int, Entry]]:
        """Return the frames and entries of all calls of a probepoint, which are kept no longer."""
        keys = [key for key in self._entries if key[1] is probe]
        return [(key[2], self._entries.pop(key)) for key in keys]

    def drop(self, probe: Probe) -> None:
        """Forget the calls of a probepoint."""
        for key in [key for key in self._entries if key[1] is probe]:
            del self._entries[key]
