"""
Which breakpoints belong where: an address space's mappings against the client's knowledge of files.

The client answers once for each file; the tracer asks again only about files that it has not seen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.base import ProbeState
from dprobes.engines.ptrace.debugregs import Watch
from dprobes.engines.ptrace.emulate import is_emulated
from dprobes.engines.ptrace.probes import Handlers, Probe
from dprobes.engines.ptrace.processes import INT3, Breakpoint, PageReader, Watchpoint
from dprobes.engines.ptrace.slots import Placement
from dprobes.engines.ptrace.wire import ModuleMapped, Placed, ProbeStatus, Removed, Role, Sites, Warned
from dprobes.errors import TargetError
from dprobes.target.maps import Mapping, executable_mappings, read_maps, run_time_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.engines.ptrace.connection import Connection
    from dprobes.engines.ptrace.processes import AddressSpace, FileKey, Thread
    from dprobes.engines.ptrace.watching import Watching
    from dprobes.engines.ptrace.wire import ProbeLimits, Site, WatchSite

__all__ = ["ModuleWatcher"]

_EVERYWHERE: FileKey = (0, 0, "")
"""Stands for all files where a program is about none."""


class ModuleWatcher:
    """Place and forget breakpoints and watchpoints as files are mapped and unmapped."""

    def __init__(
        self,
        connection: Connection,
        definitions: Sequence[ProbeLimits],
        everywhere: dict[int, Sites | str],
        watching: Watching,
    ) -> None:
        self._connection = connection
        self._watching = watching
        self._definitions = definitions
        self._everywhere = dict(everywhere)
        self._known: dict[FileKey, Sites] = {}
        self._questions = 0
        self._unanswered: dict[FileKey, int] = {}
        self.handlers: dict[int, Handlers] = {}
        """The program's handlers for modules with words of 4 and 8 bytes."""
        self.probes: dict[int, Probe] = {}
        """The probepoints that the client has told of."""

    def _warn(self, message: str, hint: str | None) -> None:
        self._connection.send(Warned(message, hint))

    def learn(self, pid: int) -> None:
        """Ask the client about the files that a running process maps, so that it need not be stopped for that."""
        with contextlib.suppress(TargetError):
            for key, maps in _by_file(read_maps(pid)).items():
                self._sites(key, maps[0], pid)

    def answered(self, sites: Sites, threads: Iterable[Thread]) -> None:
        """Take an answer that was not waited for, because the client was stopped, and place what it says."""
        key = next((key for key, number in self._unanswered.items() if number == sites.number), None)
        if key is None:
            return
        self._settle(key, sites)
        for thread in threads:
            if thread.space.files.pop(key, None) is not None:
                self.update(thread.space, thread)

    def _settle(self, key: FileKey, sites: Sites) -> None:
        self._known[key] = sites
        self._enter(sites, key)
        if self._unanswered.pop(key, None) is not None and sites.code is not None:
            message = f"hits in '{key[2]}' were missed while dprobes was stopped: it could not be asked about that file"
            self._connection.send(Warned(message))

    def _enter(self, sites: Sites, key: FileKey) -> None:
        """Note the probepoints and handlers that an answer brings."""
        found: tuple[Site | WatchSite, ...] = (*sites.sites, *sites.watches)
        for site in found:
            if site.probe >= 0 and site.probe not in self.probes:
                limits = self._definitions[site.definition]
                self.probes[site.probe] = Probe(site.probe, site.definition, limits, key[:2])
        if sites.code is not None:
            word_size = sites.code.image.word_size
            if word_size not in self.handlers:
                self.handlers[word_size] = Handlers(sites.code, self._warn)

    def update(self, space: AddressSpace, thread: Thread) -> None:
        """Bring the breakpoints of ``space`` in line with its mappings; ``thread`` is a stopped one of its threads."""
        self._update(space, thread, inherited=False)

    def inherit(self, space: AddressSpace, thread: Thread) -> None:
        """Learn which breakpoints a process has that is a copy of one of ours."""
        self._update(space, thread, inherited=True)

    def _update(self, space: AddressSpace, thread: Thread, *, inherited: bool) -> None:
        if not space.is_open or space.lent:
            return
        try:
            found = _by_file(read_maps(thread.tid))
        except TargetError:
            return  # gone: waitpid will say so
        self._forget_unmapped(space, thread, found)
        space.renew()
        if _EVERYWHERE not in space.files:
            space.files[_EVERYWHERE] = ()
            self._watch_everywhere(space, thread)
        for key, maps in found.items():
            ranges = tuple((m.start, m.end, m.offset) for m in maps)
            if space.files.get(key) != ranges:
                space.files[key] = ranges
                sites = self._sites(key, maps[0], thread.tid)
                if sites.symbols:
                    bias = _bias(sites.segment, maps)
                    space.symbols[key[:2]] = {name: address + bias for name, address in sites.symbols}
                self._place_all(space, thread, sites, maps, inherited=inherited)
                if sites.watches:
                    self._watch(space, thread, key, sites, maps)

    def _forget_unmapped(self, space: AddressSpace, thread: Thread, found: dict[FileKey, list[Mapping]]) -> None:
        """Forget the breakpoints in memory that is gone or shows something else: there is nothing to restore."""
        addresses: list[int] = []
        for key, old in list(space.files.items()):
            maps = found.get(key, [])
            if old == tuple((m.start, m.end, m.offset) for m in maps):
                continue
            for start, end, offset in old:
                if run_time_address(maps, offset) != start:
                    space.slots.forget(start, end)
                mine = [a for a in (*space.breakpoints, *space.former) if start <= a < end]
                addresses += [a for a in mine if run_time_address(maps, a - start + offset) != a]
            if not maps:
                del space.files[key]
                self._watching.update(space, thread.pid, key, [])
        for address in addresses:
            if (breakpoint_ := space.breakpoints.get(address)) is not None:
                space.forget(breakpoint_)
            space.former.pop(address, None)
        if addresses:
            self._connection.send(Removed(thread.pid, tuple(addresses)))

    def _sites(self, key: FileKey, mapping: Mapping, pid: int) -> Sites:
        sites = self._known.get(key)
        if sites is None:
            number = self._unanswered.get(key)
            if number is None:
                self._questions += 1
                number = self._questions
                self._connection.send(ModuleMapped(number, pid, mapping.path, mapping.device, mapping.inode))
            sites = self._connection.await_answer(number)
            if sites is None:
                self._unanswered[key] = number
                return Sites()
            self._settle(key, sites)
        return sites

    def _place_all(
        self, space: AddressSpace, thread: Thread, sites: Sites, mappings: list[Mapping], *, inherited: bool
    ) -> None:
        wanted: dict[int, Breakpoint] = {}
        refused: set[Probe] = set()
        places = [
            (site, address, mapping.path)
            for site in sites.sites
            for mapping in mappings
            if mapping.start <= (address := mapping.start + site.offset - mapping.offset) < mapping.end
            and address not in space.breakpoints
        ]
        if inherited:
            self._restore_inherited(space, places)
        reader = PageReader(space.memory)
        for site, address, path in places:
            probe = self.probes[site.probe] if site.probe >= 0 else None
            if probe is not None and (not probe.is_active or probe in refused):
                continue
            if self._verify(reader, thread, site, address, path):
                if address not in wanted:
                    wanted[address] = Breakpoint(address, site.original[0], site, None)
                wanted[address].add(site, probe)
            elif probe is not None and site.role is not Role.PROBE:
                refused.add(probe)
        for breakpoint_ in wanted.values() if refused else ():
            for probe in refused:  # a function of which not every exit is known for certain has no probe
                breakpoint_.drop(probe)
        if sites.sites:
            _note_padding(space, sites.padding, mappings)
        if wanted:
            self._place(space, thread, [b for b in wanted.values() if b.is_needed], mappings[0].path)

    def _restore_inherited(self, space: AddressSpace, places: list[tuple[Site, int, str]]) -> None:
        reader = PageReader(space.memory)
        for site, address, _ in places:
            with contextlib.suppress(OSError):
                if reader.read(address, 1) == INT3:
                    space.former[address] = site.original[0]
                    space.restore_byte(address, site.original[0], reader)

    def _watch_everywhere(self, space: AddressSpace, thread: Thread) -> None:
        match self._everywhere.get(space.word_size):
            case Sites() as sites:
                self._enter(sites, _EVERYWHERE)
                self._watch(space, thread, _EVERYWHERE, sites, [])
            case str(problem):
                del self._everywhere[space.word_size]
                self._connection.send(Warned(f"the program cannot be inserted into process {thread.pid}\n{problem}"))

    def _watch(self, space: AddressSpace, thread: Thread, key: FileKey, sites: Sites, mappings: list[Mapping]) -> None:
        bias = _bias(sites.segment, mappings) if mappings else 0
        wanted = []
        for site in sites.watches:
            probe, watch = self.probes[site.probe], site.watch
            if not site.absolute:
                watch = Watch(watch.address + bias, watch.length, watch.access)
            if probe.is_active:
                wanted.append(Watchpoint(watch, probe, site.point, key))
        self._watching.update(space, thread.pid, key, wanted)

    def _place(self, space: AddressSpace, thread: Thread, wanted: list[Breakpoint], path: str) -> None:
        # The bystander hears of a breakpoint before it exists, so that it never misses one.
        self._connection.send(Placed(thread.pid, tuple((b.address, b.original) for b in wanted)))
        active: dict[int, Probe] = {}
        reported: set[int] = set()
        failed: dict[int, Probe] = {}
        for breakpoint_ in wanted:
            probes = {probe.number: probe for probe in breakpoint_.probes()}
            try:
                space.place(breakpoint_)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                for number in probes.keys() - reported:
                    self._report(number, thread, ProbeState.CONFLICT, breakpoint_.site, path, reason=why)
                reported |= probes.keys()
                failed |= {probe.number: probe for probe, _ in breakpoint_.exits}
                continue
            active |= probes
            if is_emulated(breakpoint_.site.emulation):
                for probe in probes.values():
                    probe.placements.add(Placement.EMULATED)
        for number, probe in failed.items():
            active.pop(number, None)
            space.drop(probe)
        for probe in active.values():
            probe.state = ProbeState.ACTIVE
        if active:
            self._connection.send(ProbeStatus(tuple(active), thread.pid, ProbeState.ACTIVE))

    def _verify(self, reader: PageReader, thread: Thread, site: Site, address: int, path: str) -> bool:
        """Return whether memory at ``address`` holds what the file holds there."""
        try:
            found = reader.read(address, len(site.original))
        except OSError:
            return False  # a mapping behind the end of the file, or memory that is gone
        if found == site.original:
            return True
        if site.probe >= 0:
            conflict = found[:1] == INT3
            self._report(
                site.probe, thread, ProbeState.CONFLICT if conflict else ProbeState.MISMATCH, site, path, found
            )
        return False

    def _report(
        self,
        probe: int,
        thread: Thread,
        state: ProbeState,
        site: Site,
        path: str,
        found: bytes = b"",
        reason: str = "",
    ) -> None:
        self._connection.send(ProbeStatus((probe,), thread.pid, state, path, site.offset, found, reason))


def _by_file(maps: str) -> dict[FileKey, list[Mapping]]:
    found: dict[FileKey, list[Mapping]] = {}
    for mapping in executable_mappings(maps):
        found.setdefault((mapping.device, mapping.inode, mapping.path), []).append(mapping)
    return found


def _note_padding(space: AddressSpace, padding: tuple[tuple[int, int], ...], mappings: list[Mapping]) -> None:
    """Note where in memory the unused ends of a file's code pages are."""
    for offset, size in padding:
        start = run_time_address(mappings, offset - 1)
        if start is not None and size:
            area = (start + 1, start + 1 + size)
            if area not in space.slots.padding:
                space.slots.padding.append(area)


def _bias(segment: tuple[int, int], mappings: list[Mapping]) -> int:
    """Return the difference between run-time and link addresses, from a file's executable segment and mappings."""
    offset, link_address = segment
    # The segment may be mapped in several pieces; the best is the one that shows its beginning.
    best = next((m for m in mappings if m.offset <= offset < m.offset + m.end - m.start), mappings[0])
    return best.start - best.offset + offset - link_address
