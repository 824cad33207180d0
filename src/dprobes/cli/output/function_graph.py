"""
The function graph: entries and returns of functions as lines, each thread indented by the depth of its calls.

::

    thread  duration    function
     12345             | outer() {
     12345   12 ns     |   leaf();
     12345             |   middle() {
     12345             |   } /* middle: left without a return */
     12345   1.2 us    | } /* outer */

A call without calls of other functions is one line. The lines are in the order of the records; those of different
threads alternate. A function that was left by ``longjmp`` or an exception has no return; its line follows when the
next record of the thread shows that the call has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.cli.console import print_lines
from dprobes.keyed.table_text import quantity
from dprobes.record.log_record import Item, decode_record
from dprobes.rpn.keyed_tables import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Batch

__all__ = ["GRAPH_HEADER", "GRAPH_ITEMS", "CallEvent", "FunctionGraph", "GraphView"]

GRAPH_ITEMS = Item.PID | Item.TID | Item.TIME | Item.MINOR
"""The header items that records of a graph need."""

_DEPTH_BITS = 8
_DEPTH_MASK = (1 << _DEPTH_BITS) - 1

_THREAD, _DURATION = 8, 10
"""Widths of the first two columns, in characters."""

GRAPH_HEADER = f"{'thread':>{_THREAD}}  {'duration':<{_DURATION}}| function"


class CallEvent(NamedTuple):
    """
    The entry or the return of a call of a function by a thread; ``depth`` is the number of pending calls around it.

    ``took`` is the time of the call in nanoseconds; None for an entry.
    """

    pid: int
    tid: int
    depth: int
    function: str
    took: int | None = None


class FunctionGraph:
    """
    A writer of the lines of a graph from events.

    An entry is held until the next event, which shows whether the call has calls of its own.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], list[str]] = {}
        """The functions of the pending calls of each thread, the outermost first; "" for an entry that was not seen."""
        self._held: CallEvent | None = None

    def lines_of(self, events: Iterable[CallEvent]) -> Iterator[str]:
        """Iterate over the lines that events complete."""
        for event in events:
            held, self._held = self._held, None
            pending = self._pending.setdefault((event.pid, event.tid), [])
            if event.took is not None and held is not None and held == event._replace(took=None):
                pending.pop()
                yield _line(event, f"{event.function}();", event.took)
                continue
            if held is not None:
                yield _line(held, f"{held.function}() {{")
            yield from self._ended(event, pending)
            if event.took is None:
                pending.append(event.function)
                self._held = event
                continue
            if len(pending) > event.depth:
                pending.pop()
            yield _line(event, f"}} /* {event.function} */", event.took)

    def rest(self) -> Iterator[str]:
        """Iterate over the line of the entry that is held."""
        if self._held is not None:
            yield _line(self._held, f"{self._held.function}() {{")
            self._held = None

    @staticmethod
    def _ended(event: CallEvent, pending: list[str]) -> Iterator[str]:
        """End the calls that an event shows to have ended without a return; add those whose entry was not seen."""
        inside = event.depth + (event.took is not None)
        while len(pending) > inside:
            function = pending.pop()
            if function:
                yield _line(event._replace(depth=len(pending)), f"}} /* {function}: left without a return */")
        pending += [""] * (event.depth - len(pending))


def _line(event: CallEvent, text: str, took: int | None = None) -> str:
    duration = "" if took is None else quantity(took, Unit.NANOSECONDS)
    return f"{event.tid:>{_THREAD}}  {duration:<{_DURATION}}| {'  ' * event.depth}{text}"


class GraphView:
    """
    A sink that prints the records of a program as a graph.

    ``entries`` are the names of the functions whose entries have the minor codes from 0 on, ``exits`` those of the
    functions whose exits have the codes after these. A record has one number: the depth of the call in its low byte,
    and above it the time that the call has taken.
    """

    def __init__(self, entries: Iterable[str], exits: Iterable[str]) -> None:
        known = tuple(entries)
        self._functions = (*known, *exits)
        self._entry_count = len(known)
        self.refused = 0
        """The number of records that no handler of the program can have written."""
        self.events = 0
        """The number of entries and returns."""
        self._graph = FunctionGraph()
        self._has_header = False

    def create_event(self, source: RecordSource) -> None:
        """Do nothing: the program is known."""

    def destroy_event(self, source: RecordSource) -> None:
        """Do nothing: ``close`` prints the entry that is held."""

    def log_events(self, batch: Batch) -> None:
        """Print the lines of records."""
        self._print(self._graph.lines_of(self._events_of(batch)))

    def flush(self) -> None:
        """Do nothing: lines are not kept."""

    def close(self) -> None:
        """Print the entry that is held."""
        self._print(self._graph.rest())

    def _print(self, lines: Iterable[str]) -> None:
        found = list(lines)
        if found and not self._has_header:
            found.insert(0, GRAPH_HEADER)
            self._has_header = True
        if found:
            print_lines(found)

    def _events_of(self, batch: Batch) -> Iterator[CallEvent]:
        for encoded in batch.records:
            record = decode_record(encoded)
            words, logged = record.words(), record.logged
            if len(words) != 1 or logged.minor >= len(self._functions):
                self.refused += 1
                continue
            number, is_entry = words[0], logged.minor < self._entry_count
            function = self._functions[logged.minor]
            self.events += 1
            yield CallEvent(
                logged.pid, logged.tid, number & _DEPTH_MASK, function, None if is_entry else number >> _DEPTH_BITS
            )
