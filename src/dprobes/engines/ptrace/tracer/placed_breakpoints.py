"""
Breakpoints, watchpoints and out-of-line slots in address spaces, as data.

A slot is a place outside of a program's own code where a copy of a probed instruction is executed. It has 16 or 32
bytes. The jump at its end returns the thread to the program, even if the tracer dies meanwhile::

    copy of the instruction | jmp rel32 to the instruction after the original one
    repeated string instruction | int3 | jmp rel32 ...
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.breakpoint_sites import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.engines.ptrace.breakpoint_sites import FileKey, Placement, Site
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.vm import Point

__all__ = [
    "ENTRIES_MAX",
    "GRANULE",
    "INT3",
    "JUMP_SIZE",
    "NOP",
    "SEMAPHORE_SIZE",
    "Breakpoint",
    "Entries",
    "Entry",
    "Slot",
    "SlotArea",
    "Slots",
    "Watchpoint",
]

ENTRIES_MAX = 1 << 14
"""Maximum number of entries that are kept; beyond it the oldest are forgotten. The eBPF engine keeps as many."""


class Entry(NamedTuple):
    """
    Entry of a call: its time (CLOCK_MONOTONIC in nanoseconds), and registers by their index.

    A call is identified by its process, its probepoint, and its frame, the address of its return address. No two active
    calls of a function have the same frame, on any stack and any thread, except after tail calls. So the entry of a
    function that ends in a tail call is moved to the pending return. The entry of a function that is left without a
    return (``longjmp``, an exception) remains until the same frame is entered again, or there are too many entries.
    """

    time: int
    registers: Mapping[int, int]
    counters: Mapping[int, int | None] = MappingProxyType({})
    """Performance counters by their index in ``COUNTERS``; None for those that could not be read."""


class Entries:
    """Entries of active calls in an address space, which handlers of returns read."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Probe, int], Entry] = {}

    def enter(self, process: int, probe: Probe, frame: int, entry: Entry) -> None:
        """
        Store the entry of a call of the function that ``probe`` probes. If there are too many, the oldest is dropped.

        ``frame`` is the address of the call's return address, ``process`` the process id.
        """
        key = (process, probe, frame)
        self._entries.pop(key, None)
        if len(self._entries) >= ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = entry

    def take(self, process: int, probe: Probe, frame: int) -> Entry | None:
        """Remove and return the entry of a call; None if the call's beginning was not observed."""
        return self._entries.pop((process, probe, frame), None)

    def take_all(self, probe: Probe) -> list[tuple[int, Entry]]:
        """Remove and return the frames and entries of all calls of a probepoint."""
        keys = [key for key in self._entries if key[1] is probe]
        return [(key[2], self._entries.pop(key)) for key in keys]

    def drop(self, probe: Probe) -> None:
        """Forget the entries of all calls for a probepoint."""
        for key in [key for key in self._entries if key[1] is probe]:
            del self._entries[key]


INT3 = b"\xcc"
"""The breakpoint instruction."""

SEMAPHORE_SIZE = 2
"""Size of the semaphore of a USDT probe in bytes, an ``unsigned short``."""


