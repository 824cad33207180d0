"""
Attachment of a program with patches (``patch =``) to a process.

The process is stopped for each insertion and removal, and not traced in between: a patch has no hits. So the program
has no probes besides its patches, and other programs may trace the process while the patches are in place, but not at
the moment of an insertion or removal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.engine_interface import (
    Attachment,
    Begun,
    Counts,
    Finished,
    Notice,
    Pause,
    StateEvent,
    make_changes,
)
from dprobes.engines.ptrace.patching.live_patches import (
    description_of,
    inlined_text,
    insert_patch,
    plan_patch,
    remove_patch,
    restored_text,
)
from dprobes.errors import DprobesError, EngineError, reason_of
from dprobes.platform.linux.procfs import first_stack_of
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.program_needs import patched_definitions
from dprobes.rpn.rpn_program import Offset, split_patch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Change, Event, Job, ValueChange
    from dprobes.engines.ptrace.patching.live_patches import Inserted, PlannedPatch
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["PatchSession", "ProgramPatch", "plan_patches"]

_LOOK = 1.0
"""Seconds between two checks whether the process executes another program."""
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def _pause(seconds: float) -> None:
    """
    Sleep between two stops; raise ``KeyboardInterrupt`` at a signal of ``_ENDING``, all of which are blocked.

    The signal becomes pending again, so it has its usual effect as well once the patches are removed.
    """
    if (found := signal.sigtimedwait(_ENDING, seconds)) is not None:
        signal.raise_signal(found.si_signo)
        raise KeyboardInterrupt


class ProgramPatch(NamedTuple):
    """A planned patch of a program: the number of its probepoint, and the seconds to wait until it is idle or None."""

    probe: int
    planned: PlannedPatch
    idle: int | None
    persists: bool


def plan_patches(job: Job) -> tuple[ProgramPatch, ...]:
    """
    Return the patches of a program for the process in scope; empty for a program without patches.

    Raise ``DprobesError`` if the process cannot be patched.
    """
    if not patched_definitions(job.program):
        return ()
    pid = job.scope.pid
    if pid is None or job.scope.is_command:
        raise EngineError(
            "a patch needs a running process, whose libraries are loaded", hint="give the id of the process with -p"
        )
    if job.replaces is not None:
        raise EngineError("a program with patches cannot replace another program", hint="remove the other one first")
    if job.resolved is None:
        raise EngineError(f"there is no module '{job.program.name}' on this machine to be patched")
    found = []
    for number, probe in enumerate(job.resolved.probepoints):
        definition, location = probe.definition, probe.definition.location
        parts = split_patch(definition.patch or "")
        assert parts is not None, "the program has been checked"
        assert isinstance(location, Offset), "the program has been checked"
        function = f"{job.resolved.module.path}:{location.expression.symbol}"
        planned = plan_patch(pid, Path(parts[0]), parts[1], function, None, replaces=definition.is_replacing)
        found.append(ProgramPatch(number, planned, definition.idle, definition.persists))
    return tuple(found)


class PatchSession(Attachment):
    """Patches of one program in a process, from ``begin`` until it is closed."""

    def __init__(self, job: Job, patches: Sequence[ProgramPatch]) -> None:
        assert job.resolved is not None
        assert job.scope.pid is not None
        self._job = job
        self._pid = job.scope.pid
        self._patches = patches
        self._probes = job.resolved.probepoints
        self._inserted: dict[int, Inserted] = {}
        """By the number of the probepoint; a patch leaves it at its removal, or when the process has ended."""
        self._events: list[Event] = []
        self._changing = threading.Lock()
        self._is_stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stack = first_stack_of(self._pid)
        try:
            self._process = os.pidfd_open(self._pid)
        except OSError as error:
            os.close(self._wake)
            raise EngineError(f"{self._pid} is not the id of a process: {reason_of(error)}") from error
        self._is_open = True

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The patched functions."""
        return self._probes

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """Nothing: a patch has no pattern."""
        return ()

    def begin(self) -> None:
        """Insert all patches; after an error, remove those that were inserted."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            for each in self._patches:
                inserted = insert_patch(each.planned, idle=each.idle, pause=_pause)
                self._inserted[each.probe] = inserted
                self._events.append(Notice(description_of(each.planned, inserted), is_warning=False))
                messages = (inlined_text(each.planned), each.planned.doubt)
                self._events += [Notice(text) for text in messages if text is not None]
        except BaseException as error:
            self._events.clear()
            self._remove(tuple(self._inserted))
            self._release()
            if not self._inserted:
                raise
            # Nobody reads the events of an attachment that has failed.
            stays = [event for event in self._events if isinstance(event, Notice) and event.is_warning]
            reasons = [error.message] if isinstance(error, DprobesError) else ["the run was ended"]
            hints = [error.hint] if isinstance(error, DprobesError) else []
            hints += [event.hint for event in stays]
            raise EngineError(
                "; ".join([*reasons, *(event.message for event in stays)]),
                hint="; ".join(hint for hint in hints if hint is not None) or None,
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> Iterator[Event]:
        """Iterate over the events until the run is stopped, or the process ends or executes another program."""
        active = tuple(sorted(self._inserted))
        yield StateEvent(active, self._pid, ProbeState.ACTIVE)
        yield from self._taken()
        yield Begun()
        while not self._is_stopping and not self._await():
            yield from self._taken()
            yield Pause()
        if self._is_stopping:
            kept = {each.probe for each in self._patches if each.persists}
            for each in sorted(kept & self._inserted.keys()):
                record = self._inserted[each].record
                message = f"the patch of '{record.function}' stays in process {self._pid}"
                hint = f"remove it: dprobes patch --remove {record.function} -p {self._pid} --allow-write"
                self._events.append(Notice(message, hint, is_warning=False))
            self._remove([number for number in sorted(self._inserted, reverse=True) if number not in kept])
            self._inserted.clear()
        yield from self._taken()
        yield Finished(self.counts())

    def _await(self) -> bool:
        """Wait for a second, or until something has happened; return whether the process has left the program."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(_LOOK * 1000)}
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        stack = first_stack_of(self._pid)
        # Without a stack, the process may not be inspected any more; its patches stay, which their removal reports.
        is_other = stack is not None and stack != self._stack
        if self._process in ready or is_other:
            self._inserted.clear()
            return True
        return False

    def _taken(self) -> list[Event]:
        """Return the events that have been queued, and forget them."""
        events, self._events = self._events, []
        return events

    def _remove(self, probes: Sequence[int]) -> None:
        """Remove patches, and queue the events about that; a patch that cannot be removed is reported and stays."""
        removed = []
        with self._changing:
            for number in probes:
                if (inserted := self._inserted.get(number)) is None:
                    continue
                record = inserted.record
                try:
                    if remove_patch(self._pid, record):
                        self._events.append(Notice(restored_text(self._pid, record), is_warning=False))
                    else:
                        message = f"'{record.function}' in process {self._pid} no longer has the jump of the patch"
                        self._events.append(Notice(message))
                    removed.append(number)
                    del self._inserted[number]
                except EngineError as error:
                    message = f"the patch of '{record.function}' stays in process {self._pid}: {error.message}"
                    hint = f"remove it later: dprobes patch --remove {record.function} -p {self._pid} --allow-write"
                    self._events.append(Notice(message, hint))
        if removed:
            self._events.append(StateEvent(tuple(removed), self._pid, ProbeState.REMOVED))

    def remove(self, probes: Sequence[int]) -> None:
        """Remove patches, given by the numbers of their probepoints, those with ``persist = yes`` included."""
        self._remove(probes)
        self.wake()

    def stop(self) -> None:
        """Request the end of the run; a signal handler may call this."""
        self._is_stopping = True
        self.wake()

    def wake(self) -> None:
        """Let ``poll`` continue without waiting."""
        if self._is_open:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Remove the patches that are left, except persistent ones, and close the descriptors."""
        kept = {each.probe for each in self._patches if each.persists}
        self._remove([number for number in sorted(self._inserted, reverse=True) if number not in kept])
        self._release()

    def _release(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._process)
            os.close(self._wake)

    def counts(self) -> tuple[Counts, ...]:
        """Return zeros: a patch has no hits."""
        return tuple(Counts() for _ in self._probes)

    def local_variables(self) -> list[int]:
        """Return zeros: no handler changes them."""
        return [0] * self._job.program.vars

    def cpu_variables(self) -> list[list[int]]:
        """Return no values: no handler has run on any CPU."""
        return []

    def tables(self) -> tuple[TableContents, ...]:
        """Return the program's tables, which are empty."""
        from dprobes.keyed.table_entries import stores_of

        return tuple(store.contents() for store in stores_of(self._job.program.tables))

    def change(self, changes: Sequence[Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[ValueChange]) -> None:
        """Do nothing: no handler reads variables or tables."""

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Do nothing: all variables are zero."""
