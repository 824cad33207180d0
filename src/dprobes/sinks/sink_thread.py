"""
Log target: a sink, a thread that feeds it, and a bounded queue of records.

So a slow or broken sink never delays a program. Records without room in the queue are counted as lost. A failed sink is
closed, and opened again after a growing pause. Records that it has not accepted stay in the queue. A batch that
triggers a bug in a sink is dropped, because it would trigger the bug again. Records that the sink's receiver refuses
are lost; that is not a failure of the sink.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import FormatError, RecordsRefusedError, SinkError, reason_of
from dprobes.sinks import Batch
from dprobes.sinks.sink_backlog import Created, Destroyed, Pace, Problems, RecordQueue, Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Sink, SinkOptions
    from dprobes.sinks.sink_backlog import Message
    from dprobes.sinks.target_kinds import LogTargetName

__all__ = ["LogTarget", "LogTargets", "TargetStatus", "close_all"]

_FLUSH_INTERVAL = 0.2
"""Seconds after which accepted records are flushed, even if more arrive continuously."""

_PATIENCE = 10.0
"""Seconds without progress at the end, after which the records in the queue are given up."""

_ABORTING = 1.0
"""Seconds for a blocked sink to react to ``abort``."""

_SILENCE = 1.0
"""Seconds after which the user is told that records are still being written."""

_LOOK = 0.02


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """The state of a log target; counts are in records, ``problem`` is its current problem."""

    name: str
    module: str | None
    format: str
    written: int
    waiting: int
    lost: int
    problem: str | None


class LogTarget:
    """
    A log target: a sink and the thread that feeds it.

    ``module`` limits it to the records of one program. ``open_sink`` is called by the constructor, and by the thread
    after a failure. The thread calls ``on_problem`` when the sink begins to fail, but not for repetitions of the same
    problem.
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
        self._sink: Sink | None = open_sink()  # an error at the start belongs to the caller
        self._takes_tables = hasattr(self._sink, "log_tables")
        self._has_refused_tables = False
        self._active: dict[int, RecordSource] = {}
        """Programs announced to the sink, or to be announced when it is opened again. Only the thread uses them."""
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
        """True if the thread waits to open a failed sink again."""
        self._steps = 0
        """Counter of the thread's progress."""
        self._ended = threading.Event()
        """Used instead of ``Thread.is_alive``, which is wrong after an interrupted ``join`` (before Python 3.13)."""
        self._thread = threading.Thread(target=self._run, name=f"log target {name}", daemon=True)
        self._thread.start()

    # Input from programs

    def takes(self, source: RecordSource) -> bool:
        """Return whether the records of a program are sent to this target."""
        return self.module is None or self.module == source.name

    def create(self, sources: Iterable[RecordSource]) -> None:
        """Queue the descriptions of programs for the sink, as far as their records are sent to this target."""
        self._tell([Created(source) for source in sources if self.takes(source)])

    def destroy(self, source: RecordSource) -> None:
        """Queue the message that a program has no more records."""
        if self.takes(source):
            self._tell([Destroyed(source)])

    def put(self, batch: Batch) -> None:
        """Queue records of a program; those without room are counted as lost."""
        if not self.takes(batch.source):
            return
        with self._changed:
            self._queue.put(batch)
            self._changed.notify_all()

    def put_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Queue the contents of keyed tables, if the sink accepts them. They replace queued tables of the program."""
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

    # Status and end

    def status(self) -> TargetStatus:
        """Return name, format, problem, and the numbers of written, waiting and lost records."""
        with self._changed:
            queue = self._queue
            return TargetStatus(
                self.name, self.module, self._format_name, self._written, queue.waiting, queue.lost, self._problem
            )

    def finish(self) -> None:
        """Close the sink once the queue is written, without waiting; ``close`` waits for that."""
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
        Write the queue as long as the sink makes progress, release the sink and return the last status.

        ``patience`` is the maximum number of seconds without progress, and of seconds in which the sink cannot be
        opened. ``limit`` is the maximum total time in seconds. Records left in the queue are lost. An interrupt ends
        the wait like the end of ``patience``. ``on_wait`` is called once if the wait takes more than ``_SILENCE``
        seconds.
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
        """Make a blocked sink fail, if it has ``abort``, so that it leaves nothing behind."""
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
            down += _LOOK if self._is_down else 0.0  # brief recoveries do not reset this time
            if on_wait is not None and now - begun > _SILENCE:
                on_wait(self.status())
                on_wait = None
            if max(now - last, down) > patience or (limit is not None and now - begun > limit):
                break

    def _progress(self) -> tuple[int, int]:
        """Return numbers that change with progress, also within a call of a sink that has ``steps``."""
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
        """Pass a message to the sink; after a failure, wait until the next attempt."""
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
        """Record a failure, close the sink, and wait until the next attempt."""
        self._note(error, message)
        self._give_up()
        wait = error.wait if isinstance(error, SinkError) else 0.0
        with self._changed:
            was_closing = self._closing
            if was_closing and not self._queue.waiting:
                self._queue.give_up()  # no reason to wait
            self._is_down = True
            self._changed.wait_for(
                # At the end it is tried at once, unless the target was given up.
                lambda: self._queue.is_given_up or (self._closing and not was_closing and not wait),
                self._pace.failed(wait, at_end=was_closing),
            )
            self._is_down = False

    def _note(self, error: BaseException, message: Message | None = None) -> None:
        """Record a problem, and the counts of its ``SinkError``: accepted records of ``message``, and lost records."""
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
        """Count records as lost that were counted as written, and report them at the right place."""
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


# All log targets of a run or of the manager, which receive the records of all programs.

TargetKey = tuple[str, str | None]
"""Name of a target, and the module of the program whose records it gets, or None for all programs."""


def close_all(
    targets: Sequence[LogTarget], limit: float | None = None, on_wait: Callable[[TargetStatus], None] | None = None
) -> list[TargetStatus]:
    """Close targets concurrently, within ``limit`` seconds, and return their final states (``LogTargets.close``)."""
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
    The log targets of records, which may be added and removed at any time.

    A new target gets the announcements of all active programs. Any thread may call the methods.
    """

    def __init__(self, on_problem: Callable[[str, str], None] | None = None) -> None:
        self._lock = threading.Lock()
        """Held during queuing, so that all targets get the same order."""
        self._targets: dict[TargetKey, LogTarget] = {}
        self._active: dict[int, RecordSource] = {}
        self._on_problem = on_problem

    # Targets

    def add(self, name: LogTargetName, module: str | None, options: SinkOptions) -> bool:
        """Add a target; return False if it exists already. Raise ``SinkError`` if its sink cannot be opened."""
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
            if key in self._targets:  # another thread has added it
                target.close()
                return False
            self._targets[key] = target
            target.create(self._active.values())
        return True

    def take(self, name: str, module: str | None) -> list[LogTarget]:
        """
        Remove and return the targets with a name and a module. If ``module`` is None, take all with this name.

        ``close_all`` releases them.
        """
        with self._lock:
            chosen = [key for key in self._targets if key[0] == name and module in (None, key[1])]
            return [self._targets.pop(key) for key in chosen]

    def take_of(self, module: str) -> list[LogTarget]:
        """Remove and return the targets for the records of one program."""
        with self._lock:
            return [self._targets.pop(key) for key in list(self._targets) if key[1] == module]

    def names(self) -> list[str]:
        """Return the names of all log targets, such as ``file:PATH``."""
        with self._lock:
            return sorted({key[0] for key in self._targets})

    def statuses(self) -> list[TargetStatus]:
        """Return the status of each log target: problem, and numbers of written, waiting and lost records."""
        with self._lock:
            return [target.status() for target in self._targets.values()]

    def close(
        self, limit: float | None = None, on_wait: Callable[[TargetStatus], None] | None = None
    ) -> list[TargetStatus]:
        """
        Write the queues as long as sinks make progress, release all targets, and return their last status.

        ``limit`` is the maximum total time in seconds. An interrupt (Ctrl-C) ends the wait. ``on_wait`` is called for
        each target that takes long.
        """
        with self._lock:
            targets, self._targets = list(self._targets.values()), {}
        return close_all(targets, limit, on_wait)

    # Input from programs

    def create_event(self, source: RecordSource) -> None:
        """Queue the description of a program for each target before its first record; a further call updates it."""
        with self._lock:
            self._active[source.number] = source
            for target in self._targets.values():
                target.create([source])

    def log_events(self, batch: Batch) -> None:
        """Queue a batch of records for each target."""
        with self._lock:
            for target in self._targets.values():
                target.put(batch)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Queue the contents of a program's keyed tables for each target whose sink accepts tables."""
        with self._lock:
            for target in self._targets.values():
                target.put_tables(source, contents)

    def destroy_event(self, source: RecordSource) -> None:
        """Queue for each target the message that a program has no more records."""
        with self._lock:
            self._active.pop(source.number, None)
            for target in self._targets.values():
                target.destroy(source)