@dataclass(slots=True, eq=False)
class Breakpoint:
    """
    Breakpoint. ``original`` is the byte that it replaces, and ``site`` describes the instruction.

    ``handlers`` has the probes that are hit before the instruction, ``exits`` those that are hit when it leaves their
    function. Both are in the order in which their programs were inserted. The probes in ``waiting`` are hit when a
    thread returns here. ``entries`` has probes whose return handlers need data from the function's entry. ``own`` maps
    the engine's own purposes to the numbers of the programs that need them.
    """

    address: int
    original: int
    site: Site
    handlers: tuple[tuple[Probe, Point], ...] = ()
    exits: tuple[tuple[Probe, Site], ...] = ()
    entries: tuple[tuple[Probe, Site], ...] = ()
    waiting: set[Probe] = field(default_factory=set)
    own: dict[Role, frozenset[int]] = field(default_factory=dict)
    semaphores: dict[Probe, int] = field(default_factory=dict)
    """Addresses of the semaphores that probes need to be raised."""
    is_checked: bool = False
    """True if a handler runs only if the instruction accesses certain memory."""
    is_noted: bool = True
    """True if ``Placement`` was recorded for its probes; False for breakpoints that are rarely executed."""

    @property
    def is_needed(self) -> bool:
        """True if a probepoint, an awaited return, or the engine itself needs the breakpoint."""
        return bool(self.handlers or self.exits or self.entries or self.waiting or self.own)

    def probes(self) -> set[Probe]:
        """Return all probes that the breakpoint is for."""
        return {probe for probe, _ in (*self.handlers, *self.exits, *self.entries)} | self.waiting

    def serves(self, program: InsertedProgram, site: Site, probe: Probe | None) -> bool:
        """Return whether the breakpoint is registered for a site of a program; ``probe``: None for the engine's own."""
        if probe is None:
            return program.number in self.own.get(site.role, ())
        if site.role is Role.PROBE:
            return any(other is probe for other, _ in self.handlers)
        return (probe, site) in (self.entries if site.role is Role.ENTRY else self.exits)

    def add(self, program: InsertedProgram, site: Site, probe: Probe | None) -> None:
        """Use the breakpoint for a site of another program, too. ``probe`` is None for the engine's own sites."""
        if probe is None:
            self.own[site.role] = self.own.get(site.role, frozenset()) | {program.number}
        elif site.role is Role.PROBE:
            assert site.point is not None
            self.handlers = tuple(sorted((*self.handlers, (probe, site.point)), key=_rank))
            self.is_checked |= probe.limits.access is not None
            if site.semaphore:
                self.semaphores[probe] = self.address + site.semaphore
        elif site.role is Role.ENTRY:
            self.entries = (*self.entries, (probe, site))
        else:
            self.exits = tuple(sorted((*self.exits, (probe, site)), key=_rank))

    def drop(self, probe: Probe) -> None:
        """Stop using the breakpoint for a probe."""
        self._keep(lambda other: other is not probe)

    def drop_program(self, program: InsertedProgram) -> None:
        """Stop using the breakpoint for any purpose of a program."""
        self._keep(lambda probe: probe.program is not program)
        left = {role: programs - {program.number} for role, programs in self.own.items()}
        self.own = {role: programs for role, programs in left.items() if programs}

    def _keep(self, stays: Callable[[Probe], bool]) -> None:
        """Unregister all probepoints except those for which ``stays`` returns true."""
        self.handlers = tuple(each for each in self.handlers if stays(each[0]))
        self.exits = tuple(each for each in self.exits if stays(each[0]))
        self.entries = tuple(each for each in self.entries if stays(each[0]))
        self.waiting = set(filter(stays, self.waiting))
        self.semaphores = {probe: address for probe, address in self.semaphores.items() if stays(probe)}

    def copy(self) -> Breakpoint:
        """Return a copy of the breakpoint for another address space."""
        return replace(self, waiting=set(self.waiting), own=dict(self.own), semaphores=dict(self.semaphores))


def _rank(owner: tuple[Probe, object]) -> int:
    return owner[0].program.rank


@dataclass(slots=True, eq=False)
class Watchpoint:
    """A watchpoint in one address space, placed because of ``file``; ``by_page`` if it has no debug register."""

    watch: Watch
    probe: Probe
    point: Point
    file: FileKey
    by_page: bool = False


NOP = 0x90
"""Byte that the crash restorer writes in place of an int3 in a slot."""

GRANULE = 16
"""Size in bytes of which a slot's size and address are multiples."""


JUMP_SIZE = 5
"""Size of jmp rel32 in bytes."""


class Slot(NamedTuple):
    """
    An out-of-line slot.

    ``site`` is the address of the original instruction, ``end`` the address after the copy. With ``is_free`` threads
    execute the slot without a stop, because the instruction cannot fault. With ``leads_on`` they may do so if a later
    check shows whether the instruction has faulted. ``trap`` is the address of the int3, or 0.
    """

    address: int
    site: int
    end: int
    placement: Placement
    is_free: bool = False
    leads_on: bool = False
    pushes_return: bool = False
    trap: int = 0
    size: int = 2 * GRANULE

    @property
    def following(self) -> int:
        """Address after the original instruction."""
        return self.site + self.end - self.address


