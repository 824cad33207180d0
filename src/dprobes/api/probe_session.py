"""Sessions: programs that are inserted into processes for the duration of a ``with`` block."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Self

from dprobes.api.compiled_program import CompiledProgram
from dprobes.api.inserted_program import InsertedProgram, RecordList, RecordQueue, total
from dprobes.api.program_builder import ProgramBuilder
from dprobes.diagnostics import Diagnostics
from dprobes.engines.command_launcher import LaunchedCommand
from dprobes.engines.ebpf.ebpf_options import RING_SIZE
from dprobes.engines.engine_interface import EngineOptions, Scope, ScopeKind
from dprobes.engines.engine_registry import AUTO, engine_that_probes, named_engine
from dprobes.engines.overload_guard import check_overhead
from dprobes.engines.shared_globals import GLOBALS_MAX, GlobalVariables
from dprobes.errors import EngineError
from dprobes.formatters.field_values import ProgramDataReader
from dprobes.record.log_record import ABOUT_RECORDS, Item, decode_record
from dprobes.rpn.rpn_program import joined_program
from dprobes.runs.run_steps import Face, ProgramInput, Request, look_around, record_source, run_program, tool_error
from dprobes.target.probed_module import FileSymbols

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment, Counts
    from dprobes.keyed.table_text import KeyedTable
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place
    from dprobes.rpn.rpn_program import Program
    from dprobes.runs.run_steps import RunPlan, Vantage

__all__ = ["ALL_ITEMS", "ProbeSession", "attach", "everywhere", "launch"]

ALL_ITEMS = sum(Item, Item(0)) & ~ABOUT_RECORDS
"""All header items that a record can carry."""


class ProbeSession:
    """
    Set of programs that are inserted into the processes of a scope, and the records of these programs.

    A session is created by ``attach``, ``launch`` and ``everywhere``, and is a context manager: at the end of the
    block, also after an exception, all probepoints are removed. Unread records can still be read. Several threads may
    use a session. Its programs share the global variables (``gv``).
    """

    def __init__(self, scope: Scope, options: EngineOptions, *, engine: str, items: Item, buffer: int) -> None:
        self._engine, argument = named_engine(engine)
        scope = scope if argument is None else replace(scope, endpoint=argument)
        look_around(Request(self._engine, scope, options))
        self._scope = scope
        is_launched = bool(scope.command) and scope.endpoint is None  # otherwise the engine starts it
        self._command = LaunchedCommand(scope.command, follow=scope.follow) if is_launched else None
        self._options = options
        self._items = items | Item.MAJOR | Item.MINOR
        self._queue = RecordQueue(buffer)
        self._programs: list[InsertedProgram] = []
        self._changing = threading.Lock()
        self._is_closed = False
        self._globals = GlobalVariables(GLOBALS_MAX)
        self._cells = self._globals.cells()
        self._last_globals: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all programs, and wait until they are removed. It may be called more than once."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
        self.stop()
        try:
            for program in self.programs:
                program.join()
        finally:
            if self._command is not None:
                self._command.close()
            self._last_globals = self._read_globals()
            self._cells.close()
            self._globals.close()

    def insert(
        self,
        program: CompiledProgram | ProgramBuilder | Program,
        *,
        groups: Iterable[str] = (),
        types: Iterable[str] = (),
        filter: str | None = None,  # noqa: A002
        engine: str | None = None,
        replaces: InsertedProgram | None = None,
    ) -> InsertedProgram:
        """
        Insert a program, and return when all processes in scope are probed, as far as possible.

        ``groups`` and ``types`` select definitions. Handlers are executed for the hits that match ``filter``, a
        condition of ``dprobes run --filter``. ``engine`` is for this program only; None is the engine of the session.
        ``replaces`` is a program of this session that the new one replaces: every hit is seen by exactly one of them. A
        launched command does not start yet (``go``).

        Raise ``SourceError`` if the program has errors, or does not fit the module. Raise ``TargetError`` if the
        process or command does not exist, and ``EngineError`` if no engine can insert the program. Earlier programs
        stay inserted in these cases. The failure of a single probepoint is reported only in
        ``InsertedProgram.probepoints``.
        """
        compiled = self._compiled(program).select(groups, types)
        with self._changing:
            if self._is_closed:
                raise EngineError("the session is closed: insert programs in its 'with' block")
            inserted: InsertedProgram | None = None
            try:
                inserted = self._attached(compiled, filter, engine, replaces)
                self._programs.append(inserted)
                inserted.begin()
            except BaseException:
                if inserted is not None:
                    inserted.stop()
                    self._programs.remove(inserted)
                self._drop_command()
                raise
            return inserted

    def _drop_command(self) -> None:
        """
        End the prepared process of a command that has no program and has not started.

        The next insertion prepares another process.
        """
        if self._command is not None and not self._command.has_begun and not self._programs:
            self._command.close()

    def go(self) -> None:
        """
        Start the launched command now, instead of at the first ``records`` or ``wait``.

        Do nothing if the command has started. Raise ``TargetError`` if it cannot be executed, ``EngineError`` if there
        is no command, or no program is inserted for it.
        """
        if self._command is None:
            raise EngineError("the session has no command that could begin")
        if not self._begin_command() and not self._command.has_begun:
            raise EngineError(f"no program is inserted: the command '{self._command.name}' does not begin")

    def _begin_command(self) -> bool:
        """Start the launched command if a program is inserted; return whether the command has started."""
        command = self._command
        if command is None:
            return False
        if not command.has_begun:
            with self._changing:
                if not self._is_closed and any(not each.is_stopping for each in self._programs):
                    command.go()
        return command.has_begun

    def records(self, timeout: float | None = None) -> Generator[LogRecord, None, None]:
        """
        Iterate over the records of all programs as they arrive, each once.

        The iteration ends when no program is inserted any more, or if no record arrived for ``timeout`` seconds. A
        later iteration continues. At the end, raise ``EngineError`` for a program that failed, or that has no inserted
        probepoint. The first iteration starts a launched command.
        """
        self._begin_command()
        while batch := self._queue.take(timeout):
            yield from self._decoded(batch)
        for program in self.programs:
            program.raise_problem()

    def collect(self, count: int | None = None, *, timeout: float | None = None) -> RecordList:
        """
        Read up to ``count`` records, or all until the end, and return them as one list.

        Reading ends as in ``records``, also after ``timeout`` seconds without a record.
        """
        with contextlib.closing(self.records(timeout)) as records:
            return RecordList(islice(records, count))

    def _decoded(self, batch: Sequence[tuple[bytes, Place]]) -> Generator[LogRecord, None, None]:
        """Iterate over decoded records; records that the caller has not read are put back into the queue."""
        read = 0
        try:
            for record, place in batch:
                read += 1
                yield decode_record(record, place)
        finally:
            self._queue.put_back(batch[read:])

    async def async_records(self) -> AsyncGenerator[LogRecord, None]:
        """
        Iterate over records as ``records`` does, in an asyncio event loop, without blocking the loop.

        If the task is cancelled, or the iterator closed (``contextlib.aclosing``), no record is lost: the next
        iteration yields the unread records.
        """
        import asyncio

        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        await asyncio.to_thread(self._begin_command)
        with self._queue.listener(tell):
            while True:
                await asyncio.sleep(0)  # lets other tasks run, and is a cancellation point however many records arrive
                changed.clear()
                batch = self._queue.take(0)
                if not batch:
                    if self._queue.is_over:
                        break
                    await changed.wait()
                    continue
                with contextlib.closing(self._decoded(batch)) as records:
                    for record in records:
                        yield record
        for program in self.programs:
            program.raise_problem()

    def wait(self, timeout: float | None = None) -> int | None:
        """
        Wait until all programs have ended by themselves.

        A program ends with the processes in scope, or when its handlers have removed all probepoints. A launched
        command is started if necessary. Return its exit status, which is negative for a signal, or None without a
        command or after ``timeout`` seconds. Raise ``EngineError`` for a program that failed, or that has no inserted
        probepoint.
        """
        import time

        until = None if timeout is None else time.monotonic() + timeout
        has_begun = self._begin_command()
        for program in self.programs:
            program.wait(None if until is None else max(0.0, until - time.monotonic()))
        for program in self.programs:
            program.raise_problem()
        if has_begun and self._command is not None and not any(each.is_stopping for each in self.programs):
            self._command.wait(until)  # a process leaves the scope a moment before its end
        return self.exit_status

    def stop(self) -> None:
        """Request the end of all programs without waiting; iterations over ``records`` end then."""
        for program in self.programs:
            program.stop()

    @property
    def programs(self) -> Sequence[InsertedProgram]:
        """The programs in the order of their insertion, including those that have ended."""
        return tuple(self._programs)

    @property
    def exit_status(self) -> int | None:
        """
        The exit status of a launched command, negative for a signal, or None before its end and without a command.

        With a stub it is the exit status of the program that the stub debugs.
        """
        if self._command is not None:
            return self._command.exit_status
        return next((each.exit_status for each in self.programs if each.exit_status is not None), None)

    @property
    def lost(self) -> int:
        """
        Number of records that were dropped because the buffer for unread records was full.

        Losses in engines are in ``counts``.
        """
        return self._queue.lost

    def counts(self) -> dict[tuple[int, int], Counts]:
        """Return the current counts, keyed by the major and minor codes of the definitions."""
        found: dict[tuple[int, int], list[Counts]] = {}
        for program in self.programs:
            for probe in program.probepoints:
                found.setdefault((probe.major, probe.minor), []).append(probe.counts)
        return {codes: total(counts) for codes, counts in found.items()}

    def tables(self) -> dict[str, KeyedTable]:
        """
        Return the current keyed tables of all programs by name.

        If several programs have a table of one name, return that of the last program.
        """
        found: dict[str, KeyedTable] = {}
        for program in self.programs:
            found |= program.tables()
        return found

    def global_variables(self) -> list[int]:
        """Return the values of the global variables (``gv``) that the programs declare, unsigned numbers of 64 bits."""
        with self._changing:
            return list(self._last_globals) if self._is_closed else self._read_globals()

    def set_global_variable(self, index: int, value: int) -> None:
        """
        Set a global variable to a number modulo 2**64.

        Raise ``IndexError`` if no session has a variable with this index, and ``EngineError`` if the session is closed.
        """
        with self._changing:
            if self._is_closed:
                raise EngineError("the session is closed: its variables are gone")
            self._cells[index] = value & (1 << 64) - 1

    def _read_globals(self) -> list[int]:
        count = max((each.program.gvars for each in self.programs), default=0)
        return [self._cells[index] for index in range(count)]

    def _compiled(self, program: CompiledProgram | ProgramBuilder | Program) -> CompiledProgram:
        if isinstance(program, CompiledProgram):
            return program
        built = program.build() if isinstance(program, ProgramBuilder) else program
        return CompiledProgram(built, FileSymbols(), Diagnostics())

    def _attached(
        self,
        compiled: CompiledProgram,
        condition: str | None,
        engine: str | None,
        replaces: InsertedProgram | None,
    ) -> InsertedProgram:
        beside = tuple(each.attachment for each in self._programs if not each.has_ended)
        scope = self._scope if self._command is None else self._command.scope()
        name = self._engine if replaces is None else AUTO
        if engine is not None:
            name, argument = named_engine(engine)
            scope = scope if argument is None else replace(scope, endpoint=argument)
        request = Request(name, scope, self._options, replaces=replaces, beside=beside, globals=self._globals)
        filters = () if condition is None else (condition,)
        return run_program(request, _SessionFace(compiled, filters, self._items, self._queue, self._command))


class _SessionFace(Face[InsertedProgram]):
    """The steps of a run that insert a program into a session, whose queue receives the records."""

    def __init__(
        self,
        compiled: CompiledProgram,
        filters: tuple[str, ...],
        items: Item,
        queue: RecordQueue,
        command: LaunchedCommand | None,
    ) -> None:
        self._compiled = compiled
        self._filters = filters
        self._items = items
        self._queue = queue
        self._command = command
        self._diagnostics = Diagnostics()

    def load(self, vantage: Vantage) -> ProgramInput:  # noqa: ARG002 - it was compiled without
        """Return the program to insert, its module's symbols, and its description for readers of its records."""
        compiled = self._compiled
        if compiled.tool is not None:
            raise tool_error(compiled.tool)
        program = joined_program(compiled.programs)
        is_anywhere = any(not each.is_in_code for each in program.definitions)
        return ProgramInput(
            compiled.programs,
            compiled.all_symbols,
            self._diagnostics,
            record_source(program, compiled.templates, names_addresses=is_anywhere),
            self._items,
            self._filters,
            compiled.allow_write,
            compiled.is_joined,
        )

    def follow(self, planned: RunPlan, attachment: Attachment) -> InsertedProgram:
        """Return the inserted program; its method ``begin`` starts the thread that follows it."""
        return InsertedProgram(
            joined_program(self._compiled.programs),
            attachment,
            self._queue,
            ProgramDataReader(planned.source),
            engine=planned.engine,
            reason=planned.reason,
            diagnostics=self._diagnostics,
            command=self._command,
            tells_status=planned.members[0].job.scope.endpoint is not None,
        )


