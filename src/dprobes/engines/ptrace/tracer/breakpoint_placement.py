"""
Placement of a program's breakpoints in an address space, where memory has the same bytes as the file.

If a place already has a breakpoint, of another program or of the engine, both use it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.breakpoint_sites import Placement, Role
from dprobes.engines.ptrace.tracer.address_spaces import PageReader
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, Breakpoint
from dprobes.engines.ptrace.tracer_messages import Placed, ProbeStatus, Raised
from dprobes.errors import TargetError, reason_of
from dprobes.platform.x86.instruction_emulation import is_emulated
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.process_maps import PAGE_SIZE, mapping_at
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.breakpoint_sites import Site
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.process_calls import RemoteMemory
    from dprobes.target.process_maps import Mapping

__all__ = [
    "BreakpointPlacer",
    "await_postponed",
    "awaits_jump",
    "awaits_list",
    "end_joining",
    "is_mapped_writable",
    "join_jumps",
    "note_placement",
    "note_written",
    "places_in",
    "tell_placed",
    "why_not",
    "write_memory",
    "write_unwritten",
]

_LONGEST = 15  # maximum size of an instruction in bytes


def write_memory(memory: RemoteMemory, thread: Thread, address: int, data: bytes) -> list[Breakpoint]:
    """
    Write at most 4096 bytes, and return the tracer's breakpoints whose instructions were changed.

    Raise ``AddressFault``, and write nothing, for the first byte that the probed program itself could not write.
    """
    end = address + len(data)
    if (served := thread.space.served_page(address, len(data))) is not None:
        raise AddressFault(served)
    near = _breakpoints_near(thread, address, end)
    hidden = [b for b in near if b.address >= address]
    visible = data
    if hidden:
        shown = bytearray(data)
        for breakpoint_ in hidden:
            shown[breakpoint_.address - address] = INT3[0]
        visible = bytes(shown)
    if end - 1 >> 12 == address >> 12:
        with thread.space.opened(address, len(data)):
            if not memory.write(thread.tid, address, visible):
                raise AddressFault(address)
    else:
        with thread.space.opened(address, len(data)):
            _write_pages(memory, thread, address, visible)
    for breakpoint_ in hidden:
        breakpoint_.original = data[breakpoint_.address - address]
    return [b for b in near if address < b.address + len(b.site.original)]


def _breakpoints_near(thread: Thread, address: int, end: int) -> list[Breakpoint]:
    """Return the tracer's breakpoints whose instructions may have bytes from ``address`` to ``end`` (excluded)."""
    breakpoints, first = thread.space.breakpoints, address - _LONGEST + 1
    if end - first < len(breakpoints):
        return [breakpoints[place] for place in range(first, end) if place in breakpoints]
    return [b for b in breakpoints.values() if first <= b.address < end]


