"""
Placement of breakpoints and watchpoints by an address space's mappings and the client's sites in files.

The tracer requests the sites once for each file and program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.breakpoint_sites import Sites
from dprobes.engines.ptrace.tracer.address_spaces import PageReader
from dprobes.engines.ptrace.tracer.breakpoint_placement import (
    BreakpointPlacer,
    await_postponed,
    awaits_list,
    places_in,
    tell_placed,
    why_not,
    write_unwritten,
)
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, Watchpoint
from dprobes.engines.ptrace.tracer.tracer_programs import EVERYWHERE, FileSites
from dprobes.engines.ptrace.tracer_messages import Lowered, Mapped, ProbeStatus, Removed
from dprobes.errors import TargetError
from dprobes.platform.linux.procfs import catches_signal
from dprobes.platform.x86.debug_registers import Watch
from dprobes.target.process_maps import CODE_MAX, Mapping, code_mappings, run_time_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dprobes.engines.ptrace.breakpoint_sites import FileKey, Site
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.thread_watchpoints import Watchpoints
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["ModuleBreakpoints"]

_ALIKE = 16
"""Number of bytes from a breakpoint on that must be equal for a place to be a copy of it."""


class ModuleBreakpoints:
    """Breakpoints and watchpoints that are placed and removed as processes map and unmap files."""

    def __init__(self, state: TracerState, watchpoints: Watchpoints) -> None:
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._watchpoints = watchpoints
        self._files = FileSites(state.connection, state.programs)
        self._placer = BreakpointPlacer(state.connection)
        self._awaits_jumps = False

    def learn(self, pid: int) -> None:
        """Request the sites in the files that a process maps, while it runs: then it is not stopped for the replies."""
        with contextlib.suppress(TargetError):
            for key in _by_file(code_mappings(pid)[0]):
                self._files.of_file(key, pid, self._programs)

    def answered(self, sites: Sites) -> None:
        """Place the sites of a late reply, for which the tracer did not wait because the client was stopped."""
        key = self._files.answered(sites)
        if key is None:
            return
        for thread in list(self._threads.values()):
            if thread.space.files.pop(key, None) is not None:
                self.update(thread.space, thread)

    # Insertion and replacement of programs

    def complete(self, program: InsertedProgram, known: dict[FileKey, Sites], spaces: Iterable[AddressSpace]) -> bool:
        """
        Record the ``known`` sites of a program, and request those in all other files that are mapped now.

        Return False if the client does not reply.
        """
        for key, sites in known.items():
            self._files.enter(program, sites, key)
        for space in spaces:
            if EVERYWHERE not in space.files:
                continue  # its process has not executed its program yet, or shares it with a vfork child
            trouble = f"the program cannot be inserted into programs of {space.word_size} bytes"
            self._files.everywhere(program, space.word_size, trouble)
            for key in space.files.keys() - program.known.keys() - {EVERYWHERE}:
                if not self._files.complete(program, key, min(space.pids)):
                    return False
        return True

    def obstacle_to(self, program: InsertedProgram, spaces: Iterable[AddressSpace]) -> ProbeStatus | None:
        """Return the status of a program's first breakpoint that cannot be placed, or None if all can be placed."""
        for space in spaces:
            reader = PageReader(space.memory)
            for site, address, path in self.places(space, program):
                probe = program.probe(site.probe)
                if probe is None or address in space.breakpoints:
                    continue
                with contextlib.suppress(OSError):  # a page may be unreadable, as in ``_verify``
                    found = reader.read(address, len(site.original))
                    if found != site.original:
                        pid = min(space.pids)
                        why = why_not(found)
                        return ProbeStatus(program.number, (probe.number,), pid, why, path, site.offset, found)
        return None

    def exchange(self, former: InsertedProgram, program: InsertedProgram) -> None:
        """Replace a program in the list of programs by another. The caller changes breakpoints and watchpoints."""
        self._programs[self._programs.index(former)] = program
        self._files.forget(former)

    def drop(self, program: InsertedProgram) -> None:
        """Remove a program; its breakpoints and watchpoints are removed by the caller."""
        self._programs.remove(program)
        self._files.forget(program)

    def places(self, space: AddressSpace, program: InsertedProgram) -> Iterator[tuple[Site, int, str]]:
        """Iterate over the sites of a program in the files of an address space, with addresses and paths."""
        for key, ranges in space.files.items():
            for site, address in places_in(program.known.get(key, Sites()).sites, ranges):
                yield site, address, key[2]

    def watchpoints(self, space: AddressSpace, program: InsertedProgram) -> list[Watchpoint]:
        """Return the watchpoints of a program in an address space."""
        found = []
        for key, ranges in space.files.items():
            sites = program.everywhere.get(space.word_size) if key == EVERYWHERE else program.known.get(key)
            if isinstance(sites, Sites):
                found += _watchpoints(program, key, sites, _mappings(key, ranges))
        return found

    def place_missing(self, space: AddressSpace, thread: Thread, program: InsertedProgram) -> None:
        """
        Place a program's breakpoints in files that are known to be mapped, where they are missing.

        As in ``begin``, breakpoints that jumps will replace are not written.
        """
        with self._awaiting_jumps():
            self._place_missing(space, thread, program)

    def _place_missing(self, space: AddressSpace, thread: Thread, program: InsertedProgram) -> None:
        for key, ranges in space.files.items():
            sites = program.known.get(key)
            if sites is not None:
                self._place(space, thread, program, key, sites, _mappings(key, ranges), inherited=False)

    def watch_missing(self, space: AddressSpace, thread: Thread, program: InsertedProgram) -> None:
        """Place a program's watchpoints for files that are known to be mapped."""
        for key, ranges in list(space.files.items()):
            if key == EVERYWHERE:
                self._watch_everywhere(space, thread, program)
            elif (sites := program.known.get(key)) is not None and sites.watches:
                self._watch(space, thread, program, key, sites, _mappings(key, ranges))

    # Changes of mappings

    def update(self, space: AddressSpace, thread: Thread) -> None:
        """Place and remove breakpoints of ``space`` according to its mappings; ``thread`` is a stopped thread in it."""
        self._update(space, thread, inherited=False)

    def begin(self, space: AddressSpace, thread: Thread) -> None:
        """
        Place breakpoints in mapped files as ``update`` does, but write none that a jump will replace.

        Use it for a process that runs already, and can continue without probes for a while. Until the jumps are written
        no thread meets a breakpoint, which would kill it if the tracer were killed. Use it also for code that no thread
        executes before (``JumpWaits``).
        """
        with self._awaiting_jumps():
            self._update(space, thread, inherited=False)
        self.write_unlisted(space)

    def write_unlisted(self, space: AddressSpace) -> None:
        """Write the withheld breakpoints if no jump will be written, so that no memory with a manifest is mapped."""
        if space.is_open and all(awaits_list(space.breakpoints[address]) for address in space.unwritten):
            write_unwritten(space)

    def write_late(self, space: AddressSpace, thread: Thread, but: Collection[int] = ()) -> None:
        """
        Write the withheld breakpoints that no jump has replaced, except those at the addresses in ``but``.

        If the breakpoint in the loader is among them, mappings that the loader made meanwhile are processed.
        """
        if not space.is_open:
            return
        is_late = any(awaits_list(space.breakpoints[address]) for address in space.unwritten.difference(but))
        write_unwritten(space, but)
        if is_late:
            self.begin(space, thread)

    def begin_loaded(self, space: AddressSpace, thread: Thread) -> None:
        """
        Update as ``begin`` does when the loader reports a new mapping.

        If jumps had to wait for that, they are requested again, as long as no other thread runs in the space.
        """
        before = space.files.keys() - {EVERYWHERE}
        self.begin(space, thread)
        is_new = before != space.files.keys() - {EVERYWHERE}
        if space.postponed and is_new and not space.shared_with and len(self._threads.in_space(space)) == 1:
            tell_placed(self._connection, thread.pid, await_postponed(space))

    @contextlib.contextmanager
    def _awaiting_jumps(self) -> Iterator[None]:
        self._awaits_jumps = True
        try:
            yield
        finally:
            self._awaits_jumps = False

    def native_probes(self, space: AddressSpace, program: InsertedProgram) -> frozenset[int]:
        """Return the probepoints of a program for which jumps are requested, in the files of an address space."""
        known = (program.known.get(key) for key in space.files)
        return frozenset(probe for sites in known if sites is not None for probe in sites.native)

    def inherit(self, space: AddressSpace, thread: Thread) -> None:
        """Replace the unrecorded breakpoints in a process whose memory is a copy of a traced one's."""
        self._update(space, thread, inherited=True)

    def heal(self, thread: Thread, address: int) -> bool:
        """
        Remove a breakpoint of this tracer that a thread has run into, at an address where none is recorded.

        Code that was moved (mremap(2)) is still a mapping of its file, in which the probepoints are placed again. In a
        copy, the original byte is restored. Nothing is done in a program that catches SIGTRAP, because it may have
        written its own breakpoints into code that looks the same. Return True if there was a breakpoint; the caller
        must then move the thread back to the instruction.
        """
        space = thread.space
        if catches_signal(thread.tid, signal.SIGTRAP):
            return False
        self.inherit(space, thread)
        if address in space.breakpoints or address in space.former:
            return True
        with contextlib.suppress(OSError):
            here = os.pread(space.memory, _ALIKE, address)
            original = _original(space, here)
            if original is not None and here[:1] == INT3:
                os.pwrite(space.memory, bytes([original.original]), address)
                return True
        return False

    def _update(self, space: AddressSpace, thread: Thread, *, inherited: bool) -> None:
        if not space.is_open or space.shared_with:
            return
        try:
            mappings, is_all = code_mappings(thread.tid)
        except TargetError:
            return  # it has ended; waitpid reports that
        space.unwinding = None
        if not is_all:
            text = f"process {thread.pid} maps code of files more than {CODE_MAX} times"
            self._connection.warn_once(f"{text}: later mappings are not probed", None)
        found = _by_file(mappings)
        if self._programs.want_images:
            self._tell_mappings(space, thread.pid, found)
        self._forget_unmapped(space, thread, found)
        space.renew()
        self._placer.raise_semaphores(space, thread)
        programs = [program for program in self._programs if program.reach.covers(space.pids)]
        if EVERYWHERE not in space.files:
            space.files[EVERYWHERE] = ()
            for program in programs:
                self._watch_everywhere(space, thread, program)
        for key, maps in found.items():
            ranges = tuple((m.start, m.end, m.offset) for m in maps)
            if space.files.get(key) != ranges:
                space.files[key] = ranges
                for program, sites in self._files.of_file(key, thread.tid, programs):
                    self._place(space, thread, program, key, sites, maps, inherited=inherited)
                    if sites.watches:
                        self._watch(space, thread, program, key, sites, maps)

    def _tell_mappings(self, space: AddressSpace, pid: int, found: dict[FileKey, list[Mapping]]) -> None:
        """Report mappings to the client: all of a new address space, otherwise the new ones."""
        mappings = tuple(mapping for maps in found.values() for mapping in maps)
        if mappings == space.told_mappings:
            return
        since = 0 if space.told_mappings else time.monotonic_ns()
        told = frozenset(space.told_mappings)
        space.told_mappings = mappings
        self._connection.send(Mapped(pid, since, tuple(mapping for mapping in mappings if mapping not in told)))

    def _forget_unmapped(self, space: AddressSpace, thread: Thread, found: dict[FileKey, list[Mapping]]) -> None:
        """Forget the breakpoints in memory that was unmapped or replaced: there is nothing to restore."""
        addresses: list[int] = []
        for key, old in list(space.files.items()):
            maps = found.get(key, [])
            now = tuple((m.start, m.end, m.offset) for m in maps)
            if old == now:
                continue
            placed, shown = sorted((*space.breakpoints, *space.former)), _Shown(maps)
            for start, end, offset in set(old).difference(now):
                if not shown.at(start, offset):
                    space.slots.forget(start, end)
                mine = placed[bisect_left(placed, start) : bisect_left(placed, end)]
                addresses += [a for a in mine if not shown.at(a, a - start + offset)]
            if not maps:
                del space.files[key]
                for program in self._programs:
                    self._watchpoints.update(space, thread.pid, program, key, [])
        for address in addresses:
            if (breakpoint_ := space.breakpoints.get(address)) is not None:
                space.forget(breakpoint_)
            space.former.pop(address, None)
        space.forget_semaphores()
        if lowered := space.take_lowered():
            self._connection.send(Lowered(thread.pid, lowered))
        if addresses:
            self._connection.send(Removed(thread.pid, tuple(addresses)))

    def _place(
        self,
        space: AddressSpace,
        thread: Thread,
        program: InsertedProgram,
        key: FileKey,
        sites: Sites,
        mappings: list[Mapping],
        *,
        inherited: bool,
    ) -> None:
        if sites.symbols:
            space.symbols[program.number, key[:2]] = _symbols(sites, mappings)
        if sites.sites:
            self._placer.native = sites.native if self._awaits_jumps else None
            self._placer.place(space, thread, program, sites.sites, mappings, inherited=inherited)
            _note_padding(space, sites.padding, mappings)

    def _watch_everywhere(self, space: AddressSpace, thread: Thread, program: InsertedProgram) -> None:
        trouble = f"the program cannot be inserted into process {thread.pid}"
        sites = self._files.everywhere(program, space.word_size, trouble)
        if sites is not None:
            self._watch(space, thread, program, EVERYWHERE, sites, [])

    def _watch(
        self,
        space: AddressSpace,
        thread: Thread,
        program: InsertedProgram,
        key: FileKey,
        sites: Sites,
        mappings: list[Mapping],
    ) -> None:
        self._watchpoints.update(space, thread.pid, program, key, _watchpoints(program, key, sites, mappings))


