"""
A log target: a sink, a thread that feeds it, and a bounded queue before that.

So a slow or broken sink never holds up a program. What finds no room is counted as lost. A sink that fails is closed,
and opened again after a while that gets longer; records that it had not taken wait for that. A batch that a sink
cannot take for a mistake of its own is given up: it would make the same mistake again. Records that are refused by
what is behind a sink are lost, and are no failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import FormatError, RecordsRefusedError, SinkError, reason_of
from dprobes.sinks.sink_backlog import Created, Destroyed, Pace, Problems, RecordQueue, Tables
from dprobes.sinks.sink_interface import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks.sink_backlog import Message
    from dprobes.sinks.sink_interface import Sink, SinkOptions
    from dprobes.sinks.target_kinds import LogTargetName

__all__ = ["LogTarget", "LogTargets", "TargetStatus", "close_all"]

_FLUSH_INTERVAL = 0.2
"""Seconds after which what was taken is made visible, if more is coming all the time."""

_PATIENCE = 10.0
"""Seconds that a sink may take nothing at the end, until what waits is given up."""

_ABORTING = 1.0
"""Seconds that a sink which hangs has to see that it was aborted."""

_SILENCE = 1.0
"""Seconds after which it is said that there is still something to be written."""

_LOOK = 0.02


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """The state of a log target, in records; ``problem`` is what is wrong with it at present."""

    name: str
    module: str | None
    format: str
    written: int
    waiting: int
    lost: int
    problem: str | None


class LogTarget:
    """
    Own a sink and the thread that feeds it.

    ``module`` limits it to the records of one program. ``open_sink`` is called at once, and by the thread after a
    failure. ``on_problem`` is called by the thread when the sink begins to fail; not for each time that the same
    happens again.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        module: str | None = None,
        format_name: str = "text",
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self._format_name = format_name
        self._open = open_sink
        self._on_problem = on_problem
        self._sink: Sink | None = open_sink()  # what is wrong at once is an error of who asked for it
        self._takes_tables = hasattr(self._sink, "log_tables")
        self._has_refused_tables = False
        self._active: dict[int, RecordSource] = {}
        """What the sink was told of, or would be if it were open; the thread's own."""
        self._queue = RecordQueue()
        self._written = 0
        self._problem: str | None = None
        self._problems = Problems()
        self._pace = Pace()
        self._pace.tried()
        self._flushed = 0.0
        self._changed = threading.Condition()
        """Guards the queue, the counts and the problem."""
        self._closing = False
        self._is_down = False
        """Whether the thread waits until it opens a sink again that has failed."""
        self._steps = 0
        """Counts what the thread gets done."""
        self._ended = threading.Event()
        """Not ``Thread.is_alive``, which an interrupted ``join`` makes untrue (before Python 3.13)."""
        self._thread = threading.Thread(target=self._run, name=f"log target {name}", daemon=True)
        self._thread.start()

    # What programs say

    def takes(self, source: RecordSource) -> bool:
        """Return whether records of a program are for this target."""
        return self.module is None or self.module == source.name

    def create(self, sources: Iterable[RecordSource]) -> None:
        """Announce programs, or more of them."""
        self._tell([Created(source) for source in sources if self.takes(source)])

    def destroy(self, source: RecordSource) -> None:
        """Tell that no more records of a program will come."""
        if self.takes(source):
            self._tell([Destroyed(source)])

    def put(self, batch: Batch) -> None:
        """Queue records of a program; what finds no room is counted as lost."""
        if not self.takes(batch.source):
            return
        with self._changed:
            self._queue.put(batch)
            self._changed.notify_all()

    def put_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Queue what keyed tables hold, if the sink takes that; of a program that has to wait only the latest."""
        if not self.takes(source):
            return
        if not self._takes_tables:
            if self._on_problem is not None and not self._has_refused_tables:
                self._on_problem("it takes no keyed tables; a trace file ('-o FILE.dpt') keeps them")
            self._has_refused_tables = True
            return
        with self._changed:
            self._queue.put_tables(Tables(source, contents))
            self._changed.notify_all()

    def _tell(self, messages: list[Created] | list[Destroyed]) -> None:
        with self._changed:
            self._queue.tell(messages)
            self._changed.notify_all()

    # What people ask

    def status(self) -> TargetStatus:
        """Return how the target fares."""
        with self._changed:
            queue = self._queue
            return TargetStatus(
                self.name, self.module, self._format_name, self._written, queue.waiting, queue.lost, self._problem
            )

    def finish(self) -> None:
        """Have the sink closed when everything that waits is written; ``close`` waits for that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(
        self,
        patience: float = _PATIENCE,
        limit: float | None = None,
        on_wait: Callable[[TargetStatus], None] | None = None,
    ) -> TargetStatus:
        """
        Write what waits, as long as the sink takes something, and give it up; return the last status.

        ``patience`` is how many seconds it may take nothing, and how many it may be out of order in all; ``limit`` how
        many all that may take. What then still waits is lost. To be interrupted is to run out of patience. ``on_wait``
        is called if this takes its time.
        """
        self.finish()
        try:
            self._await_end(patience, limit, on_wait)
        finally:
            with self._changed:
                self._queue.give_up()
                self._changed.notify_all()
            if not self._ended.is_set():
                self._abort()
            with self._changed:
                self._queue.settle()
        return self.status()

    def _abort(self) -> None:
        """Have a sink fail that hangs, if it knows how, so that it leaves nothing behind."""
        abort = getattr(self._sink, "abort", None)
        if abort is not None:
            with contextlib.suppress(Exception):
                abort()
            self._ended.wait(_ABORTING)

    def _await_end(self, patience: float, limit: float | None, on_wait: Callable[[TargetStatus], None] | None) -> None:
        begun = last = time.monotonic()
        steps, down = self._progress(), 0.0
        while not self._ended.wait(_LOOK):
            now = time.monotonic()
            if (found := self._progress()) != steps:
                steps, last = found, now
            down += _LOOK if self._is_down else 0.0  # one that comes back for a moment again and again is not repaired
            if on_wait is not None and now - begun > _SILENCE:
                on_wait(self.status())
                on_wait = None
            if max(now - last, down) > patience or (limit is not None and now - begun > limit):
                break

    def _progress(self) -> tuple[int, int]:
        """Return what changes when something gets done, also within a call of the sink if that can be seen."""
        return self._steps, getattr(self._sink, "steps", 0)

    # The thread

    def _run(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._serve(message)
            self._give_up()
        finally:
            self._ended.set()

    def _serve(self, message: Message) -> None:
        """Have the sink take a message; after a failure, wait until it can be tried again."""
        try:
            sink = self._opened()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's mistake must not be ours
            self._wait_after(error)
            return
        try:
            self._hand_over(sink, message)
            self._flush(sink)
        except (SinkError, OSError) as error:
            self._wait_after(error, message)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's, or a record's that is none
            self._drop(message)
            self._wait_after(error)

    def _next(self) -> Message | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return self._queue.first(self._pace.piece(self._sink)) if self._queue else None

    def _opened(self) -> Sink:
        if self._sink is None:
            self._pace.tried()
            self._sink = self._open()
            for source in self._active.values():
                self._sink.create_event(source)
        return self._sink

    def _hand_over(self, sink: Sink, message: Message) -> None:
        count = 0
        refusal: RecordsRefusedError | None = None
        match message:
            case Batch():
                count = len(message.records)
                begun = time.monotonic()
                try:
                    sink.log_events(message)
                except RecordsRefusedError as error:
                    refusal = error
                self._pace.took(count, time.monotonic() - begun)
            case Tables(source, contents):
                try:
                    sink.log_tables(source, contents)  # type: ignore[attr-defined] # asked for in the beginning
                except RecordsRefusedError as error:
                    refusal = error
            case Created(source):
                self._active[source.number] = source
                sink.create_event(source)
            case Destroyed(source):
                sink.destroy_event(source)
                self._active.pop(source.number, None)
        with self._changed:
            self._problem = None
            if self._queue.take(message, count):
                self._written += count
            self._steps += 1
        self._pace.succeeded()
        if refusal is not None:
            self._note(refusal)

    def _flush(self, sink: Sink) -> None:
        with self._changed:
            more = bool(self._queue)
        now = time.monotonic()
        if not more or now - self._flushed > _FLUSH_INTERVAL:
            try:
                sink.flush()
            except RecordsRefusedError as refusal:
                self._note(refusal)
            self._flushed = now

    def _drop(self, message: Message) -> None:
        with self._changed:
            self._queue.drop(message)

    def _wait_after(self, error: BaseException, message: Message | None = None) -> None:
        """Note a failure, close the sink, and wait until the next try."""
        self._note(error, message)
        self._give_up()
        wait = error.wait if isinstance(error, SinkError) else 0.0
        with self._changed:
            was_closing = self._closing
            if was_closing and not self._queue.waiting:
                self._queue.give_up()  # there is nothing to wait for
            self._is_down = True
            self._changed.wait_for(
                # At the end it is tried at once, unless there is nobody who would want that.
                lambda: self._queue.is_given_up or (self._closing and not was_closing and not wait),
                self._pace.failed(wait, at_end=was_closing),
            )
            self._is_down = False

    def _note(self, error: BaseException, message: Message | None = None) -> None:
        """Note what is wrong, and what a sink has taken of a message, or lost of earlier ones, all the same."""
        said = _text_of(error)
        with self._changed:
            self._problem = said
            if isinstance(error, SinkError):
                if message is not None and self._take(message, error):
                    self._written += error.taken
                    self._steps += 1
                self._lose_written(error)
        if self._on_problem is not None and self._problems.is_new(said):
            self._on_problem(said)

    def _take(self, message: Message, error: SinkError) -> bool:
        if error.left is not None:
            return self._queue.keep(message, error.left)
        return error.taken > 0 and self._queue.take(message, error.taken)

    def _lose_written(self, error: SinkError) -> None:
        """Count records as lost that were taken for written before, and have it said where they are missing."""
        count = min(error.lost, self._written)
        self._written -= count
        self._queue.lost += count
        for number, missing in error.unmarked.items():
            if (source := self._active.get(number)) is not None:
                self._queue.mark_lost(source, missing)

    def _give_up(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's
                with self._changed:
                    self._problem = self._problem or _text_of(error)
                    if isinstance(error, SinkError):
                        self._lose_written(error)


def _text_of(error: BaseException) -> str:
    match error:
        case SinkError() | FormatError():
            return error.message
        case OSError():
            return reason_of(error)
    return f"{type(error).__name__}: {error}"


# All log targets of a run or of the manager: what every program's records go through.

TargetKey = tuple[str, str | None]
"""The name of a target, and the program that it is for; None is for all."""


def close_all(
    targets: Sequence[LogTarget], limit: float | None = None, on_wait: Callable[[TargetStatus], None] | None = None
) -> list[TargetStatus]:
    """Close targets, all in the same time, as ``LogTargets.close`` does."""
    for target in targets:
        target.finish()
    until = None if limit is None else time.monotonic() + limit
    try:
        for target in targets:
            target.close(limit=None if until is None else until - time.monotonic(), on_wait=on_wait)
    except KeyboardInterrupt:
        for target in targets:
            target.close(patience=0)
    return [target.status() for target in targets]


class LogTargets:
    """
    Hand records to log targets, which come and go meanwhile; a late one is told of all programs that are active.

    All methods may be called by any thread.
    """

    def __init__(self, on_problem: Callable[[str, str], None] | None = None) -> None:
        self._lock = threading.Lock()
        """Held while something is queued, so that all targets get everything in one order."""
        self._targets: dict[TargetKey, LogTarget] = {}
        self._active: dict[int, RecordSource] = {}
        self._on_problem = on_problem

    # Targets

    def add(self, name: LogTargetName, module: str | None, options: SinkOptions) -> bool:
        """Add a target; return False if it is there already. Raise ``SinkError`` if its sink cannot be opened."""
        key = (name.text, module)
        with self._lock:
            if key in self._targets:
                return False
        say = self._on_problem
        target = LogTarget(
            name.text,
            lambda: name.open(options),
            module=module,
            format_name=options.format_name,
            on_problem=None if say is None else lambda problem: say(name.text, problem),
        )
        with self._lock:
            if key in self._targets:  # somebody else was faster
                target.close()
                return False
            self._targets[key] = target
            target.create(self._active.values())
        return True

    def take(self, name: str, module: str | None) -> list[LogTarget]:
        """Remove targets, with no ``module`` all of that name; ``close`` releases them."""
        with self._lock:
            chosen = [key for key in self._targets if key[0] == name and module in (None, key[1])]
            return [self._targets.pop(key) for key in chosen]

    def take_of(self, module: str) -> list[LogTarget]:
        """Remove the targets that are for one program only."""
        with self._lock:
            return [self._targets.pop(key) for key in list(self._targets) if key[1] == module]

    def names(self) -> list[str]:
        """Return the names of the targets."""
        with self._lock:
            return sorted({key[0] for key in self._targets})

    def statuses(self) -> list[TargetStatus]:
        """Return how the targets fare."""
        with self._lock:
            return [target.status() for target in self._targets.values()]

    def close(
        self, limit: float | None = None, on_wait: Callable[[TargetStatus], None] | None = None
    ) -> list[TargetStatus]:
        """
        Write what waits, as long as sinks take something, give everything up, and return how the targets fared.

        ``limit`` is how many seconds that may take. An interrupt (Ctrl-C) ends the patience. ``on_wait`` is called for
        each target that takes its time.
        """
        with self._lock:
            targets, self._targets = list(self._targets.values()), {}
        return close_all(targets, limit, on_wait)

    # Programs

    def create_event(self, source: RecordSource) -> None:
        """Announce a program, or more of it."""
        with self._lock:
            self._active[source.number] = source
            for target in self._targets.values():
                target.create([source])

    def log_events(self, batch: Batch) -> None:
        """Hand over records."""
        with self._lock:
            for target in self._targets.values():
                target.put(batch)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Hand over what the keyed tables of a program hold."""
        with self._lock:
            for target in self._targets.values():
                target.put_tables(source, contents)

    def destroy_event(self, source: RecordSource) -> None:
        """Tell that no more records of a program will come."""
        with self._lock:
            self._active.pop(source.number, None)
            for target in self._targets.values():
                target.destroy(source)
