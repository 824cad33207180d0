"""
Groups of probepoints in the kernel: their attachment, and the hits that the kernel has missed.

If the kernel refuses some places, the others are attached. If it refuses the only probepoint of a program, this is an
error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.errors import EngineError
from dprobes.platform.linux.bpf_calls import LINK_INFO, MISSED, MISSED_MANY, ProgramType, missed_hits, program_info
from dprobes.resolve.probepoints import LeftOutProbe, ProbeState
from dprobes.rpn.rpn_program import Glob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.bpf.lower.lowering_request import Request
    from dprobes.bpf.map_layouts import MapName
    from dprobes.engines.ebpf.attach.site_links import Group
    from dprobes.engines.ebpf.attach.site_spec import Site
    from dprobes.engines.ebpf.inkernel.kernel_spec import PlannedKernel
    from dprobes.engines.ebpf.inkernel.waiting_kprobes import WaitingProbes
    from dprobes.engines.ebpf.kernel.bpf_links import EntryKprobes
    from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["KernelGroups", "KernelMisses", "KprobeList", "parse_kprobes"]

_LIST = Path("/sys/kernel/debug/kprobes/list")
_INTERVAL = 1.0
"""Minimum number of seconds between two readings of the list, which may have thousands of lines."""
_ENDBR = 4
_WAYS = {"FTRACE": "ftrace", "OPTIMIZED": "jump"}


class KprobeList:
    """
    The kernel's list of kprobes in debugfs, as of the last ``look``: it shows how each is implemented.

    A kprobe is a call of ftrace, a jump, or a breakpoint. The kernel optimizes a kprobe to a jump some time after its
    registration, and reverts that when another probe is placed nearby.
    """

    def __init__(self, path: Path = _LIST) -> None:
        self._path = path
        self._ways: dict[int, str] = {}
        self._read = float("-inf")
        self._is_last = False

    def look(self, *, is_last: bool = False) -> None:
        """
        Read the kernel's list of kprobes, unless it was read within a second.

        After a call with ``is_last`` it is not read again.
        """
        now = time.monotonic()
        if self._is_last or (now - self._read < _INTERVAL and not is_last):
            return
        self._read, self._is_last = now, is_last
        try:
            self._ways = parse_kprobes(self._path.read_text())
        except OSError:
            self._ways = {}  # without debugfs nothing is known

    def way(self, address: int) -> str | None:
        """Return the implementation of the kprobe at an address, or after an ENDBR there; None if it is unknown."""
        return self._ways.get(address) or self._ways.get(address + _ENDBR)


def parse_kprobes(text: str) -> dict[int, str]:
    """
    Return the implementation of kprobes (``ftrace``, ``jump`` or ``breakpoint``), keyed by address.

    A line is ``ADDRESS  k|r  NAME+DISTANCE  MODULE  [FLAG]...`` (``report_probe`` in kernel/kprobes.c).
    """
    found = {}
    for line in text.splitlines():
        address, _, rest = line.partition(" ")
        flags = re.findall(r"\[(\w+)\]", rest)
        if "GONE" not in flags and "DISABLED" not in flags:
            found[int(address, 16)] = next((_WAYS[flag] for flag in flags if flag in _WAYS), "breakpoint")
    return found


_MANY = (Placement.ENTRY, Placement.ENTRY_RETURN)


class KernelMisses:
    """
    Counts of hits for which the kernel ran no handler, keyed by the probepoints that share a link or a BPF program.

    The kernel may have no room to track another pending return, or a handler may already run on that CPU. The kernel
    counts the misses of all functions of a link together. Any thread may call the methods.
    """

    def __init__(self, features: Features) -> None:
        self._features = features
        self._lock = threading.Lock()
        self._links: set[_WatchedLinks] = set()
        self._programs: dict[int, tuple[int, ...]] = {}
        self._ended: Counter[tuple[int, ...]] = Counter()
        self.has_watched = False
        """True if ``watch`` was called for links or BPF programs that can miss hits."""

    def watch(self, links: Descriptors, group: Group) -> Descriptors:
        """
        Count the missed hits of a group's links until they are closed, and of its BPF program until ``close``.

        Return the links, which replace ``links``.
        """
        self.has_watched = True
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
        """
        Return a function that returns the numbers of missed hits of links, by descriptor.

        Return None if they are unknown.
        """
        if group.placement.is_trampoline:
            return None
        if Feature.LINK_MISSED in self._features:
            member = MISSED_MANY if group.placement in _MANY else MISSED
            offset = self._features.types.member_offset(LINK_INFO, member)
            return lambda descriptors: [missed_hits(each, offset) for each in descriptors]
        if group.sites[0][1].anchor:
            from dprobes.engines.ebpf.inkernel.waiting_kprobes import WaitingLinks

            assert isinstance(links, WaitingLinks), "what has an anchor waits for its module"
            return lambda _: links.missed()
        return None

    def settle(self, links: _WatchedLinks) -> None:
        """Record the missed hits of links that are about to be closed."""
        with self._lock:
            if links in self._links:
                self._links.discard(links)
                self._ended.update(links.missed())

    def counts(self) -> Counter[tuple[int, ...]]:
        """Return the numbers of missed hits so far, each keyed by the probepoints that share it."""
        with self._lock:
            found = Counter(self._ended)
            for links in self._links:
                found.update(links.missed())
            for program, probes in self._programs.items():
                found[probes] += program_info(program).recursion_misses
            return found

    def close(self) -> None:
        """Store the final counts; call this before the BPF programs are closed."""
        counts = self.counts()
        with self._lock:
            self._links.clear()
            self._programs.clear()
            self._ended = counts


class _WatchedLinks(Descriptors):
    """
    Descriptors of links whose missed hits are recorded before the links are closed.

    ``probes`` has the probepoints of each link. ``count`` returns the missed hits of links.
    """

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
        """Return the numbers of missed hits, keyed by the probepoints of the link."""
        return Counter(dict(zip(self._links, self._count([*self._links.values()]), strict=True)))

    def close(self) -> None:
        """Record the missed hits, and close the links."""
        self._misses.settle(self)
        super().close()
        self._owner.close()


_LISTED = 3
"""Maximum number of functions that a message names."""


class KernelGroups:
    """
    Attached groups in the kernel. ``probes`` has all probepoints of the run.

    ``planned`` is None if no probepoint is in the kernel. ``request`` has the scope, ``maps`` the descriptors of the
    run's maps.
    """

    def __init__(
        self,
        probes: Sequence[Probepoint],
        planned: PlannedKernel | None,
        request: Request,
        maps: Mapping[MapName, int],
        features: Features,
    ) -> None:
        self._probes = probes
        self._planned = planned
        self._request = request
        self._maps = maps
        self._features = features
        self._misses = KernelMisses(features)
        self._waiting: WaitingProbes | None = None
        self._kprobes = KprobeList()
        self._unseen: ArrayMap | None = None
        self._unseen_returns: Counter[int] = Counter()
        self.refused: dict[int, str] = {}
        """The reasons for which the kernel refused probepoints, by number."""

    def link(self, group: Group, places: Sequence[tuple[int, int]]) -> Descriptors:
        """
        Attach the BPF program of a group in the kernel, and return its links. Remove refused sites from the group.

        ``places`` has pairs of an address and a cookie, one for each site.
        """
        if group.is_entry:  # entries have no handler that could miss hits
            return self._wait(group, places) if group.sites[0][1].anchor else self._link(group, places)
        if group.sites[0][1].anchor:
            return self._misses.watch(self._wait(group, places), group)
        if group.placement is not Placement.KRETPROBE or Feature.LINK_MISSED in self._features:
            return self._misses.watch(self._link(group, places), group)
        from dprobes.engines.ebpf.kernel.bpf_links import EntryKprobes

        # At each hit the kernel runs the kprobes at entries last, because they were registered first. They have a
        # program only while those for returns exist; otherwise calls in between would seem to be missed.
        with contextlib.closing(EntryKprobes(places)) as entries:
            links = self._link(group, places)
            try:
                counting = self._link_counter(entries)
            except BaseException:
                links.close()
                raise
        return self._misses.watch(Descriptors([*links.detach(), *counting.detach()]), group)

    def _link(self, group: Group, places: Sequence[tuple[int, int]]) -> Descriptors:
        from dprobes.engines.ebpf.kernel.bpf_links import EXCLUDED, attach_kernel

        first, _ = group.sites[0]
        if group.placement.is_trampoline:
            return self._link_trampoline(group, first)
        if len(self._probes) == 1 and not self._probes[first].definition.has_many_places:
            try:
                return attach_kernel(group.program, places, group.placement)
            except EngineError as error:
                reason = getattr(error.__cause__, "errno", None) == errno.EINVAL and self._reason_of(group.sites[0][1])
                if not reason:
                    raise
                self.refused[first] = reason
                group.sites[:] = []
                return Descriptors()
        refused: dict[int, str] = {}
        links = attach_kernel(group.program, places, group.placement, refused)
        if refused:
            for probe, site in group.sites:
                if (reason := refused.get(site.offset)) is not None:
                    self.refused[probe] = (reason == EXCLUDED and self._reason_of(site)) or reason
            group.sites[:] = [pair for pair in group.sites if pair[1].offset not in refused]
        return links

    def _reason_of(self, site: Site) -> str | None:
        """Return a clause that explains why the kernel refuses a kprobe at a site with EINVAL, or None if unknown."""
        if self._planned is None:
            return None
        kernel = self._planned.resolved.module.kernel
        function = kernel.symbols.covering(site.offset)
        if function is None or kernel.is_traceable(function.address) is not False:
            return None
        return "the function cannot be traced (notrace, or part of the tracing code)"

    def _link_trampoline(self, group: Group, probe: int) -> Descriptors:
        from dprobes.engines.ebpf.kernel.bpf_links import attach_trampoline

        definition, where = self._probes[probe].definition, self._probes[probe].where
        links = attach_trampoline(group.program, where, is_one_of_many=isinstance(definition.location, Glob))
        if isinstance(links, str):
            self.refused[probe] = links
            group.sites[:] = []
            return Descriptors()
        return links

    def _wait(self, group: Group, places: Sequence[tuple[int, int]]) -> Descriptors:
        """
        Attach the BPF program of a group to kprobes in a kernel module that is loaded or unloaded during the run.

        The kprobes are defined in tracefs by ``SYMBOL+DISTANCE``, the anchor of each site. ``places`` are pairs of an
        address, which is ignored, and a cookie, one for each site.
        """
        if self._waiting is None:
            from dprobes.engines.ebpf.inkernel.waiting_kprobes import WaitingProbes

            assert self._planned is not None, "something in the kernel is planned"
            self._waiting = WaitingProbes(self._planned.resolved.module.name)
        anchors = [(site.anchor, cookie) for (_, site), (_, cookie) in zip(group.sites, places, strict=True)]
        return self._waiting.attach(group.program, anchors, at_return=group.placement.is_return)

    def _link_counter(self, entries: EntryKprobes) -> Descriptors:
        """
        Attach to ``entries`` a BPF program that counts calls whose return the kernel cannot track; return its links.

        There are no links if the addresses of the kernel's return trampolines are unknown.
        """
        assert self._planned is not None, "something in the kernel is planned"
        trampolines = self._planned.resolved.module.kernel.return_trampolines
        if not trampolines:
            return Descriptors()
        from dprobes.bpf.lower.hits.call_entries import missed_returns
        from dprobes.bpf.map_layouts import MapName
        from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, load

        if self._unseen is None:
            self._unseen = ArrayMap(8 * self._request.tables.probes, name="dprobes_unseen")
        maps = {**self._maps, MapName.UNSEEN_RETURNS: self._unseen.fd}
        program = load(missed_returns(self._request, trampolines), maps, ProgramType.KPROBE, name="dprobes")
        try:
            return entries.link(program)
        finally:
            os.close(program)

    def look_at_ways(self) -> None:
        """Read the kernel's list of kprobes, for ``executed``, for the last time before they are removed."""
        if self._planned is not None:
            self._kprobes.look(is_last=True)

    def executed(self, site: Site) -> str:
        """Return the way in which the kernel executes a probed instruction, for the summary, such as ``ftrace``."""
        if site.placement not in (Placement.KPROBE, Placement.KRETPROBE):
            return site.executed
        self._kprobes.look()
        way = self._kprobes.way(site.offset)
        return site.executed if way is None else f"{site.executed} ({way})"

    def missed(self) -> Counter[int]:
        """Return the number of missed hits of each probepoint whose misses are counted separately."""
        counts = self._misses.counts()
        missed = Counter({probes[0]: count for probes, count in counts.items() if count and len(probes) == 1})
        missed.update(self._unseen_returns if self._unseen is None else self._read_unseen(self._unseen))
        return missed

    def _read_unseen(self, unseen: ArrayMap) -> Counter[int]:
        """
        Return the number of calls whose return ran no handler, keyed by probepoint.

        The map ``unseen`` has two entries for each probepoint.
        """
        bank = self._request.tables.probes // 2
        found: Counter[int] = Counter()
        for entry, count in enumerate(unseen.words):
            if count:
                found[entry % bank] += count
        return found

    def note_of_misses(self) -> Notice | None:
        """
        Return the notice that this kernel does not count hits during handlers.

        None if it does, or none can occur.
        """
        if not self._misses.has_watched or Feature.LINK_MISSED in self._features:
            return None
        return Notice(
            "this kernel does not count the hits that come while a handler runs on the same CPU: they are seen nowhere",
            is_warning=False,
        )

    def close(self) -> None:
        """Store the final counts, and release all resources; call this before the BPF programs are closed."""
        self._misses.close()
        if self._unseen is not None:
            unseen, self._unseen = self._unseen, None
            self._unseen_returns = self._read_unseen(unseen)
            unseen.close()
        if self._waiting is not None:
            self._waiting.close()

    def notices(self) -> Iterator[Notice]:
        """Iterate over the notices about missed hits whose number is known only for several probepoints together."""
        for probes, count in self._misses.counts().items():
            if count and len(probes) > 1:
                names = _listed([self._probes[number].where for number in probes])
                hits = "1 hit" if count == 1 else f"{count} hits"
                yield Notice(
                    f"{hits} of {names} ran no handler: no more returns could be awaited at that moment, or a handler "
                    "ran on that processor"
                )

    @property
    def left_out(self) -> Iterator[LeftOutProbe]:
        """Iterate over the refused probepoints of patterns, as left-out ones."""
        for number, reason in self.refused.items():
            probe = self._probes[number]
            yield LeftOutProbe(probe.number, probe.path, probe.where, reason)

    def states_of(self, numbers: Sequence[int]) -> Iterator[StateEvent]:
        """Iterate over the states of those probepoints in ``numbers`` that were refused, one for each reason."""
        by_reason: dict[str, list[int]] = {}
        for number in numbers:
            if (reason := self.refused.get(number)) is not None:
                by_reason.setdefault(reason, []).append(number)
        for reason, refused in by_reason.items():
            names = [self._probes[number].where for number in refused]
            yield StateEvent(tuple(refused), 0, ProbeState.EXCLUDED, f"{_listed(names)}: {reason}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
