"""Breakpoints and watchpoints of address spaces, as data: where they are, and what each is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.breakpoint_sites import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.ptrace.breakpoint_sites import FileKey, Site
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.vm import Point

__all__ = ["ENTRIES_MAX", "INT3", "SEMAPHORE_SIZE", "Breakpoint", "Entries", "Entry", "Watchpoint"]

# The entries of functions: when the calls that have not returned were made, and with what registers.
#
# A call is known by its process, its probepoint, and its frame: the address of its return address. No two calls of a
# function that go on have the same one, on whatever stack and whichever thread, but for those that a tail call leads
# to: the entry of a function that is left by a jump is taken away, and kept with the return that is awaited. A function
# that was left without a return (``longjmp``, an exception) leaves its entry behind, until the same frame is entered
# again or there are too many.


ENTRIES_MAX = 1 << 14
"""How many entries are kept at a time; of more the oldest ones are forgotten. The eBPF engine keeps as many."""


class Entry(NamedTuple):
    """Hold the beginning of a call: the time, and registers by their index."""

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
        self.handlers = tuple(each for each in self.handlers if each[0] is not probe)
        self.exits = tuple(each for each in self.exits if each[0] is not probe)
        self.entries = tuple(each for each in self.entries if each[0] is not probe)
        self.waiting.discard(probe)
        self.semaphores.pop(probe, None)

    def drop_program(self, program: InsertedProgram) -> None:
        """Use the breakpoint no longer for anything of a program."""
        self.handlers = tuple(each for each in self.handlers if each[0].program is not program)
        self.exits = tuple(each for each in self.exits if each[0].program is not program)
        self.entries = tuple(each for each in self.entries if each[0].program is not program)
        self.waiting = {probe for probe in self.waiting if probe.program is not program}
        self.semaphores = {p: address for p, address in self.semaphores.items() if p.program is not program}
        left = {role: programs - {program.number} for role, programs in self.own.items()}
        self.own = {role: programs for role, programs in left.items() if programs}

    def copy(self) -> Breakpoint:
        """Return the same breakpoint for another address space."""
        return Breakpoint(
            self.address,
            self.original,
            self.site,
            self.handlers,
            self.exits,
            self.entries,
            set(self.waiting),
            dict(self.own),
            dict(self.semaphores),
            self.is_noted,
        )


def _rank(owner: tuple[Probe, object]) -> int:
    return owner[0].program.rank


@dataclass(slots=True, eq=False)
class Watchpoint:
    """A watchpoint in one address space, where it is because of ``file``."""

    watch: Watch
    probe: Probe
    point: Point
    file: FileKey
