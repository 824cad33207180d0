"""
Links of a run: attached sites, and the removal of single ones.

Closing a link takes some 50 ms, for one site or for many. So the sites of a pattern share a link. To remove some of
them, the others get a new link before the old one is closed. For a moment both links are attached, so a probepoint has
two entries in the probe table, one for each link. Only one entry is enabled. At a hit the kernel runs one link's BPF
program after the other. If the entries are switched in between, neither program counts the hit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Notice
from dprobes.errors import reason_of
from dprobes.platform.linux.procfs import CpuNews

if TYPE_CHECKING:
    from dprobes.bpf.lower.lowering_request import Placement
    from dprobes.engines.ebpf.attach.map_objects import SharedMaps
    from dprobes.engines.ebpf.attach.site_spec import Site
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors

__all__ = ["Attachments", "CpuArrivals", "Group"]

_RENEWAL_INTERVAL = 0.5
"""Minimum number of seconds between two renewals of a link: sites that end in between are removed together."""

_CLOSERS = 64
"""Number of threads that close links: the kernel waits for a grace period at each, and the waits can overlap."""


@dataclass(eq=False, slots=True)
class Group:
    """
    Sites that share a BPF program: those of one definition with the same placement in one file, or of many.

    ``program`` is the descriptor of the BPF program, ``path`` leads to the file, and ``shown`` is the file's name for
    users. ``sites`` has pairs of a probepoint's number and one of its sites.
    """

    program: int
    path: str
    shown: str
    placement: Placement
    sites: list[tuple[int, Site]]
    bank: int = 0
    is_entry: bool = False
    """True if its program keeps entries of calls: it counts no hits, and remains while any probepoint needs it."""
    link: Descriptors | None = None
    renewed: float = field(default=float("-inf"))


Linker = Callable[[Group, Sequence[tuple[int, int]]], "Descriptors"]
"""Function that attaches a group's BPF program to pairs of a file offset and a cookie, and returns the links."""


