"""Places of a program's probepoints in the target, which change when its module is mapped or unmapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.gdb.stub_requests import BreakpointKind
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeKind, ProbeState
from dprobes.rpn.program_needs import entry_registers, needs_target
from dprobes.rpn.rpn_program import Access, Point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch.processor import Register
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.resolve.probepoints import Probepoint, WatchedMemory
    from dprobes.rpn.rpn_program import Program

__all__ = ["PlacedProbes", "WatchedPlaces"]

# A stub without watchpoints, or without free ones, reports that when the first one is requested. A watchpoint for
# execution (``x``) is a breakpoint. Some stubs report every access as a write: then watchpoints for reads and writes
# are hit as well as those for writes.


AT_LEAST = "at least: of several processors at once one"
"""
Remark on the counts of a watchpoint in a machine with several processors.

If two processors reach watchpoints before the machine stops, QEMU reports the stop of only one. With 7.2, 30 to 45 % of
the accesses of threads on both processors were lost.
"""

_KINDS = {Access.WRITE: BreakpointKind.WRITE, Access.READ_WRITE: BreakpointKind.ACCESS}
_NAMES = {Access.WRITE: "writes", Access.READ_WRITE: "reads and writes"}


class _Place(NamedTuple):
    address: int
    length: int
    kind: BreakpointKind


class WatchedPlaces:
    """Watchpoints on memory of a ``target``, each with the probepoints that own it."""

    def __init__(self, target: StubTarget) -> None:
        self._target = target
        self._owners: dict[_Place, list[tuple[StubProbe, Point]]] = {}

    def __bool__(self) -> bool:
        """Return whether any memory is watched."""
        return bool(self._owners)

    def place(self, probe: StubProbe, point: Point, memory: WatchedMemory, bias: int) -> ProbeState:
        """
        Insert a watchpoint on ``memory`` for a probepoint of data, and return the probepoint's new state.

        ``bias`` is the load bias of the module, to be added unless the address is absolute. Raise ``EngineError`` if
        the stub has no watchpoints of this kind.
        """
        address = memory.address + (0 if memory.absolute else bias)
        place = _Place(address, memory.length, _KINDS[memory.access])
        if place not in self._owners:
            inserted = self._target.watch(place.kind, address, memory.length)
            if inserted is None:
                raise EngineError(
                    f"the stub {self._target.stub.name} has no watchpoints for {_NAMES[memory.access]}",
                    hint="QEMU's emulation of a process has none; gdbserver and emulated machines have",
                )
            if not inserted:
                return ProbeState.DEBUGREG_UNAVAIL
        self._owners.setdefault(place, []).append((probe, point))
        if self._target.processors > 1:
            probe.counts.note(AT_LEAST)
        return ProbeState.ACTIVE

    def concerned(self, address: int, reason: str) -> list[tuple[StubProbe, Point]]:
        """Return the owners of watchpoints for an access reported as ``watch``, ``rwatch`` or ``awatch``."""
        return [
            owner
            for place, owners in self._owners.items()
            if place.address <= address < place.address + place.length
            and (reason == "watch" or place.kind is BreakpointKind.ACCESS)
            for owner in owners
        ]

    def drop(self, probe: StubProbe) -> None:
        """Forget a probepoint, and remove the watchpoints that no other one needs."""
        for place, owners in list(self._owners.items()):
            self._owners[place] = [owner for owner in owners if owner[0] is not probe]
            if not self._owners[place]:
                del self._owners[place]
                self._target.unwatch(*place)

    def forget(self) -> None:
        """Remove all watchpoints: their memory may be gone."""
        for place in self._owners:
            self._target.unwatch(*place)
        self._owners.clear()


class ProbedEntry(NamedTuple):
    """The entry of a function whose return is probed, with the registers that are kept for the handler."""

    probe: StubProbe
    kept: Sequence[Register]


class PlacedProbes:
    """Probepoints of a program in the target, by their addresses."""

    def __init__(self, target: StubTarget, program: Program, placed: StubProgram, resolved: Resolved) -> None:
        self._target = target
        self._program = program
        self._placed = placed
        self._resolved = resolved
        self.bias: int | None = None
        """Load bias of the module in bytes, or None while it is not mapped."""
        self.at: dict[int, list[tuple[StubProbe, Point]]] = {}
        """Probepoints at instructions."""
        self.entries: dict[int, list[ProbedEntry]] = {}
        """Probepoints at returns, by the entry of their function."""
        self.points: dict[StubProbe, Point] = {}
        self.raw: dict[int, bytes] = {}
        """Original instructions under breakpoints."""
        self.detached: set[int] = set()
        """
        Addresses at which all handlers can run after the hit: they need only the registers, and have no limit of hits.
        """
        numbered = enumerate(program.definitions)
        self._needing = {n for n, each in numbered if needs_target(program, each, resolved.architecture)}
        self.watched = WatchedPlaces(target)
        """Probepoints at accesses to memory."""

    def move(self, bias: int | None) -> dict[ProbeState, list[int]]:
        """
        Place the probepoints again after the module was mapped with the load bias ``bias``, or unmapped (None).

        Return the numbers of the probepoints by their states.
        """
        for address in self.at.keys() | self.entries.keys():
            self._target.forget(address)
        for places in (self.at, self.entries, self.raw, self.detached):
            places.clear()
        self.watched.forget()
        self.bias = bias
        states: dict[ProbeState, list[int]] = {}
        if bias is not None:
            self._placed.bias = bias
            for number, probe in enumerate(self._resolved.probepoints):
                is_wanted = self._placed.probes[number].is_active and probe.state is ProbeState.COMPILED
                if is_wanted:
                    states.setdefault(self._state_of(number, probe, bias), []).append(number)
        return states

    def _state_of(self, number: int, probe: Probepoint, bias: int) -> ProbeState:
        """Insert the probepoint ``number`` in a module with the load bias ``bias``, and return its new state."""
        if probe.is_in_code:
            return self._place(number, probe, bias)
        if probe.kind is ProbeKind.SAMPLER:
            return self._sample(number, probe)
        return self._watch(number, probe, bias)

    def _sample(self, number: int, probe: Probepoint) -> ProbeState:
        owner = self._placed.probes[number]
        self.points[owner] = Point.of(self._program, probe.definition, 0, ())
        owner.state = ProbeState.ACTIVE
        return ProbeState.ACTIVE

    def _place(self, number: int, probe: Probepoint, bias: int) -> ProbeState:
        instruction, owner = probe.instruction, self._placed.probes[number]
        address = bias + instruction.address
        if self._is_other(address, instruction.raw):
            return ProbeState.MISMATCH
        if not self._target.insert(address):
            return ProbeState.CONFLICT
        self.raw[address] = instruction.raw
        point = self.points[owner] = Point.of(self._program, probe.definition, probe.offset, probe.arguments)
        if probe.at_return:
            kept = entry_registers(self._program, probe.definition, self._resolved.architecture)
            self.entries.setdefault(address, []).append(ProbedEntry(owner, tuple(kept or ())))
        else:
            self.at.setdefault(address, []).append((owner, point))
        self._detach(address)
        owner.state = ProbeState.ACTIVE
        return ProbeState.ACTIVE

    def _detach(self, address: int) -> None:
        """Record, for a breakpoint's address, whether its handlers may run while the target continues."""
        owners = self.at.get(address, ())
        is_bound = any(owner.limits.maxhits or owner.definition in self._needing for owner, _ in owners)
        if owners and not is_bound and address not in self.entries:
            self.detached.add(address)
        else:
            self.detached.discard(address)

    def _is_other(self, address: int, raw: bytes) -> bool:
        """Return whether the instruction at an address certainly differs from the file's."""
        return self._target.read(address, len(raw)) != raw

    def _watch(self, number: int, probe: Probepoint, bias: int) -> ProbeState:
        owner, memory = self._placed.probes[number], probe.memory
        point = self.points[owner] = Point.of(self._program, probe.definition, memory.address, ())
        if memory.access is Access.EXECUTE:
            address = memory.address + (0 if memory.absolute else bias)
            if not self._target.insert(address):
                return ProbeState.CONFLICT
            self.at.setdefault(address, []).append((owner, point))
            owner.state = ProbeState.ACTIVE
            return ProbeState.ACTIVE
        owner.state = self.watched.place(owner, point, memory, bias)
        return owner.state

    def drop(self, probe: StubProbe) -> None:
        """Forget a probepoint. The caller removes breakpoints that are no longer needed."""
        self.watched.drop(probe)
        for address, owners in list(self.at.items()):
            self.at[address] = [owner for owner in owners if owner[0] is not probe]
            if not self.at[address]:
                del self.at[address]
            self._detach(address)
        for address, entries in list(self.entries.items()):
            self.entries[address] = [entry for entry in entries if entry.probe is not probe]
            if not self.entries[address]:
                del self.entries[address]
