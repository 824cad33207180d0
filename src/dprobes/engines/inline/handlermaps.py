"""The maps of a program's handlers, in memory that probed processes share with this one."""

from __future__ import annotations

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
from dprobes.engines.inline.memory.tables import SharedTables, tables_size
from dprobes.engines.tablemaps import zeros_size
from dprobes.native.routines.ring import RingShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.rpn.tables import Table

__all__ = ["PROBES_MAX", "HandlerMaps"]

PROBES_MAX = 1 << 14
"""How many probepoints of a program handlers in processes can count."""

_STATES_PER_CPU = 4
_RINGS_SIZE, _RING_SIZE_MIN = 16 << 20, 1 << 20
"""Bytes of all rings together, and of each at least: pages that nobody has used take no memory."""
_SPARE = 1 << 20


class HandlerMaps:
    """
    Own the maps of one program, for which a state of ``state_size`` bytes is enough.

    A probed process has the memory elsewhere than this one; ``places`` says where.
    """

    def __init__(self, state_size: int, tables: Sequence[Table] = ()) -> None:
        sizes = self.sizes()
        cpus, states = sizes.cpus, sizes.states
        rings = RingShape(cpus, max(_RINGS_SIZE // cpus, _RING_SIZE_MIN))
        size = states * (state_size + 8) + PROBES_MAX * PROBE_ENTRY_SIZE + rings.rings * rings.stride + _SPARE
        size += tables_size(tables)
        self.region = region = Region(size)
        self.life_mark = LifeMark(region)  # the first one: so others find it who know nothing of maps
        self.clock = Clock(region)
        self.probes = SharedArray(region, PROBE_ENTRY_SIZE, PROBES_MAX)
        self.rings = SharedRings(region, rings)
        self._arrays = {
            MapName.CLAIMS: SharedArray(region, 8, states),
            MapName.STATUS: SharedArray(region, STATUS_SIZE),
            MapName.SCRATCH: SharedArray(region, state_size, states),
            MapName.PROBES: self.probes,
            MapName.ZEROS: SharedArray(region, zeros_size(tables) or 8),
        }
        self.keyed = SharedTables(tables, region) if tables else None

    @staticmethod
    def sizes() -> Tables:
        """Return the sizes of the maps that handlers are compiled for."""
        cpus = power_of_two(os.cpu_count() or 1)
        return Tables(states=_STATES_PER_CPU * cpus, cpus=cpus, probes=PROBES_MAX)

    def places(self, address: int) -> Mapping[MapName, MapPlace]:
        """Return where a process has the maps that has the memory at an address."""
        self.region.place = address
        places = {name: array.place for name, array in self._arrays.items()} | {MapName.RING: self.rings.place}
        if self.keyed is not None:
            places |= {name: part.place for name, part in self.keyed.maps.items()}
        return places

    @property
    def shapes(self) -> Mapping[MapName, TableShape]:
        """What the hashes of keyed tables look like."""
        parts = {} if self.keyed is None else self.keyed.maps
        return {name: part.shape for name, part in parts.items() if isinstance(part, SharedHash)}

    def count(self, probe: int, field: ProbeField) -> int:
        """Return one of the counters of a probepoint."""
        value: int = self.probes.words[(probe * PROBE_ENTRY_SIZE + field) // 8]
        return value

    def disable(self, probe: int) -> None:
        """Let no handler of a probepoint run any more."""
        self.probes.words[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 8] = 1

    def close(self) -> None:
        """Give the memory up; processes that map it go on with it."""
        if self.keyed is not None:
            self.keyed.__exit__()
        self.life_mark.close()
        self.rings.close()
        self.clock.close()
        for array in self._arrays.values():
            array.close()
        self.region.close()
