"""The maps of the overload guard (``layout.CpuLoad``, ``layout.ProbeLoad``)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from dprobes.bpf.layout import (
    CPU_LOAD_SIZE,
    PROBE_LOAD_SIZE,
    CpuLoad,
    MapName,
    ProbeLoad,
    power_of_two,
)
from dprobes.engines.ebpf.kernel.bpfmaps import ArrayMap
from dprobes.engines.ebpf.overload.hitcosts import hit_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dprobes.engines.ebpf.attach.siteplan import Site

__all__ = ["LoadMaps"]


class LoadMaps:
    """The times and counts that hits leave; leaving the context manager closes the maps."""

    def __init__(self, probes: int, cpus: int) -> None:
        """Make them for so many entries of the probe table and so many CPUs, a power of two."""
        with contextlib.ExitStack() as stack:
            self._cpus = stack.enter_context(ArrayMap(CPU_LOAD_SIZE * cpus, name="dprobes_cpus"))
            self._probes = stack.enter_context(ArrayMap(PROBE_LOAD_SIZE * power_of_two(probes), name="dprobes_loads"))
            # Mapping one takes a descriptor as well; what can be read at all can be read to the end.
            _ = self._cpus.words, self._probes.words, self._probes.halves
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def descriptors(self) -> Mapping[MapName, int]:
        """The descriptors by what handlers call the maps."""
        return {MapName.CPU_LOAD: self._cpus.fd, MapName.PROBE_LOAD: self._probes.fd}

    def spent(self) -> list[int]:
        """Return the nanoseconds that hits have taken of each CPU."""
        words, stride = self._cpus.words, CPU_LOAD_SIZE // 8
        both = words[CpuLoad.TRAPS // 8 :: stride], words[CpuLoad.HANDLERS // 8 :: stride]
        return [traps + handlers for traps, handlers in zip(*both, strict=True)]

    def column(self, what: ProbeLoad) -> list[int]:
        """Return a 64-bit field of all entries."""
        return list(self._probes.words[what // 8 :: PROBE_LOAD_SIZE // 8])

    def skipped(self, entry: int) -> int:
        """Return how many hits of an entry ran no handler."""
        count: int = self._probes.words[(entry * PROBE_LOAD_SIZE + ProbeLoad.SKIPPED) // 8]
        return count

    def cost(self, entry: int) -> int:
        """Return what a hit of an entry costs besides its handler, in nanoseconds."""
        cost: int = self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.COST) // 4]
        return cost

    def set_costs(self, sites: Iterable[tuple[Iterable[int], Site]]) -> None:
        """Say what a hit costs besides its handler; ``sites`` come with the entries of their probepoints."""
        halves = self._probes.halves
        at_entry: dict[int, int] = {}
        for entries, site in sites:
            cost = hit_cost(site)
            for entry in entries:
                place = (entry * PROBE_LOAD_SIZE + ProbeLoad.COST) // 4
                if site.is_entry:
                    at_entry[place] = cost
                else:
                    halves[place] = max(halves[place], cost)
        for place, cost in at_entry.items():
            halves[place] += cost

    def thin(self, entry: int, thinning: int) -> None:
        """Let one hit of so many run the handler."""
        self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.THINNING) // 4] = thinning
