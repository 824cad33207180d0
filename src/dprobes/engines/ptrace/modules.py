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
from dprobes.engines.ptrace.processes import INT3, Breakpoint, PageReader, Watchpoint
from dprobes.engines.ptrace.slots import Placement
from dprobes.engines.ptrace.wire import ModuleMapped, Placed, ProbeStatus, Removed, Role, Sites, Warned
from dprobes.errors import TargetError
from dprobes.target.maps import Mapping, executable_mappings, read_maps, run_time_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.connection import Connection
    from dprobes.engines.ptrace.probes import Probe
    from dprobes.engines.ptrace.processes import AddressSpace, FileKey, Thread
    from dprobes.engines.ptrace.programs import InsertedProgram
    from dprobes.engines.ptrace.watching import Watching
    from dprobes.engines.ptrace.wire import Site

__all__ = ["ModuleWatcher"]

_EVERYWHERE: FileKey = (0, 0, "")
"""Stands for all files where a program is about none."""


class ModuleWatcher:
    """Place and forget breakpoints and watchpoints as files are mapped and unmapped."""

    def __init__(self, connection: Connection, program: InsertedProgram, watching: Watching) -> None:
        self._connection = connection
        self._watching = watching
        self._questions = 0
        self._unanswered: dict[FileKey, int] = {}
        self.program = program
        """The program whose breakpoints and watchpoints they are."""

    def _warn(self, message: str, hint: str | None) -> None:
        self._connection.send(Warned(message, hint))

    def learn(self, pid: int) -> None:
        """Ask the client about the files that a running process maps, so that it need not be stopped for that."""
        with contextlib.suppress(TargetError):
            for key in _by_file(read_maps(pid)):
                self._sites(key, pid)

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
        self.program.known[key] = sites
        self.enter(self.program, sites, key)
        if self._unanswered.pop(key, None) is not None and sites.code is not None:
            message = f"hits in '{key[2]}' were missed while dprobes was stopped: it could not be asked about that file"
            self._connection.send(Warned(message))

    def enter(self, program: InsertedProgram, sites: Sites, key: FileKey) -> None:
        """Note the probepoints and handlers of a program that an answer brings."""
        for probe in program.enter(sites, key[:2], self._warn):
            self._connection.send(ProbeStatus((probe.number,), 0, ProbeState.REMOVED))

    # For a program that is to take the place of another one

    def complete(self, program: InsertedProgram, spaces: Iterable[AddressSpace]) -> bool:
        """Let a program know all files that are mapped now; return False if the client does not answer."""
        for space in spaces:
            match program.everywhere.get(space.word_size):
                case Sites() as sites:
                    self.enter(program, sites, _EVERYWHERE)
                case str(problem):
                    self._warn(
                        f"the program cannot be inserted into programs of {space.word_size} bytes\n{problem}", None
                    )
            for key in space.files.keys() - program.known.keys() - {_EVERYWHERE}:
                answer = self._connection.await_answer(self._ask(program, key, min(space.pids)))
                if answer is None:
                    return False
                program.known[key] = answer
                self.enter(program, answer, key)
        return True

    def obstacle_to(self, program: InsertedProgram, spaces: Iterable[AddressSpace]) -> ProbeStatus | None:
        """Return why one of the breakpoints of a program cannot be placed, None if all can."""
        for space in spaces:
            reader = PageReader(space.memory)
            for site, address, path in self.places(space, program):
                probe = program.probe(site.probe)
                if probe is None or address in space.breakpoints:
                    continue
                with contextlib.suppress(OSError):  # as in ``_verify``
                    found = reader.read(address, len(site.original))
                    if found != site.original:
                        return ProbeStatus((probe.number,), min(space.pids), _why(found), path, site.offset, found)
        return None

    def exchange(self, program: InsertedProgram) -> InsertedProgram:
        """Go on with another program, and return the one before; breakpoints and watchpoints are still to follow."""
        former, self.program = self.program, program
        self._unanswered.clear()
        return former

    def places(self, space: AddressSpace, program: InsertedProgram) -> Iterator[tuple[Site, int, str]]:
        """Iterate over what a program has in the files of an address space: sites, addresses, and paths."""
        for key, ranges in space.files.items():
            for site in program.known.get(key, Sites()).sites:
                for start, end, offset in ranges:
                    if start <= (address := start + site.offset - offset) < end:
                        yield site, address, key[2]

    def watchpoints(self, space: AddressSpace, program: InsertedProgram) -> list[Watchpoint]:
        """Return the watchpoints that a program has in an address space."""
        found = []
        for key, ranges in space.files.items():
            sites = program.everywhere.get(space.word_size) if key == _EVERYWHERE else program.known.get(key)
            if isinstance(sites, Sites):
                found += _watchpoints(program, key, sites, _mappings(key, ranges))
        return found

    def place_missing(self, space: AddressSpace, thread: Thread) -> None:
        """Place the program's breakpoints in files that are known to be mapped, where there are none."""
        for key, ranges in space.files.items():
            sites = self.program.known.get(key)
            if sites is not None:
                maps = _mappings(key, ranges)
                space.symbols[key[:2]] = _symbols(sites, maps)
                self._place_all(space, thread, sites, maps, inherited=False)

    # As files come and go

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
                sites = self._sites(key, thread.tid)
                if sites.symbols:
                    space.symbols[key[:2]] = _symbols(sites, maps)
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

    def _sites(self, key: FileKey, pid: int) -> Sites:
        sites = self.program.known.get(key)
        if sites is None:
            number = self._unanswered.get(key)
            if number is None:
                number = self._ask(self.program, key, pid)
            sites = self._connection.await_answer(number)
            if sites is None:
                self._unanswered[key] = number
                return Sites()
            self._settle(key, sites)
        return sites

    def _ask(self, program: InsertedProgram, key: FileKey, pid: int) -> int:
        device, inode, path = key
        self._questions += 1
        self._connection.send(ModuleMapped(self._questions, pid, path, device, inode, program.number))
        return self._questions

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
            probe = self.program.probe(site.probe)
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
        match self.program.everywhere.get(space.word_size):
            case Sites() as sites:
                self.enter(self.program, sites, _EVERYWHERE)
                self._watch(space, thread, _EVERYWHERE, sites, [])
            case str(problem):
                del self.program.everywhere[space.word_size]
                self._connection.send(Warned(f"the program cannot be inserted into process {thread.pid}\n{problem}"))

    def _watch(self, space: AddressSpace, thread: Thread, key: FileKey, sites: Sites, mappings: list[Mapping]) -> None:
        self._watching.update(space, thread.pid, key, _watchpoints(self.program, key, sites, mappings))

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
                    probe.counts.note(Placement.EMULATED)
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
            self._report(site.probe, thread, _why(found), site, path, found)
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


