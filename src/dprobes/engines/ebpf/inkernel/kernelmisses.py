"""
Hits in the kernel that ran no handler, as the kernel counts them.

It may have to await more returns than it has room for, or be hit while a handler runs on that processor. It counts by
links and by programs: what one of many functions has missed belongs to all of them together.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.linux.bpfcalls import program_info
from dprobes.engines.linux.linkinfo import LINK_INFO, MISSED, MISSED_MANY, missed_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.ebpf.attach.sitelinks import Group
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["KernelMisses"]

_MANY = (Placement.ENTRY, Placement.ENTRY_RETURN)


class KernelMisses:
    """The misses of a run, by the probepoints that share a link or a program; any thread may ask."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._lock = threading.Lock()
        self._links: set[_WatchedLinks] = set()
        self._programs: dict[int, tuple[int, ...]] = {}
        self._ended: Counter[tuple[int, ...]] = Counter()

    def watch(self, links: Descriptors, group: Group) -> Descriptors:
        """Count what the links of a group miss until they are closed, and its program until ``close``; return them."""
        probes = tuple(probe for probe, _ in group.sites)
        if not probes:
            return links
        with self._lock:
            self._programs.setdefault(group.program, probes)
        count = self._count_of(links, group)
        if count is None:
            return links
        owners = [probes] if group.placement in _MANY else [(probe,) for probe in probes]
        watched = _WatchedLinks(links, owners, count, self)
        with self._lock:
            self._links.add(watched)
        return watched

    def _count_of(self, links: Descriptors, group: Group) -> Callable[[Sequence[int]], Sequence[int]] | None:
        """Return what tells how many hits each of some links has missed, by descriptors; None if nothing does."""
        if group.placement.is_trampoline:
            return None
        if Feature.LINK_MISSED in self._features:
            member = MISSED_MANY if group.placement in _MANY else MISSED
            offset = self._features.types.member_offset(LINK_INFO, member)
            return lambda descriptors: [missed_hits(each, offset) for each in descriptors]
        if group.sites[0][1].anchor:
            from dprobes.engines.ebpf.inkernel.waitingprobes import WaitingLinks

            assert isinstance(links, WaitingLinks), "what has an anchor waits for its module"
            return lambda _: links.missed()
        return None

    def settle(self, links: _WatchedLinks) -> None:
        """Note what links have missed that are about to be closed."""
        with self._lock:
            if links in self._links:
                self._links.discard(links)
                self._ended.update(links.missed())

    def counts(self) -> Counter[tuple[int, ...]]:
        """Return how many hits were missed so far, by the probepoints that they belong to."""
        with self._lock:
            found = Counter(self._ended)
            for links in self._links:
                found.update(links.missed())
            for program, probes in self._programs.items():
                found[probes] += program_info(program).recursion_misses
            return found

    def close(self) -> None:
        """Keep the counts: the programs are about to be closed."""
        counts = self.counts()
        with self._lock:
            self._links.clear()
            self._programs.clear()
            self._ended = counts


class _WatchedLinks(Descriptors):
    """The descriptors of ``links``, which tell what they have missed before they are closed; each is of ``probes``."""

    def __init__(
        self,
        links: Descriptors,
        probes: Sequence[tuple[int, ...]],
        count: Callable[[Sequence[int]], Sequence[int]],
        misses: KernelMisses,
    ) -> None:
        descriptors = links.detach()
        super().__init__(descriptors)
        self._owner = links
        self._links = dict(zip(probes, descriptors, strict=True))
        self._count = count
        self._misses = misses

    def missed(self) -> Counter[tuple[int, ...]]:
        """Return how many hits were missed, by the probepoints of a link."""
        return Counter(dict(zip(self._links, self._count([*self._links.values()]), strict=True)))

    def close(self) -> None:
        """Note what was missed, and give up the links, with what else their owner has."""
        self._misses.settle(self)
        super().close()
        self._owner.close()
