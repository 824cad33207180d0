"""ptrace engine and its sessions. A session starts a tracer, or joins one that already traces the process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.engines.command_launcher import LOOK, Debuggers
from dprobes.engines.engine_interface import (
    Counts,
    Engine,
    EngineOptions,
    Event,
    Finished,
    Notice,
    Pause,
    Plan,
    RecordBatch,
    make_changes,
)
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.overload_guard import UNLIMITED, budget_of
from dprobes.engines.ptrace.client.program_run import ProgramRun
from dprobes.engines.ptrace.client.site_answers import Answers
from dprobes.engines.ptrace.client.tracer_conversation import Conversation, NotFollowedError
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.engines.ptrace.tracer_messages import ChangeRequest, Done, Ended, Remove, Start
from dprobes.errors import EngineError, InternalError
from dprobes.platform.linux.procfs import living_thread, process_field
from dprobes.rpn.program_needs import counters_read, patched_definitions
from dprobes.rpn.rpn_program import calls_extensions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Change, Job, Scope, ValueChange
    from dprobes.engines.overload_guard import OverloadNotices
    from dprobes.engines.ptrace.client.program_run import NativeSide
    from dprobes.engines.ptrace.patching.patch_session import PatchSession, ProgramPatch
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.extensions.extension_registry import Registration
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.rpn_program import Program

__all__ = ["PtraceEngine", "PtraceSession", "engine_for"]

_PATIENCE = 10.0
"""Maximum number of seconds to wait until the tracer has changed variables and tables."""

_LOOK_AT_CHANGES = 0.0005


@dataclass(frozen=True, slots=True)
class _PatchPlan(Plan):
    """Plan of a program with patches."""

    patches: tuple[ProgramPatch, ...] = ()


class PtraceEngine(Engine):
    """The engine that probes a process tree through ptrace(2)."""

    name = "ptrace"

    def __init__(self, options: EngineOptions | None = None) -> None:
        self._options = EngineOptions() if options is None else options

    def check(self, scope: Scope, options: EngineOptions) -> None:
        """Raise ``EngineError`` if another tracer traces the process in scope."""
        if scope.pid is not None and not options.traces_already:
            from dprobes.engines.refusals import check_traceable

            check_traceable(scope.pid, options.tracers)

    def plan(self, job: Job) -> Plan:
        """Return the plan; raise ``EngineError`` if the program reads a counter that this machine does not have."""
        if counters_read(job.program):
            from dprobes.engines.counter_events import check_counters

            check_counters(job.program)
        if patched_definitions(job.program):
            from dprobes.engines.ptrace.patching.patch_session import plan_patches

            return _PatchPlan(self, job, patches=plan_patches(job))
        return Plan(self, job)

    def attach(self, plan: Plan) -> PtraceSession | PatchSession:
        """Start the tracer and the command, or attach to the process; insert patches without a tracer."""
        if isinstance(plan, _PatchPlan):
            from dprobes.engines.ptrace.patching.patch_session import PatchSession

            patching = PatchSession(plan.job, plan.patches)
            patching.begin()
            return patching
        session = self.session(plan.job)
        session.begin()
        return session

    def session(self, job: Job) -> PtraceSession:
        """Return a session for a job; nothing is started or attached before its ``begin``."""
        overhead = UNLIMITED if self._options.overhead is None else self._options.overhead
        return PtraceSession(job, self._options, budget_of(overhead, job.scope, job.program))


def engine_for(options: EngineOptions, scope: Scope) -> PtraceEngine:  # noqa: ARG001 - the registry's signature
    """Return the engine for a user's options."""
    return PtraceEngine(options)