def _watchpoints(program: InsertedProgram, key: FileKey, sites: Sites, mappings: list[Mapping]) -> list[Watchpoint]:
    """Return the watchpoints of a program for a file with these mappings."""
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
    """Return the mappings of a file as they were at the last update."""
    device, inode, path = key
    return [Mapping(start, end, "r-xp", offset, device, inode, path, deleted=False) for start, end, offset in ranges]


class _Shown:
    """Content of a file's mappings, which may be longer, shorter, or split differently than before."""

    def __init__(self, maps: list[Mapping]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for each in maps:
            self._ranges.setdefault(each.start - each.offset, []).append((each.start, each.end))

    def at(self, address: int, offset: int) -> bool:
        """Return whether byte ``offset`` of the file is mapped at an address."""
        ranges = self._ranges.get(address - offset, [])
        number = bisect_right(ranges, address, key=itemgetter(0)) - 1
        return number >= 0 and address < ranges[number][1]


def _by_file(mappings: list[Mapping]) -> dict[FileKey, list[Mapping]]:
    """Return the mappings grouped by file."""
    found: dict[FileKey, list[Mapping]] = {}
    for mapping in mappings:
        found.setdefault((mapping.device, mapping.inode, mapping.path), []).append(mapping)
    return found


def _note_padding(space: AddressSpace, padding: tuple[tuple[int, int], ...], mappings: list[Mapping]) -> None:
    """Record the addresses of the unused ends of a file's code pages."""
    for offset, size in padding:
        start = run_time_address(mappings, offset - 1)
        if start is not None and size:
            area = (start + 1, start + 1 + size)
            if area not in space.slots.padding:
                space.slots.padding.append(area)


def _bias(segment: tuple[int, int], mappings: list[Mapping]) -> int:
    """Return the difference between run-time and link addresses, from a file's executable segment and mappings."""
    offset, link_address = segment
    # The segment may be mapped in several pieces; prefer the one that contains its beginning.
    best = next((m for m in mappings if m.offset <= offset < m.offset + m.end - m.start), mappings[0])
    return best.start - best.offset + offset - link_address


def _original(space: AddressSpace, copy: bytes) -> Breakpoint | None:
    """
    Return the breakpoint whose instruction and breakpoint byte ``copy`` reproduces, or None if there is none.

    Programs copy code, and breakpoints with it.
    """
    if len(copy) < _ALIKE:
        return None
    for breakpoint_ in space.breakpoints.values():
        with contextlib.suppress(OSError):
            if os.pread(space.memory, _ALIKE, breakpoint_.address) == copy:
                return breakpoint_
    return None
