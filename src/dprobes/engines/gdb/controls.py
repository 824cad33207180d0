"""What other threads ask of a run behind a stub while it goes on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dprobes.engines import interface
from dprobes.engines.interface import Notice, RecordBatch, StateEvent, carry_out

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.gdb.program import StubProgram
    from dprobes.engines.gdb.sharedstub import SharedStub
    from dprobes.engines.interface import Counts
    from dprobes.keyed.contents import TableContents
    from dprobes.keyed.store import KeyedStore
    from dprobes.resolve.probestate import ProbeState

__all__ = ["StubControls"]


class StubControls(interface.ControlledSession):
    """The part of a session by which others look at it; all is done between two hits, or before the next one."""

    _program: StubProgram
    _tables: Sequence[KeyedStore]
    _lock: threading.Lock
    _is_stopping: bool
    _shared: SharedStub[Any]
    _removals: list[int]
    _events: deque[interface.Event]
    _records: list[tuple[int, bytes]]
    _reported: set[tuple[int, ProbeState]]

    def _taken(self) -> Iterator[interface.Event]:
        while self._events:
            yield self._events.popleft()
        if self._records:
            records, self._records = self._records, []
            yield RecordBatch(records)

    def _report(self, states: Mapping[ProbeState, Sequence[int]], pid: int) -> None:
        """Tell what has become of probepoints, each state of one once."""
        for state, numbers in states.items():
            if (new := tuple(number for number in numbers if (number, state) not in self._reported)) != ():
                self._reported.update((number, state) for number in new)
                self._events.append(StateEvent(new, pid, state))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:  # noqa: ARG002 - of one program
        """Take a record of a probepoint."""
        self._records.append((probe, record))
        return True

    def warn(self, message: str, hint: str | None = None) -> None:
        """Tell the user something, and what to do about it."""
        self._warn(message, hint)

    def _warn(self, message: str, hint: str | None) -> None:
        self._events.append(Notice(message, hint))

    def stop(self) -> None:
        """Ask for the end."""
        self._is_stopping = True

    @property
    def program(self) -> StubProgram:
        """The program, with its variables."""
        return self._program

    @property
    def stores(self) -> Sequence[KeyedStore]:
        """The keyed tables."""
        return self._tables

    @property
    def shared(self) -> SharedStub[Any]:
        """What it shares with others at the same stub."""
        return self._shared

    @property
    def is_stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._is_stopping

    @property
    def wants_stop(self) -> bool:
        """Whether the target has to stop for what was asked."""
        return self._is_stopping or bool(self._removals)

    @property
    def due(self) -> float:
        """When it will want the target to stop by itself, by the clock that never goes back: never."""
        return math.inf

    def remove_soon(self, probe: int) -> None:
        """Have a probepoint removed behind this hit."""
        self._removals.append(probe)

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        return tuple(each.copy() for each in self._program.tallies)

    def remove(self, probes: Sequence[int]) -> None:
        """Have probepoints removed."""
        with self._lock:
            self._removals += probes

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._program.local_variables)

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of the one CPU that there is."""
        return [list(self._program.cpu_variables)]

    def tables(self) -> tuple[TableContents, ...]:
        """Return what the keyed tables hold."""
        with self._lock:
            return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[interface.Change]) -> None:
        """Change local variables and tables between two hits."""
        with self._lock:
            carry_out(changes, self._program.local_variables, self._tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero."""
        with self._lock:
            for cells in (self._program.local_variables, self._program.cpu_variables):
                count = len(cells[first : None if last is None else last + 1])
                cells[first : first + count] = [0] * count
