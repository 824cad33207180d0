"""The maps of a program's handlers, in memory that probed processes share with this one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.bpf.layout import PROBE_ENTRY_SIZE, STATUS_SIZE, MapName, ProbeField, power_of_two
from dprobes.bpf.lower.request import Tables
from dprobes.engines.inline.clock import Clock
from dprobes.engines.inline.memory.arrays import SharedArray
from dprobes.engines.inline.memory.hashes import SharedHash
from dprobes.engines.inline.memory.lifemark import LifeMark
from dprobes.engines.inline.memory.region import Region
from dprobes.engines.inline.memory.rings import SharedRings
from dprobes.engines.inline.sharedstate import PROBES_MAX, SharedState
from dprobes.engines.tablemaps import zeros_size
from dprobes.native.routines.ring import RingShape
from dprobes.rpn.needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.inline.borrowed import Borrowed
    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.rpn.program import Program

__all__ = ["STATE_MAX", "HandlerMaps", "new_state"]

STATE_MAX = 1 << 19
"""Bytes that the state of a handler may take."""

_STATES = 256
"""How many threads can be in handlers, preempted or not: what nobody has used takes no memory."""
_RINGS_SIZE, _RING_SIZE_MIN = 8 << 20, 1 << 20
"""Bytes of all rings together, and of each at least: pages that nobody has used take no memory."""
_STACK_RINGS_SIZE = 64 << 20
"""The same for entries with copies of stacks, some thousands of bytes each, which take long to be followed."""
_SPARE = 1 << 20


def _rings(cpus: int, program: Program) -> RingShape:
    size = _STACK_RINGS_SIZE if takes_user_stacks(program) else _RINGS_SIZE
    return RingShape(cpus, max(size // cpus, _RING_SIZE_MIN))


def new_state(program: Program) -> SharedState:
    """Return the state of a program that is new, in memory with room for the rest of its maps."""
    sizes = HandlerMaps.sizes()
    rings = _rings(sizes.cpus, program)
    size = sizes.states * (STATE_MAX + 8) + rings.rings * rings.stride + _SPARE
    region = Region(size + SharedState.size_of(sizes.cpus, program))
    variables = program.vars, program.gvars, program.cvars, program.tvars
    return SharedState(region, sizes.cpus, variables, program.tables)


class HandlerMaps:
    """
    Own the maps of one program: its ``state``, and what only handlers in processes and readers of rings need.

    A probed process has the memory elsewhere than this one; ``places`` says where.
    """

    def __init__(self, state: SharedState, program: Program) -> None:
        self._state = state
        sizes, region = self.sizes(), state.region
        states, rings = sizes.states, _rings(sizes.cpus, program)
        self.region = region
        self.clock = Clock(region)
        self.rings = SharedRings(region, rings)
        self._arrays = {
            MapName.CLAIMS: SharedArray(region, 8, states),
            MapName.STATUS: SharedArray(region, STATUS_SIZE),
            MapName.SCRATCH: SharedArray(region, STATE_MAX, states),
            MapName.ZEROS: SharedArray(region, max(zeros_size(program.tables), 8 * power_of_two(program.tvars))),
        }
        self.life_mark = LifeMark(state.mark)  # the last, as it has a thread, which whatever fails above would leave

    @staticmethod
    def sizes() -> Tables:
        """Return the sizes of the maps that handlers are compiled for."""
        cpus = power_of_two(os.cpu_count() or 1)
        return Tables(states=_STATES, cpus=cpus, probes=PROBES_MAX)

    def places(self, address: int, borrowed: Borrowed, others: Sequence[int] = ()) -> Mapping[MapName, MapPlace]:
        """
        Return where a process has the maps that has the memory at an address.

        ``others`` are the addresses of what is ``borrowed``.
        """
        self.region.place = address
        places = {name: array.place for name, array in self._arrays.items()} | {MapName.RING: self.rings.place}
        places |= {name: part.place for name, part in self._state.maps.items()}
        return {**places, **borrowed.places(others)}

    @property
    def shapes(self) -> Mapping[MapName, TableShape]:
        """What the hashes look like."""
        return {name: part.shape for name, part in self._state.maps.items() if isinstance(part, SharedHash)}

    @property
    def held_words(self) -> Iterator[int]:
        """Where in the region those words are that are not 0 just now: while a handler has what they stand for."""
        hashes = (part.locks for part in self._state.maps.values() if isinstance(part, SharedHash))
        memory = self.region.mapping
        for places in (self._arrays[MapName.CLAIMS].elements, *hashes):
            yield from (place for place in places if memory[place])

    def disable(self, probe: int) -> None:
        """Let no handler of a probepoint run any more."""
        self._state.probes.words[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 8] = 1

    def close(self) -> None:
        """Let handlers do nothing any more, and give these maps up; the state stays, to be looked at."""
        with contextlib.ExitStack() as stack:
            for array in self._arrays.values():
                stack.callback(array.close)
            stack.callback(self.clock.close)
            stack.callback(self.rings.close)
            stack.callback(self.life_mark.close)  # the first of all