class PtraceSession:
    """Attachment of one probe program to a process tree."""

    def __init__(self, job: Job, options: EngineOptions, budget: float | None) -> None:
        self._job = job
        self._budget = budget
        self._core_directory = options.core_directory
        self.globals: GlobalVariables | None = job.globals
        """Global variables that are shared with other sessions."""
        answers = Answers(job.program, allow_write=options.allow_write, symbols=options.symbols, resolved=job.resolved)
        self._run = ProgramRun(
            answers,
            SharedCounters.new(job.program.vars, job.program.cvars, job.program.tables),
            # The debugger does not read the command's input, unless that is a terminal, which both can share.
            Debuggers(options.debugger, keep_input=not job.scope.is_command or os.isatty(0)),
            _notices(budget, job.program, answers),
            job.images,
        )
        self._conversation: Conversation | None = None
        self._changing = threading.Lock()
        self._changes = 0
        self._principal = job.principal if isinstance(job.principal, PtraceSession) else None
        if self._principal is not None:
            self._run.counters.borrow(self._principal._run.counters)  # noqa: SLF001 - another of these

    def use_native(self, native: NativeSide) -> None:
        """Run handlers in the probed processes where possible; call this before the session begins."""
        self._run.native = native
        if native.state is not None and self._principal is None:
            self._run.counters.use_native(native.state.variables, native.state.tables)

    @property
    def native(self) -> NativeSide | None:
        """Handlers that run in the probed processes; None if there are none."""
        return self._run.native

    @property
    def probes(self) -> Sequence[Probepoint]:
        """Probepoints found so far; events contain their indices."""
        return self._run.answers.probes

    @property
    def is_debugging(self) -> bool:
        """True while a debugger runs for a process that was handed to it."""
        return self._run.debuggers.is_running

    @property
    def tracer(self) -> int | None:
        """Process id of the tracer, which other sessions may use, too, or None if there is none now."""
        return None if self._conversation is None or self._run.is_over else self._conversation.tracer

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """Matches of a pattern that have no probepoint."""
        return self._run.answers.left_out

    @property
    def mapped_files(self) -> dict[str, str]:
        """Files that processes mapped as code: paths by name."""
        return self._run.answers.mapped_files

    def begin(self) -> None:
        """Insert the program, with a new tracer or an existing one."""
        try:
            self._insert()
        except BaseException:
            self._give_up()
            raise

    def _insert(self) -> None:
        if self._job.replaces is not None:
            self._replace(self._job.replaces)
            return
        if self.globals is not None:
            self.globals.check(self._job.program.gvars)
        if not self._join():
            if self._principal is not None:
                raise EngineError("the process ended before all was inserted")
            self._begin()

    def _begin(self) -> None:
        """Start a tracer and attach it to the process or command."""
        if self._job.scope.pid is not None:
            from dprobes.engines.ptrace.client.left_removal import left_notice, remove_left

            if (left := remove_left(self._job.scope.pid)) is not None:
                self._run.items.append(left_notice(left))
        conversation = Conversation(self._run, self._start_message(), self._job.program.name, self.globals)
        try:
            conversation.attach(self._job.scope)
        except BaseException:
            conversation.close()
            raise
        self._conversation = conversation

    def _join(self) -> bool:
        """Insert the program through another session's tracer; return False if no session traces the process."""
        conversation = self._present_conversation(self._job.scope.pid)
        if conversation is None:
            return False
        if self.globals is not None and self.globals is not conversation.globals:
            raise EngineError("a program shares its global variables with those that are inserted with it")
        assert self._job.scope.pid is not None
        try:
            conversation.insert(self._run, self._start_message(), self._job.scope.pid)
        except NotFollowedError:
            conversation.await_end()  # until then the tracer may still trace the process
            return False
        self._conversation = conversation
        return True

    def conversation_about(self, pid: int, tracer: int) -> Conversation | None:
        """
        Return the session's conversation if it is with the ``tracer`` of the process ``pid``, or None.

        ``tracer`` is 0 if the process is not traced yet.
        """
        conversation = self._conversation
        if conversation is None or self._run.is_over:
            return None
        is_theirs = conversation.tracer == tracer or (not tracer and self._job.scope.pid == pid)
        return conversation if is_theirs else None

    def _present_conversation(self, pid: int | None) -> Conversation | None:
        """
        Return the conversation with the tracer that already traces the process ``pid``, for another program.

        Return None if no session in ``beside`` has that tracer.
        """
        if pid is None:
            return None
        tracer = int(process_field(living_thread(pid), "TracerPid") or 0)
        for other in self._job.beside:
            if isinstance(other, PtraceSession) and (found := other.conversation_about(pid, tracer)) is not None:
                return found
        return None

    def close(self) -> None:
        """Remove the program, and wait until it is removed."""
        conversation = self._conversation
        try:
            if conversation is not None:
                self.stop()
                with contextlib.suppress(EngineError):
                    for _ in self.poll():
                        pass
        finally:
            if conversation is not None:
                conversation.leave(self._run)
            self._give_up()

    def _give_up(self) -> None:
        """Close the files and processes that are only needed for replies to the tracer."""
        if self._run.native is not None:
            self._run.native.close()
        self._run.answers.close()

    def stop(self) -> None:
        """
        Request the removal of the program, after which a tracer without programs detaches.

        For signal handlers, too.
        """
        conversation = self._conversation
        if conversation is not None and not self._run.is_over:
            self._run.is_stopping = self._run.answers.is_stopping = True
            conversation.outbox.end(self._run.number)

    def hurry(self) -> bool:
        """Return False: the client has no backlog of records to discard."""
        return False

    def end_command(self) -> int | None:
        """Send SIGTERM to the command, and return its wait status; None as for ``Attachment.end_command``."""
        return None if self._conversation is None else self._conversation.end_command()

    def poll(self) -> Iterator[Event]:
        """Iterate over events until ``Finished``; raise ``EngineError`` if the target cannot be attached to."""
        run, conversation = self._run, self._conversation
        assert conversation is not None
        while True:
            is_over = run.is_over
            for probe, state in run.take_native(conversation.heard):
                if not is_over:
                    conversation.outbox.send(Remove(run.number, (probe,), state))
            while run.items:
                item = run.next_item()
                if isinstance(item, (Done, Ended)):
                    run.take_native(None)
                    # Events of the debuggers may have been queued after it.
                    yield from (each for each in run.take_all() if isinstance(each, (Notice, RecordBatch)))
                    yield from self._on_end(conversation, item)
                elif isinstance(item, Exception):
                    run.release()
                    yield from (each for each in run.take_all() if isinstance(each, RecordBatch))
                    raise item
                elif isinstance(item, Finished) and run.native is not None:
                    run.take_native(None)
                    yield from (each for each in run.take_all() if isinstance(each, (Notice, RecordBatch)))
                    yield item if item.cut_short else item._replace(counts=run.counts())
                else:
                    yield item
            if is_over:
                return
            yield Pause()
            conversation.await_messages(run)

    # Methods that other threads may call during ``poll``

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far, in the order of ``probes``."""
        return self._run.counts()

    def wake(self) -> None:
        """Make ``poll`` read the tracer's messages without waiting."""
        self._run.wake()

    def remove(self, probes: Sequence[int]) -> None:
        """
        Remove probepoints, also from later processes; ``poll`` reports those that were in place as REMOVED.

        Hits before the removal may still emit their records.
        """
        count = len(self.probes)
        for probe in probes:
            if not 0 <= probe < count:
                there_are = f"they are 0 to {count - 1}" if count else "none was found yet"
                raise IndexError(f"there is no probepoint {probe}: {there_are}")
        if self._conversation is not None:
            self._conversation.outbox.send(Remove(self._run.number, tuple(probes)))

    def local_variables(self) -> list[int]:
        """Return the values of the program's local variables."""
        return self._run.counters.local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return the values of the program's per-CPU variables, a list for each CPU."""
        return self._run.counters.cpu_variables()

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and per-CPU variables ``first`` to ``last`` (inclusive) to zero, between two handlers."""
        self._run.counters.ask_for_reset(first, last)

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the program's keyed tables from shared memory, without a request to the tracer."""
        return self._run.counters.tables()

    def change(self, changes: Sequence[Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[ValueChange]) -> None:
        """
        Change local variables and tables between two handlers; return when the tracer has done so.

        Raise ``EngineError`` if the tracer does not reply in ``_PATIENCE`` seconds.
        """
        conversation, counters = self._conversation, self._run.counters
        with self._changing:
            if conversation is None or self._run.is_over:
                counters.take_over(changes)
                return
            self._changes += 1
            conversation.outbox.send(ChangeRequest(self._run.number, self._changes, tuple(changes)))
            until = time.monotonic() + _PATIENCE
            while counters.changes_made < self._changes:
                if self._run.is_over:
                    counters.take_over(changes)
                    return
                if time.monotonic() > until:
                    raise EngineError("the tracer does not answer")
                time.sleep(_LOOK_AT_CHANGES)

    # The conversation

    def _replace(self, former: object) -> None:
        """Replace the session ``former``, and take over its processes and global variables."""
        if not isinstance(former, PtraceSession):
            raise EngineError("a session of the ptrace engine can take the place only of another one of that engine")
        if self.globals is None:
            self.globals = former.globals
        if self.globals is not former.globals:
            raise EngineError("a program shares its global variables with the one whose place it takes")
        if self.globals is not None:
            self.globals.check(self._job.program.gvars)
        self._conversation = former.give_way(self._run, self._start_message())

    def give_way(self, run: ProgramRun, start: Start) -> Conversation:
        """
        Replace the program of this session by the program of ``run``, and return the conversation with the tracer.

        Raise ``EngineError`` or ``SourceError`` if that is not possible; then this session's program continues.
        """
        conversation = self._conversation
        if conversation is None:
            raise EngineError("the program that is to be replaced is not running")
        conversation.replace(self._run, run, start)
        return conversation

    def _start_message(self) -> Start:
        program = self._job.program
        definitions = tuple(
            ProbeLimits(d.passcount, d.maxhits, program.keeps_log_on_fault(d), d.has_many_places, d.access)
            for d in program.definitions
        )
        return Start(
            self._run.number,
            definitions,
            int(self._job.items),
            (program.vars, program.gvars, program.cvars, program.tvars),
            self._run.counters.descriptor,
            _called_extensions(program),
            self._core_directory,
            follow=self._job.scope.follow,
            budget=self._budget,
            globals=-1 if self.globals is None else self.globals.descriptor,
            everywhere=self._run.answers.everywhere(),
            tables=tuple(replace(table, span=None) for table in program.tables),
            wants_images=self._job.images is not None,
            principal=-1 if self._principal is None else self._principal._run.number,  # noqa: SLF001
            native=None if self._run.native is None else self._run.native.plan,
        )

    def _on_end(self, conversation: Conversation, end: Done | Ended) -> Iterator[Event]:
        status = None
        done = end if isinstance(end, Done) else Done(complete=end.complete)
        debuggers = self._run.debuggers
        if not done.complete and not done.problem and not self._run.is_stopping:
            yield Notice("the tracer received SIGTERM; the probepoints are removed")
        while not debuggers.is_idle:
            yield Pause()
            yield from debuggers.look()
            time.sleep(LOOK)
        if done.complete and self._job.scope.pid is None:
            status = conversation.wait_for_command()
        if self._run.native is not None:
            yield from self._run.native.notices()
        yield Finished(self.counts(), status)
        if done.problem:
            raise InternalError(f"the tracer failed; the probepoints are removed\n{done.problem.rstrip()}")


def _notices(budget: float | None, program: Program, answers: Answers) -> OverloadNotices | None:
    """Return the notices for hits that take too much of a CPU, or None without a limit."""
    if budget is None:
        return None
    from dprobes.engines.overload_guard import OverloadNotices

    return OverloadNotices(budget, program.major, answers.probes)


def _called_extensions(program: Program) -> tuple[Registration, ...]:
    if not calls_extensions(program):
        return ()
    from dprobes.extensions.extension_registry import called_extensions

    return called_extensions(program)
