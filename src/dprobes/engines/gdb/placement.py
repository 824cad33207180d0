"""Where the probepoints of a program are in the target, as its module comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.watched import WatchedPlaces
from dprobes.lazynamedtuple import NamedTuple
from dprobes.resolve.probepoints import ProbeKind
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.needs import entry_registers, needs_target
from dprobes.rpn.point import Point
from dprobes.rpn.program import Access

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch.processor import Register
    from dprobes.engines.gdb.program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Program

__all__ = ["PlacedProbes", "ProbedEntry"]


class ProbedEntry(NamedTuple):
    """The entry of a function whose return is probed, with the registers that are kept for that."""

    probe: StubProbe
    kept: Sequence[Register]


class PlacedProbes:
    """The probepoints of a program that are in the target, by their addresses."""

    def __init__(
        self,
        target: StubTarget,
        breakpoint_: bytes,
        program: Program,
        placed: StubProgram,
        resolved: Resolved,
    ) -> None:
        self._target = target
        self._breakpoint = breakpoint_
        self._program = program
        self._placed = placed
        self._resolved = resolved
        self.bias: int | None = None
        """How far the module is above its link addresses, None as long as it is not there."""
        self.at: dict[int, list[tuple[StubProbe, Point]]] = {}
        """The probepoints at instructions."""
        self.entries: dict[int, list[ProbedEntry]] = {}
        """Those at returns, by the entry of their function."""
        self.points: dict[StubProbe, Point] = {}
        self.raw: dict[int, bytes] = {}
        """The instructions under breakpoints."""
        self.detached: set[int] = set()
        """Where all handlers can run after the hit: they need but the registers, and no number of hits ends them."""
        numbered = enumerate(program.definitions)
        self._needing = {n for n, each in numbered if needs_target(program, each, resolved.architecture)}
        self.watched = WatchedPlaces(target)
        """Those at accesses to memory."""

    def move(self, bias: int | None) -> dict[ProbeState, list[int]]:
        """Take notice of where the module is now; return what has become of probepoints by that."""
        for address in self.at.keys() | self.entries.keys():
            self._target.forget(address, len(self._breakpoint))
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
        """Place a probepoint; return what has become of it."""
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
        if not self._target.insert(address, len(self._breakpoint), self._breakpoint):
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
        """Note whether handlers at an address can run after the hit."""
        owners = self.at.get(address, ())
        is_bound = any(owner.limits.maxhits or owner.definition in self._needing for owner, _ in owners)
        if owners and not is_bound and address not in self.entries:
            self.detached.add(address)
        else:
            self.detached.discard(address)

    def _is_other(self, address: int, raw: bytes) -> bool:
        """Return whether another instruction than the file's is at an address, as far as that is known."""
        return self._target.read(address, len(raw)) != raw

    def _watch(self, number: int, probe: Probepoint, bias: int) -> ProbeState:
        owner, memory = self._placed.probes[number], probe.memory
        point = self.points[owner] = Point.of(self._program, probe.definition, memory.address, ())
        if memory.access is Access.EXECUTE:
            address = memory.address + (0 if memory.absolute else bias)
            if not self._target.insert(address, len(self._breakpoint), self._breakpoint):
                return ProbeState.CONFLICT
            self.at.setdefault(address, []).append((owner, point))
            owner.state = ProbeState.ACTIVE
            return ProbeState.ACTIVE
        owner.state = self.watched.place(owner, point, memory, bias)
        return owner.state

    def drop(self, probe: StubProbe) -> None:
        """Forget a probepoint; the breakpoints that nobody needs any more are still there."""
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