@dataclass(slots=True)
class SlotArea:
    """Memory for slots; ``former`` is the former content of padding, and None for a page mapped for slots."""

    start: int
    end: int
    former: bytes | None = None
    used: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """Address and size of the slots of modules that were unmapped."""

    def find(self, size: int) -> int | None:
        """Return the address of a slot of ``size`` bytes, to be passed to ``take``, or None if there is no room."""
        for address, free in self.free:
            if free == size:
                return address
        return self.start + self.used if self.end - self.start - self.used >= size else None

    def take(self, address: int, size: int) -> None:
        """Mark a slot as used, at an address that ``find`` returned."""
        if (address, size) in self.free:
            self.free.remove((address, size))
        else:
            self.used += size


@dataclass(slots=True)
class Slots:
    """Out-of-line slots of one address space, and the memory in which they are."""

    areas: list[SlotArea] = field(default_factory=list)
    by_address: dict[int, Slot] = field(default_factory=dict)
    by_site: dict[tuple[int, bytes], Slot | None] = field(default_factory=dict)
    """Slots by address and bytes of the original instruction, or None for an instruction that is stepped in place."""
    padding: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the unused ends of code pages that are not used as areas yet."""
    refused: set[int] = field(default_factory=set)
    """Regions of memory (address divided by ``_REACH``) in which no page could be mapped."""

    def copy(self) -> Slots:
        """Return the slots of a forked child, whose memory has the same content."""
        return Slots(
            [replace(area, free=list(area.free)) for area in self.areas],
            dict(self.by_address),
            dict(self.by_site),
            list(self.padding),
            set(self.refused),
        )

    def forget(self, start: int, end: int) -> None:
        """Forget padding and slots in memory that was unmapped, and slots of instructions there."""
        self.padding = [area for area in self.padding if not start < area[1] <= end]
        self.areas = [area for area in self.areas if not start < area.end <= end]
        for address, slot in self.by_address.items():
            for area in self.areas:
                if start <= slot.site < end and area.start <= address < area.end:
                    area.free.append((address, slot.size))
        self.by_address = {
            address: slot
            for address, slot in self.by_address.items()
            if not start <= address < end and not start <= slot.site < end
        }
        self.by_site = {
            key: slot
            for key, slot in self.by_site.items()
            if not start <= key[0] < end and not (slot and start <= slot.address < end)
        }

    def keep(self, is_same: Callable[[int, int], bool], is_mapped: Callable[[int], bool]) -> None:
        """
        Forget slots that the memory of a forked child does not have, because they were made after the kernel copied it.

        ``is_same`` returns whether memory between two addresses is as in the parent, ``is_mapped`` whether an address
        is mapped.
        """
        missing = {a for a, slot in self.by_address.items() if not is_same(a, slot.end + JUMP_SIZE)}
        if not missing:
            return
        self.by_address = {a: slot for a, slot in self.by_address.items() if a not in missing}
        self.by_site = {
            site: slot for site, slot in self.by_site.items() if slot is None or slot.address not in missing
        }
        self.areas = [area for area in self.areas if is_mapped(area.start)]

    def known(self, address: int, site: Site) -> Slot | None:
        """Return the existing slot of the instruction at an address, or None if there is none."""
        return None if site.copy is None else self.by_site.get((address, site.original))

    def way_on(self, address: int, site: Site) -> int:
        """
        Return the address at which a thread can execute the instruction at ``address`` without hitting its breakpoint.

        This is its slot, or ``address`` if it has none.
        """
        slot = None if site.copy is None else self.by_site.get((address, site.original))
        return address if slot is None else slot.address

    def traps(self) -> list[tuple[int, int]]:
        """Return the address of each int3 in a slot, and the byte that may replace it."""
        return [(slot.trap, NOP) for slot in self.by_address.values() if slot.trap]

    def holding(self, address: int) -> Slot | None:
        """Return the slot that contains an address, or None if there is none."""
        start = address & -GRANULE
        return self.by_address.get(start) or self.by_address.get(start - GRANULE)
