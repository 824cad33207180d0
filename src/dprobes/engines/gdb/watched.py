"""
The watchpoints of a program behind a stub: which memory they watch now, and whom an access concerns.

A stub that has none, or no more, says so when the first one is asked for. One for instructions (``x``) is a breakpoint.
Some stubs call every access a write: then those for reads and writes are concerned as well as those for writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.stub import BreakpointKind
from dprobes.errors import EngineError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.program import Access

if TYPE_CHECKING:
    from dprobes.engines.gdb.program import StubProbe
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.resolve.probepoints import WatchedMemory
    from dprobes.rpn.point import Point

__all__ = ["AT_LEAST", "WatchedPlaces"]

AT_LEAST = "at least: of several processors at once one"
"""
What is said of the counts of a watchpoint in a machine with several processors.

Where two of these come to watchpoints before the machine stands still, QEMU reports the stop of one (seen with 7.2 to
lose 30 to 45 % of the accesses of threads on both).
"""

_KINDS = {Access.WRITE: BreakpointKind.WRITE, Access.READ_WRITE: BreakpointKind.ACCESS}
_NAMES = {Access.WRITE: "writes", Access.READ_WRITE: "reads and writes"}


class _Place(NamedTuple):
    address: int
    length: int
    kind: BreakpointKind


class WatchedPlaces:
    """The memory that is watched in a ``target``."""

    def __init__(self, target: StubTarget) -> None:
        self._target = target
        self._owners: dict[_Place, list[tuple[StubProbe, Point]]] = {}

    def __bool__(self) -> bool:
        """Whether anything is watched."""
        return bool(self._owners)

    def place(self, probe: StubProbe, point: Point, memory: WatchedMemory, bias: int) -> ProbeState:
        """Watch memory for a probepoint of data; return what has become of that."""
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
        """Return whom an access concerns that a stub has called ``watch``, ``rwatch`` or ``awatch``."""
        return [
            owner
            for place, owners in self._owners.items()
            if place.address <= address < place.address + place.length
            and (reason == "watch" or place.kind is BreakpointKind.ACCESS)
            for owner in owners
        ]

    def drop(self, probe: StubProbe) -> None:
        """Forget a probepoint, and watch no longer what nobody needs."""
        for place, owners in list(self._owners.items()):
            self._owners[place] = [owner for owner in owners if owner[0] is not probe]
            if not self._owners[place]:
                del self._owners[place]
                self._target.unwatch(*place)

    def forget(self) -> None:
        """Watch nothing any longer: what was there may be gone."""
        for place in self._owners:
            self._target.unwatch(*place)
        self._owners.clear()