class Attachments:
    """
    Attached groups, from which single probepoints can be removed.

    ``bank_size`` is the distance, in entries, between the two entries of a probepoint in the probe table.
    """

    def __init__(self, maps: SharedMaps, bank_size: int, link: Linker) -> None:
        self._maps = maps
        self._bank_size = bank_size
        self._link = link
        self._groups: set[Group] = set()
        self._groups_of: dict[int, list[Group]] = {}
        self._last_groups: dict[int, list[Group]] = {}
        self._ended: set[int] = set()
        self._dirty: set[Group] = set()
        self._left_behind: dict[int, int] = {}
        self._extra: dict[int, int] = {}
        self._counting = threading.Lock()
        self._closing: list[threading.Thread] = []
        self.is_closed = False

    def attach(self, group: Group) -> None:
        """Attach all sites of a group; raise a ``DprobesError`` if the kernel refuses one."""
        group.link = self._link(group, self._pairs(group))
        self._groups.add(group)
        for probe in {probe for probe, _ in group.sites}:
            self._groups_of.setdefault(probe, []).append(group)

    def _pairs(self, group: Group) -> list[tuple[int, int]]:
        base = group.bank * self._bank_size
        return [(site.offset, _cookie(base + probe, site.moved)) for probe, site in group.sites]

    def take_away(self, probe: int) -> bool:
        """
        Disable the handlers of a probepoint, which ``renew`` will detach.

        Return False if its removal has begun before.
        """
        if probe in self._ended:
            return False
        self._ended.add(probe)
        for group in self._groups_of.get(probe, ()):
            if not group.is_entry:
                self._maps.disable(group.bank * self._bank_size + probe)
            self._dirty.add(group)
        return True

    def detach(self, probe: int) -> None:
        """Close the links of a probepoint, which may be attached again. Its counters do not change."""
        for group in self._groups_of.pop(probe, ()):
            self._groups.discard(group)
            self._dirty.discard(group)
            old, group.link = group.link, None
            if old is not None:
                old.close()

    def has_ended(self, probe: int) -> bool:
        """Return whether the removal of a probepoint has begun."""
        return probe in self._ended

    def links(self) -> Iterator[Descriptors]:
        """Iterate over the BPF links of all attached groups."""
        yield from [group.link for group in self._groups if group.link is not None]

    def is_there(self, probe: int) -> bool:
        """Return whether a probepoint is attached and its removal has not begun."""
        return probe in self._groups_of and probe not in self._ended

    def is_disabled(self, probe: int) -> bool:
        """Return whether a handler of a probepoint is disabled."""
        groups = (self._last_groups if self.is_closed else self._groups_of).get(probe, ())
        return any(
            self._maps.is_disabled(group.bank * self._bank_size + probe) for group in groups if not group.is_entry
        )

    def expired(self) -> set[int]:
        """Return the numbers of the probepoints that handlers have disabled, and whose removal has not begun."""
        disabled = self._maps.disabled()
        return {
            probe
            for group in self._groups
            if not group.is_entry
            for probe, _ in group.sites
            if group.bank * self._bank_size + probe in disabled and probe not in self._ended
        }

    @property
    def is_settled(self) -> bool:
        """True if no group has sites of removed probepoints, which ``renew`` would detach."""
        return not self._dirty

    def renew(self, *, at_once: bool = False) -> None:
        """
        Update links after removals. Call this often.

        With ``at_once``, the uprobes have been removed when this returns. Otherwise, threads close the links.
        """
        now = time.monotonic()
        for group in list(self._dirty):
            remaining = [(probe, site) for probe, site in group.sites if probe not in self._ended]
            if remaining and not at_once and now - group.renewed < _RENEWAL_INTERVAL:
                continue
            self._dirty.discard(group)
            group.sites = remaining
            if remaining and group.is_entry:
                continue  # if it were attached twice for a moment, calls would be entered twice
            old, group.link = group.link, None
            if remaining:
                self._switch(group)
                group.renewed = now
            else:
                self._groups.discard(group)
            if old is not None:
                self._in_background(old.close)
        if at_once:
            self._join()

    def _switch(self, group: Group) -> None:
        """
        Attach the remaining sites of a group with the other of a probepoint's two entries in the probe table.

        These entries take over the counts, and are enabled. A handler that was running counts in the old entry.
        """
        old, new = group.bank * self._bank_size, (1 - group.bank) * self._bank_size
        probes = {probe for probe, _ in group.sites}
        for probe in probes:
            self._maps.disable(new + probe)
        group.bank = 1 - group.bank
        group.link = self._link(group, self._pairs(group))
        for probe in probes:
            with self._counting:
                hits, before = self._maps.hand_over(old + probe, new + probe)
                # Handlers that were running when the entries were switched have counted in the old one.
                self._extra[probe] = self._extra.get(probe, 0) + before - self._left_behind.get(probe, 0)
                self._left_behind[probe] = hits

    def hits(self, probe: int) -> int:
        """Return the number of hits of a probepoint, from both of its entries. Any thread may call this."""
        with self._counting:
            hits = self._maps.counters(probe).hits
            if probe in self._left_behind:
                other = self._maps.counters(probe + self._bank_size).hits
                hits += other - self._left_behind[probe] + self._extra[probe]
            return hits

    def _in_background(self, work: Callable[[], None]) -> None:
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = threading.Thread(target=work, name="closing links")
        thread.start()
        self._closing.append(thread)

    def _join(self) -> None:
        for thread in self._closing:
            thread.join()
        self._closing.clear()

    def close(self) -> None:
        """Remove all links, and wait until the kernel has removed them."""
        self._last_groups = dict(self._groups_of)
        self.is_closed = True
        waiting = [group.link for group in self._groups if group.link is not None]
        self._groups.clear()
        self._dirty.clear()

        def work() -> None:
            while True:
                try:
                    link = waiting.pop()
                except IndexError:
                    return
                link.close()

        # Probepoints that end from now on have no link that could be renewed.
        self._groups_of.clear()
        for _ in range(min(_CLOSERS, len(waiting)) - 1):
            self._in_background(work)
        work()
        self._join()


def _cookie(entry: int, moved: int) -> int:
    """Return the cookie of a site: the index of its entry in the probe table, and in higher bits ``Site.moved``."""
    return entry | (moved & 0xFFFF_FFFF) << 32


class CpuArrivals:
    """
    Follower of CPUs that come online. Samplers and watchpoints are events of each CPU, and must be attached to it.

    The kernel removes events from a CPU that goes offline. So a CPU that comes online again needs new ones, too.
    """

    def __init__(self) -> None:
        self._news: CpuNews | None = None
        self._deafness: Notice | None = None
        try:
            self._news = CpuNews()
        except OSError as error:
            message = f"CPUs that come online from now on are not sampled or watched: {reason_of(error)}"
            self._deafness = Notice(message, "the kernel's uevents (netlink) report them", is_warning=False)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that are readable when ``look`` should be called."""
        return () if self._news is None else (self._news.descriptor,)

    def look(self, attachments: Attachments) -> Iterator[Notice]:
        """Attach events on CPUs that have come online, and yield a notice about each."""
        if self._deafness is not None:
            yield self._deafness
            self._deafness = None
        for cpu in () if self._news is None else self._news.arrived():
            refusal: OSError | None = None
            for link in attachments.links():
                try:
                    link.renew(cpu)
                except OSError as error:
                    refusal = error
            if refusal is None:
                yield Notice(f"CPU {cpu} came online: it is sampled and watched from now on", is_warning=False)
            else:
                yield Notice(f"CPU {cpu} came online, and not all is sampled and watched there: {reason_of(refusal)}")

    def close(self) -> None:
        """Close the netlink socket that reports CPUs coming online."""
        if self._news is not None:
            self._news.close()
            self._news = None
