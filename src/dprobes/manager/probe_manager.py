"""
Manager itself: the inserted programs, by name, and the operations on them.

Each verb is a method that takes its arguments and returns its answer (``manager_messages``). ``daemon`` calls the
methods, in a thread for each connection. Changes of programs are serialized; queries do not wait for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from dprobes.engines.engine_interface import ProbeRemoval, TableChange, VariableReset
from dprobes.engines.shared_globals import GLOBALS_MAX, GlobalVariables
from dprobes.errors import ManagerError
from dprobes.globs import compile_glob
from dprobes.manager.insert_request import check_format, checked_insertion
from dprobes.manager.inserter import Inserter
from dprobes.manager.managed_program import describe_program, describe_variables
from dprobes.manager.manager_messages import (
    VERBS,
    AddTargetArguments,
    GetvarsArguments,
    GlobalValues,
    InsertArguments,
    InsertedPrograms,
    Insertion,
    ManagedProgram,
    ManagedVariables,
    ManagerStatus,
    QueryArguments,
    Removal,
    RemoveArguments,
    RemoveTargetArguments,
    StopArguments,
    Stopped,
)
from dprobes.manager.recorder import TRACE_LIMIT, Recording
from dprobes.manager.wire_protocol import decode_arguments, encode
from dprobes.runs.followed_program import GONE, settled_counts
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Notice
    from dprobes.manager.managed_program import InsertedProgram
    from dprobes.sinks.sink_thread import TargetStatus

__all__ = ["Manager"]

_RECORDS_PATIENCE = 1.0
"""Maximum number of seconds for which ``query`` waits until the records that it counts are written."""

_PATIENCE = 5.0
"""Maximum number of seconds for which the end of the manager waits for a verb in progress."""

_STOPPING_LIMIT = 3.0
"""Maximum number of seconds for log targets to write their queues when everything is stopped at once."""


class Manager:
    """Programs, global variables, and the recorder; leaving the context manager removes everything."""

    def __init__(self, trace: Path, trace_limit: int = TRACE_LIMIT) -> None:
        self._recording = Recording(trace, trace.parent, trace_limit)
        self._globals = GlobalVariables(GLOBALS_MAX)
        self._cells = self._globals.cells()
        self._programs: dict[str, list[InsertedProgram]] = {}
        self._changing = threading.Lock()
        self._inserter = Inserter(self._recording, self._globals)
        self._since = time.time()
        self.is_over = False
        self.wake_up, self._waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """Remove every probepoint of all programs, write the buffered records, and close the log targets."""
        self.is_over = True
        # A verb in progress should end before that; otherwise the exit of the process ends it.
        is_free = self._changing.acquire(timeout=_PATIENCE)
        self._take_away(self._all())
        self._programs.clear()
        if is_free:
            self._changing.release()
        self._recording.close()
        self._cells.close()
        self._globals.close()
        os.close(self.wake_up)
        os.close(self._waking)

    def end(self, *_: object) -> None:
        """
        Request the end of the server: it checks ``is_over`` when ``wake_up`` becomes readable.

        Usable as a signal handler.
        """
        self.is_over = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._waking, b"e")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        """True if the manager has no state: no program, and no nonzero global variable."""
        return not self._programs and not any(self._cells.view())

    def answer(self, verb: str, arguments: dict[str, Any], notify: Callable[[Notice], None]) -> dict[str, Any]:
        """
        Execute the verb of a client's request and return its result.

        ``notify`` sends a notice to the client meanwhile. Raise a subclass of ``DprobesError`` if the request is
        refused, or the verb is unknown.
        """
        if verb not in VERBS:
            raise ManagerError(f"the manager (dprobes {__version__}) has no verb '{verb}'")
        match decode_arguments(VERBS[verb], verb, arguments):
            case InsertArguments() as given:
                return encode(self._insert(given, notify))
            case RemoveArguments() as given:
                return encode(self._remove(given))
            case QueryArguments() as given:
                return encode(self._query(given))
            case GetvarsArguments() as given:
                return encode(self._getvars(given))
            case AddTargetArguments() as given:
                return self._add_target(given)
            case RemoveTargetArguments() as given:
                return _answer_targets(self._recording.remove_target(given.target, given.name))
            case StopArguments() as given:
                return encode(self._stop(given))
            case _ if verb == "targets":
                return _answer_targets(self._recording.targets())
        return encode(self._status())

    # Verbs

    def _status(self) -> ManagerStatus:
        programs = self._all()
        return ManagerStatus(
            version=__version__,
            pid=os.getpid(),
            since=self._since,
            trace=str(self._recording.trace),
            trace_problem=self._recording.problem,
            programs=sum(not inserted.has_ended for inserted in programs),
            probepoints=sum(len(inserted.probes) for inserted in programs if not inserted.has_ended),
        )

    def _insert(self, given: InsertArguments, notify: Callable[[Notice], None]) -> Insertion:
        request = checked_insertion(given)
        with self._changing:
            if self.is_over:
                raise ManagerError("the probe manager is ending", hint="try again")
            name = given.name or request.ppdf.program.name
            present = [inserted for inserted in self._programs.get(name, ()) if not inserted.has_ended]
            if present and not (given.merge or given.replace):
                raise ManagerError(
                    f"a program for '{name}' is inserted already",
                    hint="--merge adds to it, --replace replaces it, --as NAME inserts another one",
                )
            for ended in self._programs.get(name, ()):
                if ended.has_ended:  # it ended by itself: its log targets are not for this program
                    self._recording.forget_targets(ended.given.arguments.targets, name)
            added: list[str] = []
            try:
                # First, so that no program is inserted whose log targets cannot be opened.
                for target in given.targets:
                    if self._recording.add_target(target, name, given.format):
                        added.append(target)  # noqa: PERF401 - those before one that fails are to be known
                beside = [inserted for inserted in self._all() if not inserted.has_ended]
                inserted = self._inserter.insert(name, request, present, beside, notify)
            except BaseException:
                self._recording.forget_targets(added, name)
                raise
            replaced: tuple[ManagedProgram, ...] = ()
            if given.replace:
                self._take_away(present)
                replaced, present = tuple(describe_program(each) for each in present), []
            self._programs[name] = [*present, inserted]
        for notice in inserted.notices():
            notify(notice)
        return Insertion(describe_program(inserted), replaced, inserted.reason)

    def _remove(self, given: RemoveArguments) -> Removal:
        name, codes = given.name, given.probe
        with self._changing:
            chosen = self._chosen(name, everything=given.all or (codes is not None and name is None))
            if codes is not None:
                return self._remove_probe(chosen, *codes)
            unfinished = self._take_away(chosen)
            removed = tuple(describe_program(inserted) for inserted in chosen)
            for inserted in chosen:
                parts = self._programs[inserted.name]
                parts.remove(inserted)
                if not parts:
                    del self._programs[inserted.name]
                    self._recording.forget_targets_of(inserted.name)
        if unfinished:
            raise ManagerError(f"the program '{unfinished[0].name}' has not ended yet, but is going to")
        return Removal(removed=removed)

    def _remove_probe(self, chosen: list[InsertedProgram], major: int, minor: int) -> Removal:
        found = {inserted: inserted.probes_at(major, minor) for inserted in chosen}
        if not any(found.values()):
            raise ManagerError(f"no inserted program has a probepoint {major},{minor}")
        count = 0
        for inserted, probes in found.items():
            states = inserted.states()
            there = [probe for probe in probes if states[probe][0] not in GONE]
            inserted.attachment.change([ProbeRemoval(there)])
            count += len(there)
        if not count:
            raise ManagerError(f"the probepoint {major},{minor} is removed already")
        return Removal(probepoints=count)

    def _query(self, given: QueryArguments) -> InsertedPrograms:
        chosen = self._chosen(given.name, everything=given.name is None)
        settled = settled_counts(chosen, time.monotonic() + _RECORDS_PATIENCE)
        return InsertedPrograms(
            tuple(
                describe_program(inserted, counts, pending, extended=given.extended)
                for inserted, (counts, pending) in zip(chosen, settled, strict=True)
            )
        )

    def _getvars(self, given: GetvarsArguments) -> ManagedVariables:
        first, last = given.index or (0, GLOBALS_MAX - 1)
        last = min(last, GLOBALS_MAX - 1)
        chosen = self._chosen(given.name, everything=given.name is None) if given.local else []
        own = [describe_variables(inserted, first, last) for inserted in chosen]
        result = ManagedVariables(
            first,
            self._describe_globals(first, last) if given.wants_globals else None,
            tuple(each for each in own if each.local or any(each.cpu) or each.tables) if given.local else None,
        )
        if given.reset and given.wants_globals:
            for index in range(first, last + 1):
                self._cells[index] = 0
        if given.reset:
            for inserted in chosen:
                inserted.attachment.change([VariableReset(first, last)])
        self._clear_tables(given.clear, chosen)
        return result

    @staticmethod
    def _clear_tables(patterns: Sequence[str], chosen: Sequence[InsertedProgram]) -> None:
        """
        Clear the keyed tables of programs whose names match a pattern.

        Raise ``ManagerError`` before any table is cleared if a pattern matches no name.
        """
        for pattern in patterns:
            matches = compile_glob(pattern).match
            if not any(matches(table.name) for inserted in chosen for table in inserted.program.tables):
                names = dict.fromkeys(table.name for inserted in chosen for table in inserted.program.tables)
                hint = f"there are: {', '.join(names)}" if names else "none of the selected programs has one"
                raise ManagerError(f"no keyed table is called '{pattern}'", hint=hint)
        for inserted in chosen:
            for pattern in patterns:
                matches = compile_glob(pattern).match
                tables = inserted.program.tables
                cleared = [TableChange(number) for number, table in enumerate(tables) if matches(table.name)]
                inserted.attachment.change(cleared)

    def _describe_globals(self, first: int, last: int) -> GlobalValues:
        """Return the global variables that programs declare, or that are nonzero."""
        count = max((inserted.program.gvars for inserted in self._all()), default=0)
        values = self._cells.view().tolist()
        # The values of removed programs are shown as well.
        count = max(count, next((n for n in range(len(values), count, -1) if values[n - 1]), 0))
        return GlobalValues(count, tuple(values[first : min(last + 1, count)]))

    def _add_target(self, given: AddTargetArguments) -> dict[str, Any]:
        check_format(given.format)
        if given.name is not None:
            self._chosen(given.name, everything=False)
        self._recording.add_target(given.target, given.name, given.format)
        return _answer_targets(self._recording.targets())

    def _stop(self, given: StopArguments) -> Stopped:
        # This is for emergencies, and does not wait for a verb in progress.
        chosen = self._all()
        for inserted in chosen:
            inserted.stop()
        with self._changing:
            unfinished = self._take_away(self._all())
            names = list(self._programs)
            self._programs.clear()
            self._recording.forget_targets_of(*names, limit=_STOPPING_LIMIT)
        if given.manager:
            self.end()
        return Stopped(len(chosen), tuple(inserted.name for inserted in unfinished))

    # Programs

    def _all(self) -> list[InsertedProgram]:
        return [inserted for parts in list(self._programs.values()) for inserted in parts]

    def _chosen(self, name: str | None, *, everything: bool) -> list[InsertedProgram]:
        if name is None:
            if not everything:
                raise ManagerError("no program is selected: expected a name, or all")
            return self._all()
        if (chosen := self._programs.get(name)) is None:
            from dprobes.diagnostics import did_you_mean

            known = list(self._programs)
            hint = did_you_mean(name, known) or f"inserted are: {', '.join(known) or 'none'}"
            raise ManagerError(f"no program '{name}' is inserted", hint=hint)
        return list(chosen)

    def _take_away(self, chosen: list[InsertedProgram]) -> list[InsertedProgram]:
        """End programs concurrently. Return those whose probepoints could not be removed in time."""
        for inserted in chosen:
            inserted.stop()
        return [inserted for inserted in chosen if not inserted.wait()]


def _answer_targets(statuses: Iterable[TargetStatus]) -> dict[str, Any]:
    return {"targets": [encode(status) for status in statuses]}
