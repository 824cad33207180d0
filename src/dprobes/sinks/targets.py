"""All log targets of a run or of the manager: what every program's records go through."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dprobes.sinks.target import LogTarget, TargetStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.record.origin import RecordSource
    from dprobes.sinks.interface import Batch, SinkOptions
    from dprobes.sinks.kinds import LogTargetName

__all__ = ["LogTargets", "TargetKey", "close_all"]

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
        """Say that no more records of a program will come."""
        with self._lock:
            self._active.pop(source.number, None)
            for target in self._targets.values():
                target.destroy(source)
