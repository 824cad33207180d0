"""The numbers of probepoints: the index in a session's ``probes``, in the probe table and in ring entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.attach.perfevents import EventProbe
    from dprobes.engines.ebpf.attach.plannedfile import PlannedCode
    from dprobes.engines.ebpf.attach.siteplan import Site
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["ProbeNumbers"]


class ProbeNumbers:
    """
    The probepoints of a run in the order of their numbers, through all files; ``probes`` only grows.

    ``sites`` are where each of them has breakpoints, ``events`` those that are perf events.
    """

    def __init__(self) -> None:
        self.probes: list[Probepoint] = []
        self.sites: dict[int, tuple[Site, ...]] = {}
        self.events: dict[int, EventProbe] = {}

    def enter(self, file: PlannedCode) -> range:
        """Give the probepoints of a file their numbers."""
        first = len(self.probes)
        for probe, sites in file.probes:
            self.sites[len(self.probes)] = sites
            self.probes.append(probe)
        return range(first, len(self.probes))

    def enter_events(self, events: Sequence[EventProbe]) -> range:
        """Give events their numbers."""
        first = len(self.probes)
        for event in events:
            self.events[len(self.probes)] = event
            self.probes.append(event.probe)
        return range(first, len(self.probes))

    def renew_event(self, number: int, event: EventProbe) -> None:
        """Put another event in the place of one: the same watchpoint or sampler, at other addresses."""
        self.events[number] = event
        self.probes[number] = event.probe

    def link_address(self, number: int) -> int:
        """Return the link address of a probepoint's written place, or its address in the kernel."""
        return self.probes[number].instruction.address

    def limit(self, number: int) -> int:
        """Return how many hits a probepoint takes, 0 if as many as there are."""
        definition = self.probes[number].definition
        return definition.passcount + definition.maxhits if definition.maxhits else 0
