"""What other threads ask of a run behind a stub while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines import interface
from dprobes.engines.interface import Notice, RecordBatch, StateEvent, carry_out

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.gdb.program import StubProgram
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

    def _warn(self, message: str, hint: str | None) -> None:
        self._events.append(Notice(message, hint))

    def stop(self) -> None:
        """Ask for the end."""
        self._is_stopping = True

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
