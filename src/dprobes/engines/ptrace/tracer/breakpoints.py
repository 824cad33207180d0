"""
Breakpoints: what each is for, and what happens where a program has moved or copied code that holds one.

A thread runs into a breakpoint there that nobody knows. Code that was moved (mremap(2)) is a mapping of its file still,
in which the probepoints are placed anew. In a copy the original byte is put back, which is what would be there without
us. A program that catches SIGTRAP is left alone: it may have put breakpoints of its own into code like ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import process_field
from dprobes.engines.ptrace.sites import Role
from dprobes.engines.ptrace.tracer.processes import INT3
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.sites import Site
    from dprobes.engines.ptrace.tracer.processes import AddressSpace, Thread
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram, Probe
    from dprobes.vm import Point

__all__ = ["Breakpoint", "heal"]


@dataclass(slots=True, eq=False)
class Breakpoint:
    """
    Hold one breakpoint; ``original`` is the byte it stands in for, and ``site`` describes the instruction.

    Those of ``handlers`` are hit before the instruction, those of ``exits`` by what the instruction does, both in the
    order in which their programs were inserted; those that are ``waiting`` are hit when a thread returns here. ``own``
    says what the engine itself needs the breakpoint for, and because of which programs.
    """

    address: int
    original: int
    site: Site
    handlers: tuple[tuple[Probe, Point], ...] = ()
    exits: tuple[tuple[Probe, Site], ...] = ()
    waiting: set[Probe] = field(default_factory=set)
    own: dict[Role, frozenset[int]] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether the breakpoint is there for something."""
        return bool(self.handlers or self.exits or self.waiting or self.own)

    def probes(self) -> set[Probe]:
        """Return all probes that the breakpoint is for."""
        return {probe for probe, _ in (*self.handlers, *self.exits)} | self.waiting

    def serves(self, program: InsertedProgram, site: Site, probe: Probe | None) -> bool:
        """Return whether the breakpoint is for a site of a program already."""
        if probe is None:
            return program.number in self.own.get(site.role, ())
        if site.role is Role.PROBE:
            return any(other is probe for other, _ in self.handlers)
        return (probe, site) in self.exits

    def add(self, program: InsertedProgram, site: Site, probe: Probe | None) -> None:
        """Use the breakpoint for a site of a program as well."""
        if probe is None:
            self.own[site.role] = self.own.get(site.role, frozenset()) | {program.number}
        elif site.role is Role.PROBE:
            assert site.point is not None
            self.handlers = tuple(sorted((*self.handlers, (probe, site.point)), key=_rank))
        else:
            self.exits = tuple(sorted((*self.exits, (probe, site)), key=_rank))

    def drop(self, probe: Probe) -> None:
        """Use the breakpoint no longer for a probe."""
        self.handlers = tuple(each for each in self.handlers if each[0] is not probe)
        self.exits = tuple(each for each in self.exits if each[0] is not probe)
        self.waiting.discard(probe)

    def drop_program(self, program: InsertedProgram) -> None:
        """Use the breakpoint no longer for anything of a program."""
        self.handlers = tuple(each for each in self.handlers if each[0].program is not program)
        self.exits = tuple(each for each in self.exits if each[0].program is not program)
        self.waiting = {probe for probe in self.waiting if probe.program is not program}
        left = {role: programs - {program.number} for role, programs in self.own.items()}
        self.own = {role: programs for role, programs in left.items() if programs}

    def copy(self) -> Breakpoint:
        """Return the same breakpoint for another address space."""
        return Breakpoint(
            self.address, self.original, self.site, self.handlers, self.exits, set(self.waiting), dict(self.own)
        )


def _rank(owner: tuple[Probe, object]) -> int:
    return owner[0].program.rank


_ALIKE = 16
"""How many bytes from a breakpoint on must be the same for a place to be a copy of it."""


def heal(thread: Thread, address: int, inherit: Callable[[AddressSpace, Thread], object]) -> bool:
    """
    Take away a breakpoint of ours at which a thread has stopped, and which is at no address that we know.

    Return whether there was one; the thread is to be set back onto the instruction then.
    """
    space = thread.space
    if _catches_traps(thread.tid):
        return False
    inherit(space, thread)
    if address in space.breakpoints or address in space.former:
        return True
    with contextlib.suppress(OSError):
        here = os.pread(space.memory, _ALIKE, address)
        original = _original(space, here)
        if original is not None and here[:1] == INT3:
            os.pwrite(space.memory, bytes([original.original]), address)
            return True
    return False


def _original(space: AddressSpace, copy: bytes) -> Breakpoint | None:
    """Return the breakpoint of which there is a copy with these bytes."""
    if len(copy) < _ALIKE:
        return None
    for breakpoint_ in space.breakpoints.values():
        with contextlib.suppress(OSError):
            if os.pread(space.memory, _ALIKE, breakpoint_.address) == copy:
                return breakpoint_
    return None


def _catches_traps(tid: int) -> bool:
    caught = process_field(tid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) & 1 << signal.SIGTRAP - 1)