def _why(found: bytes) -> ProbeState:
    """Return the state of a probepoint where memory holds something else than the file."""
    return ProbeState.CONFLICT if found[:1] == INT3 else ProbeState.MISMATCH


def _watchpoints(program: InsertedProgram, key: FileKey, sites: Sites, mappings: list[Mapping]) -> list[Watchpoint]:
    """Return the watchpoints of a program because of a file with these mappings."""
    bias = _bias(sites.segment, mappings) if mappings else 0
    wanted = []
    for site in sites.watches:
        probe, watch = program.probes[site.probe], site.watch
        if not site.absolute:
            watch = Watch(watch.address + bias, watch.length, watch.access)
        if probe.is_active:
            wanted.append(Watchpoint(watch, probe, site.point, key))
    return wanted


def _symbols(sites: Sites, mappings: list[Mapping]) -> dict[str, int]:
    """Return the run-time addresses of the symbols that handlers push."""
    bias = _bias(sites.segment, mappings)
    return {name: address + bias for name, address in sites.symbols}


def _mappings(key: FileKey, ranges: tuple[tuple[int, int, int], ...]) -> list[Mapping]:
    """Return the mappings of a file as they were when they were looked at."""
    device, inode, path = key
    return [Mapping(start, end, "r-xp", offset, device, inode, path, deleted=False) for start, end, offset in ranges]


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