def _write_pages(memory: RemoteMemory, thread: Thread, address: int, data: bytes) -> None:
    """Write across pages, checking the mappings first, so that other threads rarely see an incomplete write."""
    pages = [address, *range((address // PAGE_SIZE + 1) * PAGE_SIZE, address + len(data), PAGE_SIZE)]
    for page in pages:
        if not is_mapped_writable(thread, page):
            raise AddressFault(page)
    before = memory.read(thread.tid, address, len(data))
    for number, page in enumerate(pages):
        start, end = page - address, min(len(data), (page // PAGE_SIZE + 1) * PAGE_SIZE - address)
        if len(before) < end or not memory.write(thread.tid, page, data[start:end]):
            # For example, a file may be shorter than its mapping. Undo the completed writes.
            for done in pages[:number]:
                first, last = done - address, (done // PAGE_SIZE + 1) * PAGE_SIZE - address
                memory.write(thread.tid, done, before[first:last])
            raise AddressFault(page)


def is_mapped_writable(thread: Thread, address: int) -> bool:
    """Return whether the probed program has mapped the page of ``address`` readable and writable."""
    try:
        mapping = mapping_at(thread.tid, address)
    except TargetError:
        return False
    return mapping is not None and mapping.permissions.startswith("rw")


_PLACES_MAX = 1 << 12
_COPIES = 4
"""Maximum number of breakpoints in a file's mappings: ``_PLACES_MAX``, or ``_COPIES`` for each site if that is more."""
_offset_of = attrgetter("offset")

_Use = tuple["Site", int, "Probe | None", str]
"""A site of a program, its address, its probepoint unless it is the engine's own, and the path of its file."""


class BreakpointPlacer:
    """Placer of breakpoints in address spaces; it reports each placement or refusal to the client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.native: frozenset[int] | None = None
        """Probepoints whose breakpoints are not written at first, because jumps will replace them, or None."""

    def place(
        self,
        space: AddressSpace,
        thread: Thread,
        program: InsertedProgram,
        sites: Sequence[Site],
        mappings: list[Mapping],
        *,
        inherited: bool,
    ) -> None:
        """
        Place those breakpoints of a program that are missing in a file with these mappings.

        With ``inherited``, the memory is a copy of a traced one, and may have breakpoints that are not recorded.
        """
        path = mappings[0].path if mappings else ""
        ranges = [(each.start, each.end, each.offset) for each in mappings]
        most = _places_max(sites)
        places = [(site, address, path) for site, address in islice(places_in(sites, ranges), most + 1)]
        if len(places) > most:
            places.pop()
            text = f"process {thread.pid} has mapped the code of {path} so often that there are {most} breakpoints"
            self._connection.warn_once(f"{text}: later mappings are not probed", None)
        if inherited:
            _restore_inherited(space, places)
        self._place(space, thread, program, places)
        if any(site.semaphore for site in sites):
            self.raise_semaphores(space, thread)

    def raise_semaphores(self, space: AddressSpace, thread: Thread) -> None:
        """Increment the semaphores that breakpoints need, if they are mapped."""
        needed = {s: places for s, places in space.needed_semaphores().items() if s not in space.semaphores}
        ready = {s: places for s, places in needed.items() if is_mapped_writable(thread, s)}
        if ready:
            pairs = tuple((semaphore, place) for semaphore, places in ready.items() for place in places)
            for pid in space.pids or (thread.pid,):
                self._connection.send(Raised(pid, pairs))
        for semaphore, (first, *_) in ready.items():
            with contextlib.suppress(OSError):
                space.raise_semaphore(semaphore, first)

    def _place(
        self, space: AddressSpace, thread: Thread, program: InsertedProgram, places: list[tuple[Site, int, str]]
    ) -> None:
        uses = self._verified(space, thread, program, places)
        new: dict[int, Breakpoint] = {}
        shared: dict[int, Breakpoint] = {}
        for site, address, probe, _ in uses:
            breakpoint_ = space.breakpoints.get(address)
            if breakpoint_ is not None:
                shared[address] = breakpoint_
            elif (breakpoint_ := new.get(address)) is None:
                breakpoint_ = new[address] = Breakpoint(address, site.original[0], site)
            breakpoint_.add(program, site, probe)
        active = self._share(space, program, shared.values())
        if new:
            active |= self._write(space, thread, program, list(new.values()), uses[0][3])
        for probe in active:
            probe.state = ProbeState.ACTIVE
        if active:
            numbers = tuple(sorted(probe.number for probe in active))
            self._connection.send(ProbeStatus(program.number, numbers, thread.pid, ProbeState.ACTIVE))

    def _verified(
        self, space: AddressSpace, thread: Thread, program: InsertedProgram, places: list[tuple[Site, int, str]]
    ) -> list[_Use]:
        """
        Return the ``places`` at which the program lacks a breakpoint and one can be written, with its probepoints.

        ``places`` are (site, address, path of the file). The client receives the reasons against others. A probepoint
        that needs several breakpoints gets all or none.
        """
        reader = PageReader(space.memory)
        found: list[_Use] = []
        refused: set[Probe] = set()
        for site, address, path in places:
            probe = program.probe(site.probe)
            if probe is not None and (not probe.is_active or probe in refused):
                continue
            breakpoint_ = space.breakpoints.get(address)
            if breakpoint_ is not None and breakpoint_.serves(program, site, probe):
                continue
            if self._verify(reader, thread, program, site, address, path, breakpoint_):
                found.append((site, address, probe, path))
            elif probe is not None and site.role is not Role.PROBE:
                refused.add(probe)  # a function gets no probe if one of its exits cannot
        return [use for use in found if use[2] not in refused]

    def _verify(
        self,
        reader: PageReader,
        thread: Thread,
        program: InsertedProgram,
        site: Site,
        address: int,
        path: str,
        present: Breakpoint | None,
    ) -> bool:
        """
        Return True if memory at ``address`` has the bytes of the file ``path``, apart from the breakpoint ``present``.

        If not, report to the client why the site cannot be probed. ``present`` is the tracer's breakpoint there, or
        None.
        """
        try:
            found = reader.read(address, len(site.original))
        except OSError:
            return False  # a mapping beyond the end of the file, or memory that is unmapped
        if present is not None:
            found = bytes([present.original]) + found[1:]
        if found == site.original:
            return True
        if site.probe >= 0:
            self._report(program, site, thread, why_not(found), path, found=found)
        return False

    def _share(self, space: AddressSpace, program: InsertedProgram, shared: Iterable[Breakpoint]) -> set[Probe]:
        active: set[Probe] = set()
        for breakpoint_ in shared:
            space.register(breakpoint_)
            mine = {probe for probe in breakpoint_.probes() if probe.program is program}
            is_absent = bool(space.patches.known) and not space.patches.by_site  # but there will be jumps again
            may_join = breakpoint_.address in space.unwritten or is_absent
            if not (may_join and awaits_jump(breakpoint_, self.native, mine)):
                note_placement(space, breakpoint_, mine)
            active |= mine
        return active

    def _write(
        self, space: AddressSpace, thread: Thread, program: InsertedProgram, wanted: list[Breakpoint], path: str
    ) -> set[Probe]:
        # Report a breakpoint before it is written, so that the crash restorer never misses one.
        self._connection.send(Placed(thread.pid, tuple((b.address, b.original) for b in wanted)))
        active: set[Probe] = set()
        reported: set[Probe] = set()
        failed: set[Probe] = set()
        for breakpoint_ in wanted:
            probes = breakpoint_.probes()
            is_late = awaits_jump(breakpoint_, self.native) or (self.native is not None and awaits_list(breakpoint_))
            try:
                space.place(breakpoint_, is_written=not is_late)
            except OSError as error:
                why = reason_of(error)
                for probe in probes - reported:
                    self._report(program, breakpoint_.site, thread, ProbeState.CONFLICT, path, probe=probe, reason=why)
                reported |= probes
                failed |= {probe for probe, _ in (*breakpoint_.exits, *breakpoint_.entries)}
                continue
            active |= probes
            if breakpoint_.address not in space.unwritten:
                note_placement(space, breakpoint_, probes)
        for probe in failed:
            space.drop(probe)
        return active - failed

    def _report(
        self,
        program: InsertedProgram,
        site: Site,
        thread: Thread,
        state: ProbeState,
        path: str,
        *,
        probe: Probe | None = None,
        found: bytes = b"",
        reason: str = "",
    ) -> None:
        number = site.probe if probe is None else probe.number
        self._connection.send(
            ProbeStatus(program.number, (number,), thread.pid, state, path, site.offset, found, reason)
        )


def places_in(sites: Sequence[Site], ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[Site, int]]:
    """
    Iterate over the sites in mappings of their file, (start, end, offset) each, with their addresses.

    A process can map code any number of times: callers that place something limit the number as ``BreakpointPlacer``
    does.
    """
    in_order = sorted(sites, key=_offset_of)
    for start, end, offset in ranges:
        first = bisect_left(in_order, offset, key=_offset_of)
        for site in in_order[first : bisect_left(in_order, offset + end - start, lo=first, key=_offset_of)]:
            yield site, start + site.offset - offset


def _places_max(sites: Sequence[Site]) -> int:
    return max(_PLACES_MAX, _COPIES * len(sites))


def awaits_jump(breakpoint_: Breakpoint, native: Collection[int] | None, mine: Iterable[Probe] | None = None) -> bool:
    """
    Return whether a breakpoint is only for ``native`` probepoints of a program, for which jumps are requested.

    With ``mine``, the probes of the program, it may also have probes of other programs.
    """
    if not native or not _may_be_jump(breakpoint_):
        return False
    return all(probe.number in native for probe in (breakpoint_.probes() if mine is None else mine))


def awaits_list(breakpoint_: Breakpoint) -> bool:
    """
    Return whether a breakpoint is only for the dynamic linker's reports: the process's manifest can list it first.

    The manifest is created with the memory for handlers. By it ``remove_left`` removes the breakpoint after all
    processes of dprobes were killed.
    """
    return not breakpoint_.probes() and breakpoint_.own.keys() == {Role.LINKER}


def _may_be_jump(breakpoint_: Breakpoint) -> bool:
    return not (breakpoint_.own or breakpoint_.waiting or breakpoint_.semaphores)


def _is_postponed(breakpoint_: Breakpoint, postponed: Collection[tuple[int, int]]) -> bool:
    """Return whether a breakpoint is only for ``postponed`` probepoints, (program, probepoint) each."""
    if not postponed or not _may_be_jump(breakpoint_):
        return False
    return all((probe.program.number, probe.number) in postponed for probe in breakpoint_.probes())


def await_postponed(space: AddressSpace) -> set[Probe]:
    """
    Remove the breakpoints whose jumps had to wait for the new mappings, and return their probepoints.

    No thread may run in the space until the jumps are written or refused.
    """
    postponed, space.postponed = space.postponed, set()
    found: set[Probe] = set()
    for breakpoint_ in space.breakpoints.values():
        if _is_postponed(breakpoint_, postponed) and breakpoint_.address not in space.patches.by_site:
            space.restore_byte(breakpoint_.address, breakpoint_.original)
            space.unwritten.add(breakpoint_.address)
            found |= breakpoint_.probes()
    return found


def tell_placed(connection: Connection, pid: int, probes: Iterable[Probe]) -> None:
    """Report to the client that ``probes`` are active in a process; the client may then request jumps."""
    numbers: dict[int, list[int]] = {}
    for probe in probes:
        numbers.setdefault(probe.program.number, []).append(probe.number)
    for program, mine in sorted(numbers.items()):
        connection.send(ProbeStatus(program, tuple(sorted(mine)), pid, ProbeState.ACTIVE))


def join_jumps(space: AddressSpace, program: InsertedProgram, native: frozenset[int]) -> None:
    """
    Keep the jumps of other programs at the breakpoints of a new program until jumps for all of them are written.

    ``native`` are the numbers of its probepoints for which the client requests jumps.
    """
    for breakpoint_ in space.breakpoints.values():
        probes = breakpoint_.probes()
        mine = {probe for probe in probes if probe.program is program}
        if mine and len(mine) < len(probes) and awaits_jump(breakpoint_, native, mine):
            joining = {(program.number, probe.number) for probe in mine}
            space.joining[breakpoint_.address] = space.joining.get(breakpoint_.address, frozenset()) | joining


def note_written(space: AddressSpace, program: InsertedProgram) -> None:
    """Record placements for a program's probepoints that have breakpoints in memory instead of jumps."""
    for breakpoint_ in space.breakpoints.values():
        if breakpoint_.address not in space.patches.by_site and breakpoint_.address not in space.unwritten:
            note_placement(space, breakpoint_, [each for each in breakpoint_.probes() if each.program is program])


def end_joining(space: AddressSpace, sites: Iterable[int]) -> None:
    """End the wait at ``sites`` for jumps that include a new program's probepoints, which use the breakpoints now."""
    for site in sites:
        joining = space.joining.pop(site, frozenset())
        breakpoint_ = space.breakpoints[site]
        late = {probe for probe in breakpoint_.probes() if (probe.program.number, probe.number) in joining}
        note_placement(space, breakpoint_, late)


def write_unwritten(space: AddressSpace, but: Collection[int] = ()) -> None:
    """Write the withheld breakpoints of a space that no jump has replaced, except at the addresses in ``but``."""
    for breakpoint_ in space.write_unwritten(but):
        if _is_postponed(breakpoint_, space.postponed):
            breakpoint_.is_noted = False  # jumps will replace it before a thread arrives there
        else:
            note_placement(space, breakpoint_, breakpoint_.probes())


def why_not(found: bytes) -> ProbeState:
    """Return CONFLICT if the bytes in memory begin with another tool's breakpoint, otherwise MISMATCH."""
    return ProbeState.CONFLICT if found[:1] == INT3 else ProbeState.MISMATCH


def note_placement(space: AddressSpace, breakpoint_: Breakpoint, probes: Iterable[Probe]) -> None:
    """Record for ``probes`` where the instruction of a breakpoint is executed, if that is known."""
    slot = space.slots.by_site.get((breakpoint_.address, breakpoint_.site.original))
    placement = slot.placement if slot is not None else None
    if is_emulated(breakpoint_.site.emulation):
        placement = Placement.EMULATED
    if placement is not None:
        for probe in probes:
            probe.counts.note(placement)


def _restore_inherited(space: AddressSpace, places: list[tuple[Site, int, str]]) -> None:
    reader = PageReader(space.memory)
    for site, address, _ in places:
        with contextlib.suppress(OSError):
            if address not in space.breakpoints and reader.read(address, 1) == INT3:
                space.former[address] = site.original[0]
                if site.semaphore:
                    space.semaphores[address + site.semaphore] = address  # it was copied as well
                space.restore_byte(address, site.original[0], reader)
