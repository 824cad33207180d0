"""What handlers in processes have done: their records, which come through rings, and counts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import ProbeField
from dprobes.engines.engine_interface import Notice
from dprobes.engines.inline.memory.shared_state import PROBES_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dprobes.engines.engine_interface import Counts
    from dprobes.engines.inline.hits.entry_index import EntryBuffer
    from dprobes.engines.inline.hits.entry_reader import RingReader
    from dprobes.engines.inline.memory.handler_maps import HandlerMaps
    from dprobes.engines.inline.memory.shared_state import SharedState
    from dprobes.engines.ptrace.client.program_run import Batch
    from dprobes.platform.linux.procfs import ThreadIdentity
    from dprobes.resolve.probe_state import ProbeState

__all__ = ["Damage", "HandlerHits", "LeftThings", "damage_notice", "refusal_notice"]

# What handlers have left without an end, and others wait for: entries of rings, claims of states, locks.
#
# A signal handler of the program may interrupt a handler, and jump away from it (siglongjmp). From here such a one
# looks like a thread that does not run just now. So what has stayed as it is for a while is noted, and the tracer asked
# to see each thread outside of handlers once: what was there before that, and still is, has been left.


_LOOK = 0.1
"""Seconds between looks."""
_PATIENCE, _PATIENCE_MAX = 0.5, 30.0
"""Seconds after which something counts as left at first, and if it often turned out that it was not."""


_WORD = -1


class LeftThings:
    """A watch over the memory of handlers."""

    def __init__(self, maps: HandlerMaps) -> None:
        self._maps = maps
        self._looked = 0.0
        self._since: dict[tuple[int, int], float] = {}
        """Since when each thing is as it is: a ring at a position, or for _WORD a word that is not 0."""
        self._ends: list[int] | None = None
        """Where the rings ended when the tracer was asked, which has not answered yet."""
        self._patience = _PATIENCE

    def are_suspected(self, now: float) -> bool:
        """Return whether it is time to ask the tracer; ``note_asking`` follows then."""
        if now < self._looked + _LOOK or self._ends is not None:
            return False
        self._looked = now
        rings = enumerate(ring.stalled_at for ring in self._maps.rings.rings)
        present = [(number, position) for number, position in rings if position is not None]
        present += [(_WORD, place) for place in self._maps.held_words]
        self._since = {thing: self._since.get(thing, now) for thing in present}
        return any(now >= since + self._patience for since in self._since.values())

    def note_asking(self) -> tuple[tuple[int, int], ...]:
        """Remember how far the rings are; return the words to be released, by offset and size."""
        self._ends = [ring.end for ring in self._maps.rings.rings]
        until = self._looked - self._patience
        return tuple((place, 8) for (kind, place), since in self._since.items() if kind == _WORD and since <= until)

    def note_answer(self, *, is_done: bool) -> None:
        """Take notice whether each thread has been seen outside of handlers."""
        ends, self._ends = self._ends, None
        self._since.clear()
        if not is_done:
            self._patience = min(2 * self._patience, _PATIENCE_MAX)
            return
        self._patience = _PATIENCE
        for ring, end in zip(self._maps.rings.rings, ends or (), strict=True):
            ring.leave(end)

    @property
    def entries(self) -> int:
        """How many entries of rings were given up."""
        return sum(ring.skipped for ring in self._maps.rings.rings)


_CORRECTION = 0.25
"""Seconds after which the clock of handlers is corrected again."""


class Damage(NamedTuple):
    """
    Findings in memory that probed processes have written over.

    These are entries that were skipped, how often all that was in a ring was given up, and probepoints and keys of
    tables with numbers that are no counts.
    """

    entries: int = 0
    rings: int = 0
    counts: int = 0
    keys: int = 0


class HandlerHits:
    """Read the records of one program's handlers from the memory of ``maps``; counts stay when that is given up."""

    def __init__(self, maps: HandlerMaps, reader: RingReader, state: SharedState) -> None:
        self._maps: HandlerMaps | None = maps
        self._reader = reader
        self._state = state
        self._left = LeftThings(maps)
        self._unfinished = 0
        """How many entries of the rings threads did not finish, because they were killed."""
        self._left_entries = 0
        """How many because a signal handler jumped away from what it had interrupted."""
        self._emitted: Sequence[int] = ()
        """How many records of each probepoint there were, when the reader is gone."""
        self._corrected = 0.0
        self._began = time.monotonic_ns()
        self._unknown: set[int] = set()
        """The probepoints whose counts in the memory cannot be counts."""
        self._damage = Damage()
        """The findings before the reader ended."""
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> int:
        """How many records threads did not finish."""
        return self._unfinished + self._left_entries

    @property
    def damage(self) -> Damage:
        """The findings in shared memory that no handler can have written."""
        maps = self._maps
        keys = 0 if self._state.keyed is None else sum(self._state.keyed.refused.values())
        if maps is None:
            return self._damage._replace(counts=len(self._unknown), keys=keys)
        return Damage(self._reader.refused, self._reader.damaged + maps.rings.damaged, len(self._unknown), keys)

    def limit(self, probes: int, ending: Collection[int]) -> None:
        """Take notice of how many probepoints there are, and which of them may have a last hit."""
        with self._lock:
            if self._maps is not None:
                self._reader.limit(probes, ending)

    @property
    def is_busy(self) -> bool:
        """Whether so much has come that there is more already."""
        return self._reader.is_busy

    def begin_program(self, pid: int) -> None:
        """Take notice that a process executes what has handlers from now on."""
        if self._reader.names is not None:
            self._reader.names.begin_program(pid)

    def told(self, identity: ThreadIdentity) -> None:
        """Take notice of what a thread is called, and whose it is."""
        with self._lock:
            if self._reader.names is not None:
                self._reader.names.told(identity)

    def take(self, *, is_over: bool) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """Return the records that have come, each with its probepoint, and the probepoints that had their last hit."""
        with self._lock:
            if self._maps is None:
                return [], []
            now = time.monotonic()
            if now > self._corrected + _CORRECTION:
                self._corrected = now
                self._maps.clock.correct()
            began = time.monotonic_ns() - self._reader.horizon
            batches = self._reader.read(self._maps.rings.move, began)
            if is_over:
                batches += self._reader.read(self._move_rest, None)
            ended, self._reader.ended = self._reader.ended, []
            self._left_entries = self._left.entries
        return batches, ended

    def _move_rest(self, buffer: EntryBuffer, _: object) -> set[int]:
        assert self._maps is not None
        self._unfinished += self._maps.rings.move_rest(buffer)
        return set()

    def to_be_released(self) -> tuple[tuple[int, int], ...] | None:
        """Return the words to release (``ReleaseMemory``) if handlers seem to have left something others wait for."""
        if self._maps is None or not self._left.are_suspected(time.monotonic()):
            return None
        return self._left.note_asking()

    def released(self, *, is_done: bool) -> None:
        """Take notice of the answer."""
        with self._lock:
            if self._maps is not None:
                self._left.note_answer(is_done=is_done)

    def add_counts(
        self, counts: Sequence[Counts], jumps: Mapping[int, set[str]], limits: Mapping[int, tuple[int, int]]
    ) -> None:
        """
        Add what happened at probepoints with ``jumps`` without the tracer.

        Those with a ``passcount`` or ``maxhits`` are limited: such hits the tracer has drawn as well.
        """
        with self._lock:
            emitted = self._emitted if self._maps is None else self._reader.counts
            records = {number: emitted[number] for number in list(jumps)}
        most = (time.monotonic_ns() - self._began) * (os.cpu_count() or 1)  # a hit takes a nanosecond at least
        fields = ProbeField.HITS, ProbeField.LOST, ProbeField.MISSED
        for number, each in enumerate(counts[:PROBES_MAX]):
            if number not in records:
                continue
            found = [self._state.count(number, field) for field in fields]
            if max(found) > most:
                self._unknown.add(number)
                found = [0 for _ in fields]
            (hits, lost, missed), (passcount, maxhits) = found, limits[number]
            if passcount or maxhits:
                drawn = min(hits, passcount + maxhits) if maxhits else hits
                each.hits, each.passed = drawn + each.missed, min(hits, passcount)
            else:
                each.hits += hits
            each.records += records[number]
            each.lost += lost
            each.missed += missed
            each.executed = (*each.executed, *(f"inline ({method})" for method in sorted(jumps[number])))

    def close(self) -> None:
        """Give up all but the counts."""
        with self._lock:
            damage = self.damage
            maps, self._maps = self._maps, None
            if maps is not None:
                self._damage = damage
                self._emitted = tuple(self._reader.counts)
        with contextlib.ExitStack() as stack:
            if maps is not None:
                stack.callback(maps.close)
                stack.callback(self._reader.close)