# The constructors of sessions: for a process, a command, or all processes.


_BUFFER = 64 << 20
"""Maximum size in bytes of unread records."""


def _options(
    directory: str | Path,
    allow_write: bool,
    exact: bool,
    pid_namespace: bool,
    ring_size: int,
    overhead: float | None,
    *,
    replaceable: bool = True,
) -> EngineOptions:
    return EngineOptions(
        allow_write,
        core_directory=str(directory),
        overhead=None if overhead is None else check_overhead(overhead),
        replaceable=replaceable,
        own={"exact": exact, "pid_namespace": pid_namespace, "ring_size": ring_size},
    )


def attach(
    pid: int | None = None,
    *,
    follow: bool = True,
    engine: str = "auto",
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for a running process, and with ``follow`` for its descendants.

    Raise ``EngineError`` if there is no such process, or none that can be probed.

    ``engine`` is a value of ``dprobes run --engine``. "auto" chooses an engine with the features that a program needs,
    the ebpf engine if possible. An engine with an endpoint (``gdb=HOST:PORT``) takes no ``pid``, because the session is
    for the endpoint's target. ``items`` has the header items of records; fewer items make smaller records.
    ``allow_write`` allows programs to change or stop the target. ``exact``, ``pid_namespace``, ``core_directory``,
    ``ring_size`` (in bytes) and ``overhead`` (in percent, 0 for no limit) are options of ``dprobes run``. ``buffer`` is
    the maximum size of unread records in bytes.
    """
    options = _options(core_directory, allow_write, exact, pid_namespace, ring_size, overhead)
    if pid is None and named_engine(engine)[1] is None:
        raise EngineError(
            "attach needs the number of a process",
            hint="or name the engine's target, as engine='gdb=HOST:PORT'",
        )
    scope = Scope(pid=pid, follow=follow)
    return ProbeSession(scope, options, engine=engine, items=items, buffer=buffer)


def launch(
    command: Sequence[str],
    *,
    follow: bool = True,
    engine: str = "auto",
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for a command, a list of words.

    The command starts at the first ``records`` or ``wait``, or with ``ProbeSession.go``. Programs that were inserted
    before probe it from its first instruction on. The end of the session does not end a running command. A command that
    has not started is never executed. ``ProbeSession.wait`` returns its exit status. Raise ``TargetError`` if the
    command does not exist.

    With an ``engine`` that has an endpoint (``gdb=HOST:PORT``), the command provides a stub there, and is started when
    a program is inserted. The other arguments are those of ``attach``.
    """
    starts_stub = named_engine(engine)[1] is not None
    options = _options(
        core_directory, allow_write, exact, pid_namespace, ring_size, overhead, replaceable=not starts_stub
    )
    scope = Scope(command=tuple(command), follow=follow)
    return ProbeSession(scope, options, engine=engine, items=items, buffer=buffer)


def everywhere(
    *,
    cgroup: str | Path | None = None,
    uid: int | None = None,
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for all processes, including later ones. It needs the ebpf engine, and so root.

    ``cgroup`` limits it to the processes of a directory below /sys/fs/cgroup, ``uid`` to those of a real user id. The
    other arguments are those of ``attach``.
    """
    options = _options(core_directory, allow_write, exact, pid_namespace, ring_size, overhead)
    scope = Scope(cgroup=None if cgroup is None else str(cgroup), uid=uid)
    return ProbeSession(scope, options, engine=engine_that_probes(ScopeKind.EVERYWHERE), items=items, buffer=buffer)
