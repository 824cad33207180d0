"""
What stands in address spaces for a program's probes, as data: breakpoints, watchpoints, and slots for steps.

A slot is a place outside a program's own code where a copy of a probed instruction is executed: one or two times 16
bytes. The jump at its end leads a thread back, even if the tracer dies meanwhile::

    copy of the instruction | jmp rel32 to the instruction behind the original one
    repeated string instruction | int3 | jmp rel32 ...
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
"""How many entries are kept at a time; of more the oldest ones are forgotten. The eBPF engine keeps as many."""


class Entry(NamedTuple):
    """
    The beginning of a call: the time, and registers by their index.

    A call is known by its process, its probepoint, and its frame: the address of its return address. No two calls of a
    function that go on have the same one, on whatever stack and whichever thread, but for those that a tail call leads
    to: the entry of a function that is left by a jump is taken away, and kept with the return that is awaited. A
    function that was left without a return (``longjmp``, an exception) leaves its entry behind, until the same frame is
    entered again or there are too many.
    """

    time: int
    registers: Mapping[int, int]


class Entries:
    """The entries of an address space."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Probe, int], Entry] = {}

    def enter(self, process: int, probe: Probe, frame: int, entry: Entry) -> None:
        """Keep the entry of a call."""
        key = (process, probe, frame)
        self._entries.pop(key, None)
        if len(self._entries) >= ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = entry

    def take(self, process: int, probe: Probe, frame: int) -> Entry | None:
        """Return the entry of a call, None if nobody has seen it; it is kept no longer."""
        return self._entries.pop((process, probe, frame), None)

    def take_all(self, probe: Probe) -> list[tuple[int, Entry]]:
        """Return the frames and entries of all calls of a probepoint, which are kept no longer."""
        keys = [key for key in self._entries if key[1] is probe]
        return [(key[2], self._entries.pop(key)) for key in keys]

    def drop(self, probe: Probe) -> None:
        """Forget the calls of a probepoint."""
        for key in [key for key in self._entries if key[1] is probe]:
            del self._entries[key]


INT3 = b"\xcc"
"""The breakpoint instruction."""

SEMAPHORE_SIZE = 2
"""Bytes of the semaphore of a USDT probe, an ``unsigned short``."""


@dataclass(slots=True, eq=False)
class Breakpoint:
    """
    A breakpoint; ``original`` is the byte it stands in for, and ``site`` describes the instruction.

    Those of ``handlers`` are hit before the instruction, those of ``exits`` by what the instruction does, both in the
    order in which their programs were inserted; those that are ``waiting`` are hit when a thread returns here. The
    ``entries`` are of functions whose returns want to know of them. ``own`` says what the engine itself needs the
    breakpoint for, and because of which programs.
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
    """The addresses of those that probes need to be raised."""
    is_noted: bool = True
    """Whether it is known of its probes where the instruction is executed; not so where hardly anybody comes by."""

    @property
    def is_needed(self) -> bool:
        """Whether the breakpoint is there for something."""
        return bool(self.handlers or self.exits or self.entries or self.waiting or self.own)

    def probes(self) -> set[Probe]:
        """Return all probes that the breakpoint is for."""
        return {probe for probe, _ in (*self.handlers, *self.exits, *self.entries)} | self.waiting

    def serves(self, program: InsertedProgram, site: Site, probe: Probe | None) -> bool:
        """Return whether the breakpoint is for a site of a program already."""
        if probe is None:
            return program.number in self.own.get(site.role, ())
        if site.role is Role.PROBE:
            return any(other is probe for other, _ in self.handlers)
        return (probe, site) in (self.entries if site.role is Role.ENTRY else self.exits)

    def add(self, program: InsertedProgram, site: Site, probe: Probe | None) -> None:
        """Use the breakpoint for a site of a program as well."""
        if probe is None:
            self.own[site.role] = self.own.get(site.role, frozenset()) | {program.number}
        elif site.role is Role.PROBE:
            assert site.point is not None
            self.handlers = tuple(sorted((*self.handlers, (probe, site.point)), key=_rank))
            if site.semaphore:
                self.semaphores[probe] = self.address + site.semaphore
        elif site.role is Role.ENTRY:
            self.entries = (*self.entries, (probe, site))
        else:
            self.exits = tuple(sorted((*self.exits, (probe, site)), key=_rank))

    def drop(self, probe: Probe) -> None:
        """Use the breakpoint no longer for a probe."""
        self._keep(lambda other: other is not probe)

    def drop_program(self, program: InsertedProgram) -> None:
        """Use the breakpoint no longer for anything of a program."""
        self._keep(lambda probe: probe.program is not program)
        left = {role: programs - {program.number} for role, programs in self.own.items()}
        self.own = {role: programs for role, programs in left.items() if programs}

    def _keep(self, stays: Callable[[Probe], bool]) -> None:
        """Use the breakpoint for no probes any more but some."""
        self.handlers = tuple(each for each in self.handlers if stays(each[0]))
        self.exits = tuple(each for each in self.exits if stays(each[0]))
        self.entries = tuple(each for each in self.entries if stays(each[0]))
        self.waiting = set(filter(stays, self.waiting))
        self.semaphores = {probe: address for probe, address in self.semaphores.items() if stays(probe)}

    def copy(self) -> Breakpoint:
        """Return the same breakpoint for another address space."""
        return replace(self, waiting=set(self.waiting), own=dict(self.own), semaphores=dict(self.semaphores))


def _rank(owner: tuple[Probe, object]) -> int:
    return owner[0].program.rank


@dataclass(slots=True, eq=False)
class Watchpoint:
    """A watchpoint in one address space, where it is because of ``file``."""

    watch: Watch
    probe: Probe
    point: Point
    file: FileKey


NOP = 0x90
"""What the crash restorer puts in the place of an int3 in a slot."""

GRANULE = 16
"""What the size and address of a slot are multiples of, in bytes."""


JUMP_SIZE = 5
"""The bytes of jmp rel32."""


@dataclass(frozen=True, slots=True)
class Slot:
    """
    A slot.

    ``site`` is the address of the original instruction, ``end`` that behind the copy. ``is_free`` says that threads run
    through it without a stop, because the instruction cannot fault; ``leads_on`` that they may, if somebody looks later
    whether it has. ``trap`` is the address of the int3, or 0.
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
        """The address behind the original instruction."""
        return self.site + self.end - self.address


