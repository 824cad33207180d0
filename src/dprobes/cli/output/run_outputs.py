"""The outputs of a run: standard output or a file, and log targets."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dprobes.cli import console
from dprobes.errors import SinkError
from dprobes.record.record_origin import WallClock
from dprobes.resolve.probepoints import places_of, with_files
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.target_kinds import is_trace_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.sinks import Sink
    from dprobes.sinks.local.console_target import StreamOutlet
    from dprobes.sinks.local.trace_file_target import TraceFileSink
    from dprobes.sinks.sink_thread import LogTargets, TargetStatus

__all__ = ["Outputs"]


class Outputs:
    """
    Outputs that the options of a run name. The constructor raises ``SinkError`` if one cannot be opened.

    Standard output and the file of ``-o`` are written synchronously: the run waits for their reader, and no record is
    lost. Log targets have threads of their own. ``views`` consume the records instead of standard output.
    """

    def __init__(
        self,
        source: RecordSource,
        output: Path | None,
        format_name: str,
        targets: Sequence[str],
        log_format: str,
        views: Sequence[Sink] = (),
    ) -> None:
        self._source = source
        self._places: list[Place] = []
        self._clock = WallClock()
        self._stream: StreamOutlet | None = None
        self._file: TraceFileSink | None = None
        self._targets: LogTargets | None = None
        self._direct = list(views)
        self._failed: Sink | None = None
        self._lost = 0
        self.problem: str | None = None
        """The reason why standard output or the file accepts no more; None if it does."""
        try:
            if (first := self._open_first(output, format_name, is_needed=not targets and not views)) is not None:
                self._direct.append(first)
            if targets:
                self._targets = self._open_targets(targets, log_format)
            self._announce()
        except BaseException:
            self.close()
            raise

    def _open_first(self, output: Path | None, format_name: str, *, is_needed: bool) -> Sink | None:
        from dprobes.formatters.line_formatter import columns_of
        from dprobes.sinks.local import console_target
        from dprobes.sinks.text_sinks import TextSink

        if output is not None and is_trace_name(output.name):
            from dprobes.sinks.local.trace_file_target import TraceFileSink

            self._file = TraceFileSink(str(output))
            return self._file
        if output is None and not is_needed:
            return None
        self._stream = console_target.console() if output is None else console_target.file(output)
        return TextSink(self._stream, format_name, columns=columns_of(sys.stdout) if output is None else None)

    @staticmethod
    def _open_targets(names: Sequence[str], log_format: str) -> LogTargets:
        from dprobes.sinks.sink_thread import LogTargets
        from dprobes.sinks.target_kinds import parse_target

        targets = LogTargets(lambda name, problem: console.warning(f"log target {name}: {problem}"))
        try:
            for name in names:
                target = parse_target(name).absolute(Path.cwd())
                targets.add(target, None, SinkOptions(log_format, Path.cwd()))
        except BaseException:
            targets.close()
            raise
        return targets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _announce(self) -> None:
        for sink in self._direct:
            sink.create_event(self._source)
        if self._targets is not None:
            self._targets.create_event(self._source)

    def write(self, probes: Sequence[Probepoint], records: Sequence[tuple[int, bytes]]) -> int:
        """
        Write records. Return the number of lost ones, which are the last, if standard output or the file has failed.

        ``probes`` has the current probepoints of the session.
        """
        places = self._places
        if len(probes) > len(places):
            new = probes[len(places) :]
            places += places_of(self._source.module, probes, len(places))
            self._source = with_files(self._source, new)
            self._announce()
        batch = Batch.of(self._source, records, places, self._clock.look())
        lost = len(records) if self._failed is not None else 0
        for sink in tuple(self._direct):
            try:
                sink.log_events(batch)
            except SinkError as error:
                lost += len(records) - error.taken + error.lost
                self._fail(sink, error)
        if self._targets is not None:
            self._targets.log_events(batch)
        self._lost += lost
        return lost

    def send_tables(self, contents: Sequence[TableContents]) -> None:
        """Send the contents of keyed tables to log targets; any thread may call it."""
        if self._targets is not None:
            self._targets.log_tables(self._source, contents)

    def write_tables(self, contents: Sequence[TableContents]) -> None:
        """Write the contents of keyed tables to a trace file, if there is one, and to log targets."""
        self.send_tables(contents)
        file = self._file
        if file is not None and file in self._direct:
            try:
                file.log_tables(self._source, contents)
            except SinkError as error:
                self._fail(file, error)

    def flush(self, *, is_last: bool = False) -> int:
        """
        Flush written records. Return the number of lost ones, as ``write`` does.

        With ``is_last``, nothing may remain buffered.
        """
        lost = 0
        for sink in tuple(self._direct):
            try:
                (getattr(sink, "settle", sink.flush) if is_last else sink.flush)()
            except SinkError as error:
                lost += error.lost
                self._fail(sink, error)
        self._lost += lost
        return lost

    @property
    def is_holding(self) -> bool:
        """True if written records may still turn out to be lost."""
        return any(getattr(sink, "is_holding", False) for sink in self._direct)

    def _fail(self, sink: Sink, error: SinkError) -> None:
        self._direct.remove(sink)
        self._failed = sink
        self.problem = error.message

    @property
    def is_waiting(self) -> bool:
        """True if records are waiting for the reader of standard output or a file."""
        return self._stream is not None and self._stream.is_holding

    def give_up(self) -> bool:
        """End a wait for the reader of standard output or a file; return whether an output was waiting."""
        return self._stream is not None and self._stream.give_up()

    def abandon(self) -> None:
        """Stop writing to standard output, whose reader has closed the pipe."""
        if self._stream is not None:
            self._stream.abandon()

    def close(self) -> None:
        """Wait for log targets to write their queues, warn of lost records and problems, and close everything."""
        if self._targets is not None:
            self._targets.destroy_event(self._source)
            for status in self._targets.close(on_wait=_say_waiting):
                if status.lost:
                    plural = "" if status.lost == 1 else "s"
                    why = f": {status.problem}" if status.problem else ""
                    console.warning(f"log target {status.name} has lost {status.lost} record{plural}{why}")
                elif status.problem:
                    console.warning(f"log target {status.name}: {status.problem}")
        if self._failed is not None:
            with contextlib.suppress(SinkError):  # there may be room for a note
                self._failed.log_events(Batch(self._source, [], [], self._clock.look(), self._lost))
                self._failed.destroy_event(self._source)
            with contextlib.suppress(SinkError):
                self._failed.close()
        while self._direct:
            sink = self._direct.pop()
            sink.destroy_event(self._source)
            sink.close()


def _say_waiting(status: TargetStatus) -> None:
    what = f"{status.waiting} records are not written yet" if status.waiting else "waiting for it"
    console.note(f"log target {status.name}: {what}; Ctrl-C gives up")