# What a user hears at the end: of probepoints that have had breakpoints all the time, and of damaged memory.


_REASONS = 4
"""How many reasons a user is told."""


def refusal_notice(reasons: Sequence[str]) -> Notice:
    """Say why probepoints have had no jumps; each has a reason."""
    count, kinds = len(reasons), Counter(reasons)
    listed = [f"{reason}{f' ({number})' if count > 1 else ''}" for reason, number in kinds.most_common(_REASONS)]
    if len(kinds) > _REASONS:
        listed.append("...")
    what = "a probepoint has had a breakpoint instead of a jump"
    if count > 1:
        what = f"{count} probepoints have had breakpoints instead of jumps"
    return Notice(f"{what}: {'; '.join(listed)}", is_warning=False)


def damage_notice(damage: Damage) -> Notice:
    """Warn that probed processes have damaged the memory of their handlers, and list what was left out."""
    parts = (
        (damage.entries, "record that no handler makes was dropped", "records that no handler makes were dropped"),
        (damage.rings, "time all records of a CPU were given up", "times all records of a CPU were given up"),
        (damage.counts, "probepoint has no count of hits", "probepoints have no counts of hits"),
        (damage.keys, "key of a table without a count was left out", "keys of tables without counts were left out"),
    )
    found = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)
    return Notice(
        f"a probed process has written over the memory of its handlers: {found}",
        hint="the other values may be wrong as well; '--engine ptrace' shares no memory with the process",
    )