@dataclass(slots=True)
class SlotArea:
    """Memory for slots; ``former`` is what padding held before, and None for a page of ours."""

    start: int
    end: int
    former: bytes | None = None
    used: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """Address and size of slots whose module is gone."""

    def find(self, size: int) -> int | None:
        """Return the address that ``take`` will return, or None if there is no room."""
        for address, free in self.free:
            if free == size:
                return address
        return self.start + self.used if self.end - self.start - self.used >= size else None

    def take(self, address: int, size: int) -> None:
        """Take the slot that was found."""
        if (address, size) in self.free:
            self.free.remove((address, size))
        else:
            self.used += size


@dataclass(slots=True)
class Slots:
    """The slots of one address space."""

    areas: list[SlotArea] = field(default_factory=list)
    by_address: dict[int, Slot] = field(default_factory=dict)
    by_site: dict[tuple[int, bytes], Slot | None] = field(default_factory=dict)
    """By address and bytes of the original instruction; None for one that is stepped in place."""
    padding: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the unused ends of code pages, not yet made areas of."""
    refused: set[int] = field(default_factory=set)
    """The regions of memory for which no page could be had."""

    def copy(self) -> Slots:
        """Return the slots of a forked child, whose memory holds the same."""
        return Slots(
            [replace(area, free=list(area.free)) for area in self.areas],
            dict(self.by_address),
            dict(self.by_site),
            list(self.padding),
            set(self.refused),
        )

    def forget(self, start: int, end: int) -> None:
        """Forget what was in memory that is gone: padding, and the slots in it or for its sites."""
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
        Forget what the memory of a forked child does not hold: what was made after the kernel had copied it.

        ``is_same`` says whether memory between two addresses is as in the parent, ``is_mapped`` whether there is any.
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
        """Return the slot that the instruction at an address has already."""
        return None if site.copy is None else self.by_site.get((address, site.original))

    def way_on(self, address: int, site: Site) -> int:
        """Return where a thread could execute by itself the instruction at an address, as far as that is known."""
        slot = None if site.copy is None else self.by_site.get((address, site.original))
        return address if slot is None else slot.address

    def traps(self) -> list[tuple[int, int]]:
        """Return the address of each int3 in a slot, and what may stand in its place."""
        return [(slot.trap, NOP) for slot in self.by_address.values() if slot.trap]

    def holding(self, address: int) -> Slot | None:
        """Return the slot in which an address lies."""
        start = address & -GRANULE
        return self.by_address.get(start) or self.by_address.get(start - GRANULE)
