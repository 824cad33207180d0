"""``run --top``: a live table of the activity of a run's probepoints, instead of their records."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli.output.run_summary import place_of
from dprobes.escapes import escaped
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.field_values import FieldValues
from dprobes.formatters.templates.template_collection import probe_names
from dprobes.record.log_record import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from dprobes.engines.engine_interface import Attachment
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.rpn.rpn_program import Program
    from dprobes.sinks import Batch

__all__ = ["Row", "TopView"]

_REFRESHES = 4
"""Number of redraws of the table per second."""

_RATE_SPAN = 1.0
"""Seconds over which hits per second are measured."""

_CODES = 12
"""Bytes at the start of a record that identify its kind: flag word, major and minor code."""

_FRAME_LINES = 6
"""Number of lines of the screen that are not rows."""


class Row(NamedTuple):
    """The row of one probepoint; ``rate`` is in hits per second."""

    probe: str
    place: str
    hits: int
    rate: float
    records: int
    lost: int
    last: str


class TopView:
    """A sink of a run's records, which draws the table in a thread of its own while ``shown``."""

    def __init__(self) -> None:
        if not sys.stdout.isatty():
            raise click.UsageError("--top needs a terminal on standard output; --count and --hist do not")
        self._fields: dict[int, FieldValues] = {}
        self._last: dict[tuple[Place, bytes], bytes] = {}
        """The latest record of each place and kind."""
        self._source: RecordSource | None = None
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._measured: list[tuple[float, Counter[tuple[str, str]]]] = []

    # The sink

    def create_event(self, source: RecordSource) -> None:
        """Prepare the display of the fields of a program, which ``source`` describes."""
        with self._lock:
            self._fields[source.number] = FieldValues(source, symboliser=AddressSymboliser(source, live=True))
            self._source = source

    def log_events(self, batch: Batch) -> None:
        """Store the last record of each place, to display it in the place's row."""
        with self._lock:
            pairs = zip(batch.places, batch.records, strict=True)
            self._last.update({(place, record[:_CODES]): record for place, record in pairs})

    def destroy_event(self, source: RecordSource) -> None:
        """Do nothing: the rows remain visible."""

    def flush(self) -> None:
        """Do nothing: the table is drawn at its own pace."""

    def close(self) -> None:
        """Do nothing: no resource is open."""

    # The table

    def rows(self, program: Program, session: Attachment) -> list[Row]:
        """
        Return a row for each place that was hit, the most frequent first.

        If there are few rows, the other places have rows as well.
        """
        with self._lock:
            latest = list(self._last.items())
        last = {
            (place.symbol, place.function, decode_record(record).minor): (record, place)
            for (place, _), record in latest
        }
        now = time.monotonic()
        counts = session.counts()
        names = {} if self._source is None else probe_names(self._source)
        hits: Counter[tuple[str, str]] = Counter()
        found: dict[tuple[str, str], list[int]] = {}
        strings: dict[tuple[str, str], str] = {}
        for probe, count in zip(session.probes, counts, strict=False):
            minor = probe.definition.minor
            key = (names.get(minor) or f"{program.major},{minor}", place_of(probe))
            hits[key] += count.hits
            totals = found.setdefault(key, [0, 0])
            totals[0] += count.records
            totals[1] += count.lost
            if (record := last.get((probe.where, probe.function, probe.definition.minor))) is not None:
                strings[key] = self._text(*record)
        rates = self._rates(now, hits)
        rows = [
            Row(*key, hits[key], rates[key], records, lost, strings.get(key, ""))
            for key, (records, lost) in found.items()
        ]
        return sorted(rows, key=lambda row: (-row.rate, -row.hits, row.probe, row.place))

    def _rates(self, now: float, hits: Counter[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """
        Append the total counts ``hits`` to the history, and return the hits per second of each place.

        ``now`` is the monotonic time in seconds. The rate is the average since the counts of about a second ago.
        """
        self._measured.append((now, hits))
        while len(self._measured) > 2 and now - self._measured[1][0] >= _RATE_SPAN:
            self._measured.pop(0)
        before, counted = self._measured[0]
        span = now - before
        return {key: (count - counted[key]) / span if span > 0 else 0.0 for key, count in hits.items()}

    def _text(self, encoded: bytes, place: Place) -> str:
        """
        Return the formatted values of an encoded record, with the names of addresses.

        For samples and memory accesses, which may be in any function, the function of the record is included.
        """
        assert self._source is not None
        record, fields = decode_record(encoded), self._fields[self._source.number]
        found = [f"{name}={fields.text(record, place, name)}" for name in fields.data(record)]
        function = "" if place.routine else fields.text(record, place, "function")
        return " ".join(([] if function in ("", "-") else [f"function={function}"]) + found)

    @contextmanager
    def shown(self, program: Program, session: Attachment) -> Iterator[None]:
        """Draw the table repeatedly until the context ends."""
        from rich.console import Console
        from rich.live import Live

        screen = Console()

        def draw() -> RenderableType:
            return self._table(self.rows(program, session), program, screen.size.height)

        self._begun = time.monotonic()
        with Live(
            get_renderable=draw, console=screen, refresh_per_second=_REFRESHES, vertical_overflow="crop",
            redirect_stdout=False,
        ):  # fmt: skip
            yield

    def _table(self, rows: Sequence[Row], program: Program, height: int) -> RenderableType:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        seconds = time.monotonic() - self._begun
        total = sum(row.hits for row in rows)
        rate = sum(row.rate for row in rows)
        lost = sum(row.lost for row in rows)
        title = f"{escape(escaped(program.name))}   {seconds:.0f} s   {total} hits   {rate:.0f}/s"
        if lost:
            title += f"   [red]{lost} records lost[/red]"
        table = Table(
            title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, expand=True
        )
        table.add_column("probe", no_wrap=True)
        table.add_column("place", no_wrap=True, overflow="ellipsis", max_width=40)
        for name in ("hits/s", "hits", "records", "lost"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("last values", no_wrap=True, overflow="ellipsis", ratio=1)
        room = max(height - _FRAME_LINES, 1)
        for row in rows[:room]:
            table.add_row(
                row.probe,
                escape(escaped(row.place)),
                f"{row.rate:.0f}",
                str(row.hits),
                str(row.records),
                str(row.lost) if row.lost else "",
                escape(escaped(row.last)),
            )
        if len(rows) > room:
            table.caption = f"and {len(rows) - room} more"
        return table
