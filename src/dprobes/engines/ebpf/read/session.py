"""
One run: attach, read the ring until the end, take probepoints away when they ask for it, count.

The ring is emptied into a spool as fast as possible, whatever becomes of the records then: where the kernel finds no
room a record is lost, and counted. While records come, it is looked at every few milliseconds; a handler wakes us only
if nothing came for a while, because waking up costs it ten times as much as the record.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from dprobes.bpf.layout import LIMIT
from dprobes.engines.debugger import LOOK, Debuggers
from dprobes.engines.ebpf.attach.filesearch import find_probes
from dprobes.engines.ebpf.attach.installation import Installation
from dprobes.engines.ebpf.attach.newfiles import Latecomers
from dprobes.engines.ebpf.attach.scope import ProcessTree, filter_of, is_initial_namespace
from dprobes.engines.ebpf.attach.signalprograms import watch_signals
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.ring import wait
from dprobes.engines.ebpf.read.control import Readings, Wishes
from dprobes.engines.ebpf.read.coredump import breakpoints_in
from dprobes.engines.ebpf.read.entries import SETTLING, Ended, Spool
from dprobes.engines.ebpf.read.inspection import Inspector
from dprobes.engines.ebpf.read.stoppedprocesses import CORE_DUMP, DEBUGGER, Leaving
from dprobes.engines.ebpf.read.switchover import Replacement, session_to_replace
from dprobes.engines.ebpf.read.threadprogress import progress
from dprobes.engines.interface import Begun, Finished, Notice, Pause, RecordBatch, RecordEvent, StateEvent
from dprobes.engines.launcher import Command
from dprobes.engines.linux.procfs import living_thread
from dprobes.engines.replacement import nothing_to_insert
from dprobes.errors import DprobesError, EngineError, TargetError
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dprobes.engines.ebpf.engine import EbpfEngine
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes
    from dprobes.engines.ebpf.read.entries import Happening
    from dprobes.engines.interface import Counts, Event, Job
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["EbpfSession"]

_PATIENCE = 1.0
"""Seconds after the end of all probepoints in which records may be written without a word."""

_STILL_WRITING = "nothing is probed any more; records of before are still being written"

_SPOOL_SIZE = 64 << 20
"""Bytes of records that are taken from the ring before anybody has looked at them."""

_PIECE = 1 << 20
"""About so many bytes are taken from the ring at once: looking at them takes some milliseconds, then there are more."""

_BUSY_TIME = 0.05
"""Seconds after the last record during which the ring is looked at again and again."""

_BUSY_SLEEP = 0.002
_IDLE_SLEEP = 1.0
_RENEWAL_SLEEP = 0.1

_TURN = 0.1
"""Seconds for which records are given out before something else is looked at."""

_LOOK_INTERVAL = 512
"""So many records are given out before the ring is looked at."""


class EbpfSession:
    """Hold one run; use it as a context manager and iterate over ``events``."""

    def __init__(self, engine: EbpfEngine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._program = job.program
        self._stack = contextlib.ExitStack()
        self._wishes = Wishes()
        self._installation: Installation | None = None
        self._readings: Readings | None = None
        self._given_up: Counter[int] = Counter()
        self._changing = threading.Lock()
        self._is_replaced = False
        self._tree: ProcessTree | None = None
        self._command: Command | None = None
        self._left_out: list[LeftOutProbe] = []
        self._notices: list[Event] = []
        self._debuggers = Debuggers(engine.debugger, keep_input=not job.scope.is_command or os.isatty(0))
        self._leaving = Leaving(self._debuggers, engine.core_directory, self._hidden)
        self._taking: Iterator[Happening | None] | None = None
        self._stopping = False
        self._finished = False
        self._hurried = False
        self._latecomers: Latecomers | None = None
        self._watches_faults = False
        self._stopped: set[int] = set()
        self._last_record = float("-inf")
        self._last_look = float("-inf")

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The probepoints; events give their indices."""
        return self._installed.probes

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger runs for a process that was handed over."""
        return self._debuggers.is_running

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""
        return self._left_out

    @property
    def mapped_files(self) -> Collection[str]:
        """Nothing: the kernel is not asked for files with other names than the module's."""
        return ()

    @property
    def _installed(self) -> Installation:
        assert self._installation is not None, "the session has not been entered"
        return self._installation

    # Start and end

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._wishes.open()
            stack.callback(self._wishes.close)
            stack.callback(self._engine.forget_plans)
            scope = self._job.scope
            replaced = session_to_replace(self._engine, self._job)
            found = find_probes(self._engine, self._job)
            self._notices += found.notices
            if found.files:
                self._latecomers = Latecomers(self._engine, self._job, found)
                stack.callback(self._latecomers.close)
            for file in found.files:
                stack.enter_context(Descriptors(file.descriptors))
                self._left_out += file.plan.left_out
            namespace = _pid_namespace(self._job) if self._engine.pid_namespace else None
            installed = Installation(self._engine, self._job, found, filter_of(scope), namespace)
            self._installation = installed
            self._inspector = Inspector(self._program, installed)
            stack.callback(installed.close)
            faulting = installed.faulting
            look = progress if is_initial_namespace() else None  # the ids of threads are not ours elsewhere
            self._spool = Spool(faulting, _SPOOL_SIZE, installed.bank_size, look, installed.giving_back)
            stack.callback(self._spool.close)
            types = self._engine.features.types
            stack.callback(types.close)
            if scope.command:
                self._command = Command(scope.command, output=scope.output)
                stack.callback(self._command.close)
            if scope.is_tree:
                waiting = scope.pid if scope.program is not None else self._command.pid if self._command else None
                self._tree = ProcessTree(installed.maps, types, follow=scope.follow, awaits_exec=waiting is not None)
                stack.callback(self._tree.close)
                if waiting is not None:
                    self._tree.await_exec(waiting)
                elif scope.pid is not None:
                    self._tree.plant(scope.pid)
            if faulting:
                self._watch_faults(stack, types)
            with Replacement.of(replaced, self._engine.features) as replacement:
                states = installed.attach()
                self._notices += states
                if replacement is not None:
                    if not installed.attached:
                        raise nothing_to_insert(
                            installed.probes, (f"{each.state.value}: {each.detail}" for each in states)
                        )
                    replacement.take_over(installed)
            self._notices += installed.attach_postponed()
            if installed.attached:
                self._notices.append(StateEvent(installed.attached, 0, ProbeState.ACTIVE))
            if Feature.UPROBE_MULTI not in self._engine.features and (count := installed.breakpoint_count):
                self._notices.append(_said_of_single(count))
            if self._command is not None:
                self._command.go()
            self._notices.append(Begun())
            self._readings = Readings(installed, self._counts_of)
            stack.callback(self._readings.close)
            self._stack = stack.pop_all()
        return self

    def _watch_faults(self, stack: contextlib.ExitStack, types: KernelTypes) -> None:
        self._watches_faults = True
        if Feature.TYPED_TRACEPOINT not in self._engine.features:
            self._notices.append(
                Notice(
                    "this kernel shows no type information (BTF): records are emitted also where the instruction faults"
                )
            )
            return
        try:
            installed = self._installed
            entries = installed.entries if installed.notes_tickets else None
            scoped = self._job.scope.is_tree
            link = watch_signals(installed.maps.descriptors, types, in_scope=scoped, entries=entries)
        except (OSError, TargetError):
            self._notices.append(
                Notice(
                    "this kernel does not let programs look at signals: "
                    "records are emitted also where the instruction faults"
                )
            )
            return
        stack.callback(os.close, link)

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for _ in self.events():
            pass
        self._stack.close()

    def stop(self) -> None:
        """Ask for the end; may be called by a signal handler."""
        self._stopping = True
        self._wishes.wake()

    def hurry(self) -> bool:
        """Give up the records that wait, once nothing is attached any more; return whether that makes a difference."""
        if not self._finished or self._hurried:
            return False
        self._hurried = True
        return True

    # What a session may do that replaces this one

    @property
    def is_replaceable(self) -> bool:
        """Whether another session may replace this one."""
        return self._installation is not None and self._installation.maps.is_replaceable

    @contextlib.contextmanager
    def held_still(self) -> Iterator[Installation | None]:
        """Change nothing in the kernel meanwhile; return what is there, or None if the session is at its end."""
        with self._changing:
            if self._is_replaced:
                raise EngineError(
                    "the program that is there has just been replaced by another one",
                    hint="look what is there now, and replace that",
                )
            installed = self._installed
            yield None if installed.attachments.is_closed else installed

    def end_replaced(self) -> None:
        """Come to the end, because another session has taken the place of this one."""
        self._is_replaced = True
        self.stop()

    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of the breakpoints in an open file."""
        return self._installed.breakpoints_in(descriptor)

    # What other threads may do

    @property
    def tracer(self) -> None:
        """Nobody traces a process for it."""
        return None

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far, in the order of ``probes``; records on their way to ``events`` included."""
        return self._readings.counts() if self._readings is not None else ()

    def wake(self) -> None:
        """Have ``events`` look at the ring at once."""
        self._wishes.wake()

    def remove(self, probes: Sequence[int]) -> None:
        """Take probepoints away; ``events`` reports those that were there as REMOVED."""
        for probe in probes:
            if not 0 <= probe < len(self.probes):
                raise IndexError(f"there is no probepoint {probe}: they are 0 to {len(self.probes) - 1}")
        self._wishes.remove(probes)

    def local_variables(self) -> list[int]:
        """Return the program's local variables."""
        return self._readings.local_variables() if self._readings is not None else []

    def cpu_variables(self) -> list[list[int]]:
        """Return its CPU variables, a list for each CPU up to the last one that is online."""
        return self._readings.cpu_variables() if self._readings is not None else []

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set its local and CPU variables with these indices to zero; what is added at that moment may be lost."""
        if self._readings is not None:
            self._readings.reset_variables(first, last)

    # Events

    def events(self) -> Iterator[Event]:
        """Iterate over what happens until ``Finished``."""
        while not self._finished:
            while self._notices:
                yield self._notices.pop(0)
            yield from self._turn()
            yield from self._take_unwanted()
            if self._is_over():
                yield from self._finish()
                return
            yield Pause()
            yield from self._look_after()
            self._wait()

    def _is_over(self) -> bool:
        if self._stopping:
            return True
        if self._tree is None or not self._leaving.is_idle:
            return False
        # A tree of which somebody else has taken a process away (ALIVE is too high) ends with its command at least.
        return self._tree.alive <= 0

    def _take(self) -> bool:
        """Move what the ring holds to the spool; return whether there was something."""
        maps, spool = self._installed.maps, self._spool
        ring = maps.ring
        for number in range(max(1, ring.size // _PIECE)):
            if spool.is_full:
                return True
            with ring.window(_PIECE) as window:
                data = bytes(window)
            ring.advance(len(data))
            is_all = len(data) < _PIECE
            spool.add(data, time.monotonic(), maps.signals, is_all=is_all)
            if is_all:
                return bool(number or data)
        return True

    def _turn(self) -> Iterator[Event]:
        """Give out what has come for a limited time, and take all that comes meanwhile."""
        if self._take():
            self._last_record = time.monotonic()
        until = time.monotonic() + _TURN
        count = 0
        if self._taking is None:
            self._taking = self._spool.take()
        for happening in self._taking:
            if happening is None:
                self._take()
            elif isinstance(happening, RecordEvent | RecordBatch):
                yield happening
                count += 1
                if isinstance(happening, RecordBatch) or not count % _LOOK_INTERVAL:
                    self._take()
                    if time.monotonic() > until or self._stopping:
                        return  # the rest comes in the next turn
            elif isinstance(happening, Ended):
                yield from self._ended(happening)
        self._taking = None

    def _wait(self) -> None:
        """Sleep until there may be something to do."""
        now = time.monotonic()
        if self._taking is not None:
            return
        if self._spool.is_holding:
            time.sleep(SETTLING)
        elif now - self._last_record < _BUSY_TIME:
            time.sleep(_BUSY_SLEEP)
        else:
            sleep = _IDLE_SLEEP
            if not self._installed.attachments.is_settled or self._expects_files:
                sleep = _RENEWAL_SLEEP
            elif not self._leaving.is_idle:
                sleep = LOOK
            maps = self._installed.maps
            if wait(maps.ring, maps.status, sleep, (self._wishes.descriptor,)):
                self._last_record = time.monotonic()

    def _look_after(self) -> Iterator[Event]:
        yield from self._leaving.look()
        # Who replaces this session holds it still meanwhile; it must not wait for whoever takes our events.
        if self._changing.acquire(blocking=False):
            try:
                events = [] if self._stopping else self._changes()
            finally:
                self._changing.release()
            yield from events
        now = time.monotonic()
        if now - self._last_look >= _IDLE_SLEEP:
            self._last_look = now
            yield from self._inspector.look(is_quiet=self._spool.is_empty and not self._installed.maps.ring.pending)

    def _changes(self) -> list[Event]:
        """Bring links in line with what was found and what was taken away; return what there is to say."""
        events = [*self._look_for_files(), *self._installed.happened()]
        self._installed.attachments.renew()
        return events

    @property
    def _expects_files(self) -> bool:
        """Whether a new tree may be about to execute other files of the module."""
        return self._latecomers is not None and self._latecomers.is_eager

    def _look_for_files(self) -> Iterator[Event]:
        """Insert the program into files that processes have come to execute."""
        if self._latecomers is None:
            return
        tree = self._tree
        for found in self._latecomers.found(lambda: tree.pids() if tree is not None else None):
            if isinstance(found, Notice):
                yield found
                continue
            file = found.file
            if not self._installed.has_room_for(file):
                yield from self._latecomers.lack_room(file)
                self._latecomers.discard(file)
                continue
            try:
                states = self._installed.add(file, found.conflicts)
            except DprobesError as error:
                yield Notice(f"{file.path} is not probed: {error.message}", error.hint)
                self._latecomers.discard(file)
                continue
            self._stack.enter_context(Descriptors(file.descriptors))
            self._latecomers.keep(file)
            faulting = self._installed.faulting
            if faulting and not self._watches_faults:
                self._watch_faults(self._stack, self._engine.features.types)
            self._spool.expect(faulting)
            self._left_out += file.plan.left_out
            yield Notice(f"{file.path} came when the run had begun: it is probed from now on", is_warning=False)
            yield from states

    # What happens to probepoints

    def _take_unwanted(self) -> Iterator[Event]:
        """Take away what others want to be taken away, and report what was there still."""
        attachments = self._installed.attachments
        gone = tuple(probe for probe in self._wishes.take_unwanted() if attachments.take_away(probe))
        if gone:
            yield StateEvent(gone, 0, ProbeState.REMOVED)

    def _ended(self, ended: Ended) -> Iterator[Event]:
        attachments = self._installed.attachments
        if self._installed.is_void(ended):
            return
        if not attachments.take_away(ended.probe):
            if ended.reason in (DEBUGGER, CORE_DUMP) and ended.pid not in self._stopped:
                # Another process has come here before the first one's wish was seen; it was stopped, too.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ended.pid, signal.SIGCONT)
            return
        yield _state_after(ended)
        if ended.reason in (DEBUGGER, CORE_DUMP):
            self._stopped.add(ended.pid)
            with self._changing:
                attachments.renew(at_once=True)
            if ended.reason == DEBUGGER and self._tree is not None:
                self._tree.release(ended.pid)
            yield from self._leaving.leave(ended)

    def _hidden(self, pid: int) -> dict[int, int]:
        """Return the original bytes of the breakpoints in a process, by address."""
        with contextlib.suppress(TargetError):
            return breakpoints_in(pid, self._installed.original_bytes())
        return {}

    # The end

    def _finish(self) -> Iterator[Event]:
        self._finished = True
        installed = self._installed
        # Links are gone when this returns, and with them the last handler: what is in the ring then is all.
        with self._changing:
            unheard = installed.expired()  # with no room in the ring for the entry, or still in it
            installed.attachments.close()
        yield from installed.happened()
        patience: float | None = time.monotonic() + _PATIENCE
        for happening in itertools.chain(self._taking or (), self._rest()):
            if patience is not None and time.monotonic() > patience:
                patience = None
                yield Notice(_STILL_WRITING, "Ctrl-C gives them up, and counts them as lost", is_warning=False)
            if isinstance(happening, RecordEvent | RecordBatch):
                if not self._hurried:
                    yield happening
                elif isinstance(happening, RecordBatch):
                    self._given_up.update(probe for probe, _ in happening.records)
                else:
                    self._given_up[happening.probe] += 1
            elif isinstance(happening, Ended):
                if not installed.is_void(happening) and installed.attachments.take_away(happening.probe):
                    yield _state_after(happening)
                if happening.reason in (DEBUGGER, CORE_DUMP):
                    yield from self._leaving.leave(happening)
        if gone := tuple(probe for probe in sorted(unheard) if installed.attachments.take_away(probe)):
            yield StateEvent(gone, 0, ProbeState.DISABLED)
        yield from self._leaving.abandon()
        while not self._debuggers.is_idle:
            yield Pause()
            yield from self._debuggers.look()
            time.sleep(LOOK)
        yield from self._inspector.finish()
        status = None
        if self._command is not None and (not self._stopping or self._command.has_ended):
            status = self._command.wait()
        yield Finished(self.counts(), status)

    def _counts_of(self, probe: int) -> Counts:
        faults, dropped = self._spool.faults, self._spool.dropped
        counts = self._installed.counts(probe, faults.get(probe, 0), dropped.get(probe, 0))
        return _without(counts, self._given_up[probe])

    def _rest(self) -> Iterator[Happening | None]:
        """Iterate over all that is in the ring and the spool."""
        while self._take() and self._installed.maps.ring.pending:
            yield from self._spool.take()
        while True:
            yield from self._spool.take()
            if not self._spool.is_holding:
                return
            time.sleep(SETTLING)
            self._take()


def _said_of_single(count: int) -> Notice:
    what = "the breakpoint has" if count == 1 else f"each of the {count} breakpoints has"
    return Notice(
        f"this kernel has no uprobe_multi links: {what} a perf event of its own, and takes 0.1 s to be taken away",
        is_warning=False,
    )


def _state_after(ended: Ended) -> StateEvent:
    """Return what to say of a probepoint that its handler, or maxhits, has ended."""
    state = ProbeState.DISABLED if ended.reason == LIMIT else ProbeState.REMOVED
    return StateEvent((ended.probe,), ended.pid, state)


def _without(count: Counts, given_up: int) -> Counts:
    """Return counts after records were given up."""
    return replace(count, records=count.records - given_up, lost=count.lost + given_up)


def _pid_namespace(job: Job) -> tuple[int, int]:
    """Return device and inode of the PID namespace whose numbers records carry: the process's, or else ours."""
    pid = job.scope.pid
    try:
        status = os.stat(f"/proc/{'self' if pid is None else living_thread(pid)}/ns/pid")
    except OSError as error:
        raise TargetError(f"process {pid} has ended") from error
    return status.st_dev, status.st_ino
