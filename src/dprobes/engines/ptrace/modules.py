"""
Which breakpoints belong where: an address space's mappings against the client's knowledge of files.

The client answers once for each file; the tracer asks again only about files that it has not seen.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.base import ProbeState
from dprobes.engines.ptrace.probes import Handlers
from dprobes.engines.ptrace.processes import INT3, Breakpoint
from dprobes.engines.ptrace.wire import ModuleMapped, Placed, ProbeStatus, Removed, Sites
from dprobes.errors import TargetError
from dprobes.target.maps import Mapping, executable_mappings, read_maps

if TYPE_CHECKING:
    from dprobes.engines.ptrace.connection import Connection
    from dprobes.engines.ptrace.probes import Probe
    from dprobes.engines.ptrace.processes import AddressSpace, Thread
    from dprobes.engines.ptrace.wire import Site

__all__ = ["ModuleWatcher"]

FileKey = tuple[int, int, str]
Ranges = tuple[tuple[int, int, int], ...]


class ModuleWatcher:
    """Place and forget breakpoints as files are mapped and unmapped."""

    def __init__(self, connection: Connection, probes: list[Probe]) -> None:
        self._connection = connection
        self._probes = probes
        self._known: dict[FileKey, Sites] = {}
        self.handlers: dict[int, Handlers] = {}
        """The program's handlers for modules with words of 4 and 8 bytes."""

    def update(self, space: AddressSpace, thread: Thread) -> None:
        """Bring the breakpoints of ``space`` in line with its mappings; ``thread`` is a stopped one of its threads."""
        try:
            mappings = executable_mappings(read_maps(thread.tid))
        except TargetError:
            return  # gone: waitpid will say so
        found: dict[FileKey, list[Mapping]] = {}
        for mapping in mappings:
            found.setdefault((mapping.device, mapping.inode, mapping.path), []).append(mapping)
        ranges = {key: tuple((m.start, m.end, m.offset) for m in maps) for key, maps in found.items()}
        self._forget_unmapped(space, thread, ranges)
        for key, maps in found.items():
            if space.files.get(key) != ranges[key]:
                space.files[key] = ranges[key]
                self._place_all(space, thread, self._sites(key, maps[0], thread), maps)

    def _forget_unmapped(self, space: AddressSpace, thread: Thread, ranges: dict[FileKey, Ranges]) -> None:
        gone = [key for key, old in space.files.items() if ranges.get(key) != old]
        addresses: list[int] = []
        for key in gone:
            for start, end, _ in space.files.pop(key):
                addresses += [a for a in space.breakpoints if start <= a < end]
        for address in addresses:
            # The memory is gone, or shows something else: there is nothing to restore.
            del space.breakpoints[address]
        if addresses:
            self._connection.send(Removed(thread.pid, tuple(addresses)))

    def _sites(self, key: FileKey, mapping: Mapping, thread: Thread) -> Sites:
        sites = self._known.get(key)
        if sites is None:
            question = ModuleMapped(thread.pid, mapping.path, mapping.device, mapping.inode, mapping.deleted)
            sites = self._known[key] = self._connection.ask(question, Sites)
        if sites.code is not None:
            word_size = sites.code.image.word_size
            if word_size not in self.handlers:
                self.handlers[word_size] = Handlers(sites.code)
        return sites

    def _place_all(self, space: AddressSpace, thread: Thread, sites: Sites, mappings: list[Mapping]) -> None:
        wanted: list[Breakpoint] = []
        for site in sites.sites:
            for mapping in mappings:
                if mapping.offset <= site.offset < mapping.offset + mapping.end - mapping.start:
                    address = mapping.start + site.offset - mapping.offset
                    probe = self._probes[site.probe] if site.probe >= 0 else None
                    if probe is not None and not probe.is_active:
                        continue
                    if self._verify(space, thread, site, address, mapping.path):
                        wanted.append(Breakpoint(address, site.original[0], site, probe))
        if sites.symbols:
            offset, link_address = sites.segment
            bias = next(
                (m.start - (m.offset - offset + link_address) for m in mappings if m.end - m.start + m.offset > offset),
                0,
            )
            space.symbols.update((name, address + bias) for name, address in sites.symbols)
        if not wanted:
            return
        # The bystander hears of a breakpoint before it exists, so that it never misses one.
        self._connection.send(Placed(thread.pid, tuple((b.address, b.original) for b in wanted)))
        for breakpoint_ in wanted:
            space.place(breakpoint_)
            if breakpoint_.probe is not None:
                if breakpoint_.probe.state is not ProbeState.ACTIVE:
                    breakpoint_.probe.state = ProbeState.ACTIVE
                self._report(breakpoint_.probe.number, thread, ProbeState.ACTIVE, breakpoint_.site, "")

    def _verify(self, space: AddressSpace, thread: Thread, site: Site, address: int, path: str) -> bool:
        """Return whether memory at ``address`` holds what the file holds there."""
        found = os.pread(space.memory, len(site.original), address)
        if found == site.original:
            return True
        if address in space.breakpoints:
            return False  # already ours
        if site.probe >= 0:
            conflict = found[:1] == bytes([INT3])
            self._report(
                site.probe, thread, ProbeState.CONFLICT if conflict else ProbeState.MISMATCH, site, path, found
            )
        return False

    def _report(self, probe: int, thread: Thread, state: ProbeState, site: Site, path: str, found: bytes = b"") -> None:
        self._connection.send(ProbeStatus(probe, thread.pid, state, path, site.offset, found))
