"""
Session of the eBPF engine: it attaches a program, emits its records, removes probepoints on request, and counts hits.

Records come from a ``RecordStream``; all other work is done between two turns of the stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import LIMIT, MapName
from dprobes.engines.command_launcher import LOOK, Debuggers
from dprobes.engines.ebpf.attach.code_mappers import notes_of_outsiders
from dprobes.engines.ebpf.attach.file_search import NewFiles, find_probes
from dprobes.engines.ebpf.attach.installation import Installation
from dprobes.engines.ebpf.attach.process_programs import FaultWatch
from dprobes.engines.ebpf.attach.run_scope import (
    ProcessTree,
    filter_of,
    is_initial_namespace,
    pid_namespace_of,
    processes_of,
)
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.ebpf.read.run_control import Readings, Requests
from dprobes.engines.ebpf.read.stopped_processes import CORE_DUMP, DEBUGGER, StoppedProcesses
from dprobes.engines.engine_interface import (
    Attachment,
    Begun,
    Finished,
    Notice,
    Pause,
    RecordBatch,
    StateEvent,
    make_changes,
)
from dprobes.errors import DprobesError, EngineError, TargetError
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.program_needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dprobes.engines.command_launcher import Command
    from dprobes.engines.ebpf.attach.file_spec import Findings
    from dprobes.engines.ebpf.attach.site_links import CpuArrivals
    from dprobes.engines.ebpf.ebpf_options import Settings
    from dprobes.engines.ebpf.inkernel.module_follower import ModuleFollower
    from dprobes.engines.ebpf.read.held_records import Ended
    from dprobes.engines.ebpf.read.session_switchover import Replacement
    from dprobes.engines.ebpf.read.user_stacks import UserStacks
    from dprobes.engines.engine_interface import Change, Counts, Event, Job, ValueChange
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["EbpfSession"]

_PATIENCE = 1.0
"""Seconds after the end of all probepoints, after which a notice reports that records are still being emitted."""

_STILL_WRITING = Notice(
    "probing has ended; earlier records are still being written",
    "Ctrl-C discards them, and counts them as lost",
    is_warning=False,
)
_STILL_FOLLOWING = Notice(
    "probing has ended; earlier call stacks are still being followed",
    "Ctrl-C discards them: records count as lost, and tables count without them",
    is_warning=False,
)

_RENEWAL_SLEEP = 0.1

_LEAVING_SLEEP = 0.005
"""Seconds between two checks whether ended processes still execute kernel code."""


class EbpfSession(Attachment):
    """Attachment of one probe program to the kernel."""

    def __init__(self, settings: Settings, job: Job) -> None:
        self._settings = settings
        self._features = settings.features
        self._job = job
        self._program = job.program
        self._requests = Requests()
        self._readings = Readings()
        self._stack = contextlib.ExitStack()
        self._installation: Installation | None = None
        self._given_up: Counter[int] = Counter()
        self._changing = threading.Lock()
        self._is_replaced = False
        self._tree: ProcessTree | None = None
        self._sees_the_kernel = False
        """True if kernel code at the end of a process may hit a probepoint."""
        self._command: Command | None = None
        self._cpus: CpuArrivals | None = None
        self._left_out: list[LeftOutProbe] = []
        self._notices: list[Event] = []
        self._debuggers = Debuggers(settings.debugger, keep_input=not job.scope.is_command or os.isatty(0))
        self._stopped_processes = StoppedProcesses(self._debuggers, settings.core_directory, self._hidden)
        self._stopping = False
        self._finished = False
        self._hurried = False
        self._new_files: NewFiles | None = None
        self._module: ModuleFollower | None = None
        self._stopped: set[int] = set()
        self._user_stacks: UserStacks | None = None
        self._last_look = float("-inf")
        self._look_at_images: Callable[[], None] = lambda: None

    @property
    def probes(self) -> Sequence[Probepoint]:
        """Probepoints; events contain their indices."""
        return self._installed.probes

    @property
    def is_debugging(self) -> bool:
        """True if a debugger runs for a process that was handed to it."""
        return self._debuggers.is_running

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """Functions that match a pattern and have no probepoint."""
        return self._left_out

    @property
    def _installed(self) -> Installation:
        assert self._installation is not None, "the session has not begun"
        return self._installation

    # Start and end

    def begin(self) -> None:
        """Attach the program, and start the command if there is one."""
        with self._stack as stack:
            self._requests.open()
            stack.callback(self._requests.close)
            stack.callback(self._settings.planner.forget)
            replacing = self._prepare_replacement()
            found = find_probes(self._settings.planner, self._job)
            self._take_findings(found, stack)
            installed = self._install(found, stack)
            self._begin_command(installed, stack)
            self._look_at_images = self._watch_images(stack)
            self._follow_threads(installed, stack)
            with replacing as replacement:
                self._attach(installed, replacement)
            self._begin_reading(installed, stack)
            self._notices += installed.attach_postponed()
            if found.kernel is not None and found.kernel.resolved.module.name:
                self._follow_module(found.kernel.resolved, stack)
            if installed.attached and (self._module is None or self._module.is_there):
                self._notices.append(StateEvent(installed.attached, 0, ProbeState.ACTIVE))
            notices = installed.warning_of_slow_end(), installed.kernel.note_of_misses()
            self._notices += [notice for notice in notices if notice is not None]
            if self._command is not None:
                self._command.go()
            self._notices.append(Begun())
            self._stack = stack.pop_all()

    def _prepare_replacement(self) -> AbstractContextManager[Replacement | None]:
        """Return a context manager that prevents changes of the session to be replaced. It yields None without one."""
        if self._job.replaces is None:
            return contextlib.nullcontext()
        from dprobes.engines.ebpf.read.session_switchover import Replacement, session_to_replace

        return Replacement.of(session_to_replace(self._features, self._job), self._features)

    def _take_findings(self, found: Findings, stack: contextlib.ExitStack) -> None:
        """Let ``stack`` close the found files, and start the search for newly mapped files of the module."""
        self._notices += found.notices
        if found.files:
            self._new_files = NewFiles(self._settings.planner, self._job, found)
            stack.callback(self._new_files.close)
        if found.kernel is not None:
            self._left_out += found.kernel.left_out
        for file in found.files:
            stack.enter_context(Descriptors(file.descriptors))
            self._left_out += file.plan.left_out
        self._sees_the_kernel = found.kernel is not None or bool(found.events)

    def _install(self, found: Findings, stack: contextlib.ExitStack) -> Installation:
        """Create the maps of the program, and compile its handlers for the found files. ``stack`` closes the result."""
        scope, principal = self._job.scope, self._job.principal
        namespace = pid_namespace_of(scope) if self._settings.pid_namespace else None
        common = principal._installed.maps if isinstance(principal, EbpfSession) else None  # noqa: SLF001
        stack.callback(self._stopped_processes.close)  # when no handler is left
        stack.callback(self._features.types.close)
        installed = Installation(self._settings, self._job, found, filter_of(scope), namespace, common)
        self._installation = installed
        stack.callback(installed.close)
        if installed.maps.stops is not None:
            self._stopped_processes.begin(installed.maps.stops.fd)
        return installed

    def _begin_command(self, installed: Installation, stack: contextlib.ExitStack) -> None:
        """Start the command, which waits for ``Command.go``, and follow the processes of a tree."""
        scope = self._job.scope
        if scope.command:
            from dprobes.engines.command_launcher import Command

            self._command = Command(scope.command, output=scope.output)
            stack.callback(self._command.close)
        if scope.is_tree:
            self._tree = ProcessTree(installed.maps, self._features.types, scope, self._command)
            stack.callback(self._tree.close)
            self._tree.plant()

    def _follow_threads(self, installed: Installation, stack: contextlib.ExitStack) -> None:
        """Start to follow threads, faults and CPUs, as far as the program needs them."""
        maps = installed.maps.descriptors
        if not {MapName.THREAD_VARIABLES, MapName.SPACES}.isdisjoint(maps):
            from dprobes.engines.ebpf.attach.process_programs import follow_threads

            stack.enter_context(follow_threads(maps, self._features.types))
        counters = installed.maps.counter_layout
        if counters is not None and counters.cells:
            from dprobes.engines.ebpf.attach.process_programs import follow_counters

            stack.enter_context(follow_counters(maps, self._features.types, counters))
        entries = installed.entries if installed.notes_tickets else None
        self._faults = FaultWatch(maps, entries, self._features, in_scope=self._job.scope.is_tree)
        stack.callback(self._faults.close)
        if installed.faulting and (notice := self._faults.begin()) is not None:
            self._notices.append(notice)
        if any(probe.kind.is_on_each_cpu for probe in installed.probes):
            from dprobes.engines.ebpf.attach.site_links import CpuArrivals

            self._cpus = CpuArrivals()
            stack.callback(self._cpus.close)

    def _attach(self, installed: Installation, replacement: Replacement | None) -> None:
        """Attach the handlers. If there is a ``replacement``, they take over from the replaced session's handlers."""
        scope = self._job.scope
        states = installed.attach()
        self._notices += [*states, *notes_of_outsiders(states, scope, processes_of(scope))]
        if scope.is_command and not installed.attached and states:
            _refuse_command(states)
        self._left_out += installed.kernel.left_out
        if replacement is not None:
            if not installed.attached:
                from dprobes.engines.refusals import nothing_to_insert

                raise nothing_to_insert(installed.probes, (f"{each.state.value}: {each.detail}" for each in states))
            replacement.take_over(installed)

    def _begin_reading(self, installed: Installation, stack: contextlib.ExitStack) -> None:
        """
        Create the stream of records from the ring buffer. ``stack`` closes it.

        Its modules are imported only now, after the handlers were attached.
        """
        from dprobes.engines.ebpf.read.held_records import HeldRecords, progress
        from dprobes.engines.ebpf.read.record_stream import RecordStream
        from dprobes.engines.ebpf.read.run_control import ProbeCounts
        from dprobes.engines.ebpf.read.table_watch import TableWatch

        look = progress if is_initial_namespace() else None  # thread ids belong to another namespace otherwise
        self._held = HeldRecords(installed.faulting, installed.giving_back, look)
        maps = installed.maps
        self._stream = RecordStream(maps.ring, maps.status, self._held, installed.bank_size, self._stacks(stack))
        stack.callback(self._stream.close)
        self._tables = TableWatch(self._program, installed)
        counts = ProbeCounts(installed, self._held.faults, self._held.dropped, self._given_up)
        self._readings = Readings(installed, counts.all)
        stack.callback(self._readings.close)

    def _follow_module(self, resolved: ResolvedKernel, stack: contextlib.ExitStack) -> None:
        """Start to follow the loading and unloading of a kernel module."""
        from dprobes.engines.ebpf.inkernel.module_follower import ModuleFollower

        self._module = ModuleFollower(self._program, resolved, self._installed)
        stack.callback(self._module.close)
        self._notices += self._module.begin()

    def _stacks(self, stack: contextlib.ExitStack) -> UserStacks | None:
        """Return the unwinder of user-space call stacks, or None if no handler logs them."""
        maps = self._installed.maps.tables
        stores = maps.stores if maps is not None else {}
        if not takes_user_stacks(self._program):
            return None
        from dprobes.engines.ebpf.read.user_stacks import UserStacks

        self._user_stacks = UserStacks(self._job.images, self._look_at_images, stores)
        return stack.enter_context(contextlib.closing(self._user_stacks))

    def _watch_images(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        """Start to report mappings to ``images`` of the job, if any. Return a function that reports new ones."""
        if self._job.images is None:
            return lambda: None
        from dprobes.engines.ebpf.read.image_watch import ImageWatch

        scope = self._job.scope
        pid = scope.pid if self._command is None else self._command.pid
        return stack.enter_context(contextlib.closing(ImageWatch(self._job.images, scope, pid))).look

    def close(self) -> None:
        """Remove the program from the kernel, and wait until that is done."""
        self.stop()
        for _ in self.poll():
            pass
        self._stack.close()

    def stop(self) -> None:
        """Request the end of the run; a signal handler may call this."""
        self._stopping = True
        self._requests.wake()

    def hurry(self) -> bool:
        """
        Discard the records that are still to be emitted.

        Return False, and discard none, before the end of the run.
        """
        if not self._finished or self._hurried:
            return False
        self._hurried = True
        if self._user_stacks is not None:
            self._user_stacks.give_up()
        return True

    def end_command(self) -> int | None:
        """Send SIGTERM to the command and return its wait status. None is as for ``Attachment.end_command``."""
        return None if self._command is None else self._command.end()

    # Data that clients may read and change

    def wake(self) -> None:
        """Make ``poll`` check the ring without waiting."""
        self._requests.wake()

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far, in the order of ``probes``. Records count before ``poll`` emits them."""
        return self._readings.counts()

    def local_variables(self) -> list[int]:
        """Return the program's local variables."""
        return self._readings.local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables, one list for each CPU up to the highest one that is online."""
        return self._readings.cpu_variables()

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables. Report new mappings of processes first, for addresses in keys."""
        contents = self._readings.tables()
        self._look_at_images()
        return contents

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """
        Set the local and CPU variables ``first`` to ``last``, inclusive, to zero.

        Concurrent increments may be lost.
        """
        self._readings.reset_variables(first, last)

    def change(self, changes: Sequence[Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[ValueChange]) -> None:
        """Change local variables and tables; concurrent changes by handlers may be lost."""
        self._readings.change(changes)

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints by index. ``poll`` reports those that had not ended as REMOVED."""
        for probe in probes:
            if not 0 <= probe < len(self.probes):
                raise IndexError(f"there is no probepoint {probe}: they are 0 to {len(self.probes) - 1}")
        self._requests.remove(probes)

    # Interface for the session that replaces this one

    @property
    def is_replaceable(self) -> bool:
        """True if another session may replace this one."""
        return self._installation is not None and self._installation.maps.is_replaceable

    @contextlib.contextmanager
    def held_still(self) -> Iterator[Installation | None]:
        """
        Return a context manager that prevents changes in the kernel. It yields the installation, or None after the end.

        Raise ``EngineError`` if another session has already replaced this one.
        """
        with self._changing:
            if self._is_replaced:
                raise EngineError(
                    "the inserted program has just been replaced by another one",
                    hint="query the inserted programs, and replace the present one",
                )
            installed = self._installed
            yield None if installed.attachments.is_closed else installed

    def end_replaced(self) -> None:
        """End the session, because another session has replaced it."""
        self._is_replaced = True
        self.stop()

    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of this session's uprobes in the file that is open as ``descriptor``."""
        return self._installed.breakpoints_in(descriptor)

    # Events

    def poll(self) -> Iterator[Event]:
        """Iterate over events until ``Finished``."""
        while not self._finished:
            while self._notices:
                yield self._notices.pop(0)
            yield from self._turn()
            yield from self._take_removals()
            if self._is_over():
                yield from self._finish()
                return
            yield Pause()
            yield from self._look_after()
            self._wait()

    def _is_over(self) -> bool:
        if self._stopping:
            return True
        if self._tree is None or not self._stopped_processes.is_idle:
            return False
        # If another program has removed a process from the tree (ALIVE is too high), it ends with its command at least.
        return self._tree.alive <= 0 and (not self._sees_the_kernel or self._tree.has_left)

    def _turn(self) -> Iterator[Event]:
        """Iterate over the events of arrived records and ends of probepoints, for a limited time."""
        for each in self._stream.turn(lambda: self._stopping):
            self._look_at_images()
            if isinstance(each, RecordBatch):
                yield each
            else:
                yield from self._end(each)

    def _wait(self) -> None:
        """Sleep until a record, a request or another event may have arrived."""
        if self._stream.pause():
            return
        sleep = self._tables.interval
        if not self._installed.attachments.is_settled or self._expects_files:
            sleep = _RENEWAL_SLEEP
        elif not self._stopped_processes.is_idle:
            sleep = LOOK
        if self._tree is not None and self._tree.alive <= 0:
            sleep = _LEAVING_SLEEP
        descriptors = [self._requests.descriptor]
        if self._module is not None and self._module.descriptor >= 0:
            descriptors.append(self._module.descriptor)
        if self._cpus is not None:
            descriptors += self._cpus.descriptors
        self._stream.wait(sleep, descriptors)

    def _look_after(self) -> Iterator[Event]:
        self._look_at_images()
        yield from self._stopped_processes.look(is_quiet=self._stream.is_quiet and not self._held)
        # A replacing session holds the lock meanwhile; it must not wait for the client that takes this session's
        # events.
        if self._changing.acquire(blocking=False):
            try:
                events = [] if self._stopping else self._changes()
            finally:
                self._changing.release()
            yield from events
        now = time.monotonic()
        if now - self._last_look >= self._tables.interval:
            self._last_look = now
            yield from self._tables.look(is_quiet=self._stream.is_quiet)

    def _changes(self) -> list[Event]:
        """Adapt the links to changes of files, kernel modules and CPUs; return the events about them."""
        attachments = self._installed.attachments
        events = [*self._look_for_files(), *self._installed.happened()]
        if self._module is not None:
            events += self._module.look()
        if self._cpus is not None:
            events += self._cpus.look(attachments)
        attachments.renew()
        return events

    @property
    def _expects_files(self) -> bool:
        """True if processes of a new tree are expected to execute further files of the module soon."""
        return self._new_files is not None and self._new_files.is_eager

    def _look_for_files(self) -> Iterator[Event]:
        """Attach handlers in newly mapped files; iterate over the events."""
        if self._new_files is None:
            return
        tree = self._tree
        for found in self._new_files.found(lambda: tree.pids() if tree is not None else None):
            if isinstance(found, Notice):
                yield found
                continue
            file = found.file
            if not self._installed.has_room_for(file):
                yield from self._new_files.lack_room(file)
                self._new_files.discard(file)
                continue
            try:
                states = self._installed.add(file, found.conflicts)
            except DprobesError as error:
                yield Notice(f"{file.path} is not probed: {error.message}", error.hint)
                self._new_files.discard(file)
                continue
            self._stack.enter_context(Descriptors(file.descriptors))
            self._new_files.keep(file)
            faulting = self._installed.faulting
            if faulting and (notice := self._faults.begin()) is not None:
                self._notices.append(notice)
            self._held.expect(faulting)
            self._left_out += file.plan.left_out
            yield Notice(f"{file.path} appeared after the run began: it is probed from now on", is_warning=False)
            yield from states

    # Ends of probepoints

    def _take_removals(self) -> Iterator[Event]:
        """Remove the probepoints that clients requested, and report those that had not ended."""
        attachments = self._installed.attachments
        gone = tuple(probe for probe in self._requests.take_removals() if attachments.take_away(probe))
        if gone:
            yield StateEvent(gone, 0, ProbeState.REMOVED)

    def _end(self, ended: Ended) -> Iterator[Event]:
        """Remove a probepoint that its handler or maxhits has ended, and deal with the stopped process."""
        attachments = self._installed.attachments
        if self._installed.is_void(ended.probe, ended.reason):
            return
        if not attachments.take_away(ended.probe):
            if ended.reason == CORE_DUMP or (ended.reason == DEBUGGER and ended.pid not in self._stopped):
                self._stopped_processes.dismiss(ended)
            return
        yield _state_after(ended)
        if ended.reason in (DEBUGGER, CORE_DUMP):
            self._stopped.add(ended.pid)
            with self._changing:
                attachments.renew(at_once=True)
            if ended.reason == DEBUGGER and self._tree is not None:
                self._tree.release(ended.pid)
            yield from self._stopped_processes.take(ended)

    def _hidden(self, pid: int) -> dict[int, int]:
        """Return the original bytes under the breakpoints in a process, by address. There are none if it has ended."""
        from dprobes.engines.ebpf.read.core_dumper import breakpoints_in

        with contextlib.suppress(TargetError):
            return breakpoints_in(pid, self._installed.original_bytes())
        return {}

    # The end

    def _finish(self) -> Iterator[Event]:
        self._finished = True
        installed = self._installed
        # Links are gone when this returns, and with them the last handler: the ring receives no more entries.
        with self._changing:
            unheard = installed.expired()  # their entries had no room in the ring, or are still in it
            installed.detach()
        self._look_at_images()  # tables may name addresses of processes that made no record
        yield from (*installed.happened(), *installed.kernel.notices())
        yield from self._rest()
        if gone := tuple(probe for probe in sorted(unheard) if installed.attachments.take_away(probe)):
            yield StateEvent(gone, 0, ProbeState.DISABLED)
        yield from self._stopped_processes.abandon()
        while not self._debuggers.is_idle:
            yield Pause()
            yield from self._debuggers.look()
            time.sleep(LOOK)
        yield from self._tables.finish()
        status = None
        if self._command is not None and (not self._stopping or self._command.has_ended):
            status = self._command.wait()
        yield Finished(self.counts(), status)

    def _rest(self) -> Iterator[Event]:
        """Iterate over the events that remain to be reported, after all links were removed."""
        installed = self._installed
        patience: float | None = time.monotonic() + _PATIENCE
        for each in self._stream.rest():
            self._look_at_images()
            if patience is not None and time.monotonic() > patience:
                patience = None
                yield _STILL_WRITING if self._user_stacks is None else _STILL_FOLLOWING
            if isinstance(each, RecordBatch):
                if self._hurried:
                    self._given_up.update(probe for probe, _ in each.records)
                else:
                    yield each
            elif each is not None:
                if not installed.is_void(each.probe, each.reason) and installed.attachments.take_away(each.probe):
                    yield _state_after(each)
                if each.reason in (DEBUGGER, CORE_DUMP):
                    yield from self._stopped_processes.take(each)


def _refuse_command(states: Sequence[Event]) -> None:
    """Raise ``EngineError`` if no probepoint could be inserted: the command would run unprobed."""
    found = [state for state in states if isinstance(state, StateEvent)]
    if found and all(state.state.is_obstacle for state in found):
        first = found[0]
        why = f"{first.state.value}{f' in process {first.pid}' if first.pid else ''}: {first.detail}"
        raise EngineError(
            f"no probepoint can be inserted, so the command was not started: {why}",
            # Debug registers are unavailable to every engine.
            hint=None
            if all(state.state is ProbeState.DEBUGREG_UNAVAIL for state in found)
            else "--engine ptrace inserts the probepoints in the command only",
        )


def _state_after(ended: Ended) -> StateEvent:
    """Return the state event for a probepoint that its handler or maxhits has ended."""
    state = ProbeState.DISABLED if ended.reason == LIMIT else ProbeState.REMOVED
    return StateEvent((ended.probe,), ended.pid, state)
