"""The engine: each session of a program has a tracer of its own, or takes over that of a session that it replaces."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Self

from dprobes.engines.base import Counts, Event, Finished, Notice, Pause
from dprobes.engines.capabilities import ENGINES
from dprobes.engines.debugger import LOOK, Debuggers
from dprobes.engines.ptrace.answers import Answers
from dprobes.engines.ptrace.conversation import Conversation, ProgramRun
from dprobes.engines.ptrace.ledger import Ledger
from dprobes.engines.ptrace.wire import Done, ProbeLimits, Remove, Start
from dprobes.errors import EngineError, InternalError
from dprobes.extensions.registry import called_extensions
from dprobes.rpn.program import Glob
from dprobes.target.symbolproviders import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.base import Job
    from dprobes.engines.globals import GlobalVariables
    from dprobes.engines.resolve import LeftOutProbe, Probepoint
    from dprobes.target.symbolproviders import SymbolProvider

__all__ = ["PtraceEngine", "PtraceSession"]


class PtraceEngine:
    """Probe a process tree through ptrace(2)."""

    name = "ptrace"
    capabilities = ENGINES[name]

    def __init__(
        self,
        *,
        allow_write: bool = False,
        symbols: SymbolProvider = OWN_SYMBOLS,
        debugger: Sequence[str] | None = None,
        core_directory: str = ".",
    ) -> None:
        self._allow_write = allow_write
        self._symbols = symbols
        self._debugger = debugger
        self._core_directory = core_directory

    def run(self, job: Job) -> PtraceSession:
        """Return the session; entering it starts the tracer and the command, or attaches to the process."""
        return PtraceSession(
            job,
            allow_write=self._allow_write,
            symbols=self._symbols,
            debugger=self._debugger,
            core_directory=self._core_directory,
        )


class PtraceSession:
    """Hold one run; use it as a context manager and iterate over ``events``."""

    def __init__(
        self,
        job: Job,
        *,
        allow_write: bool,
        symbols: SymbolProvider,
        debugger: Sequence[str] | None = None,
        core_directory: str = ".",
    ) -> None:
        self._job = job
        self._core_directory = core_directory
        self._debugger = debugger
        self.globals: GlobalVariables | None = job.globals
        """The global variables that are shared with other sessions."""
        self._run = ProgramRun(
            Answers(job.program, allow_write=allow_write, symbols=symbols, resolved=job.resolved),
            Ledger.new(job.program.vars, job.program.cvars),
        )
        self._conversation: Conversation | None = None

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The probepoints that were found so far; events give their indices."""
        return self._run.answers.probes

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger runs for a process that was handed over."""
        return self._conversation is not None and self._conversation.debuggers.is_running

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""
        return self._run.answers.left_out

    def __enter__(self) -> Self:
        if self._job.replaces is not None:
            self._replace(self._job.replaces)
            return self
        if self.globals is not None:
            self.globals.check(self._job.program.gvars)
        # A command needs its input itself, unless it is the terminal, which people share.
        debuggers = Debuggers(self._debugger, keep_input=not self._job.scope.command or os.isatty(0))
        conversation = Conversation(self._run, self._start_message(), debuggers, self._job.program.name)
        try:
            conversation.attach(self._job.scope)
        except BaseException:
            conversation.close()
            raise
        self._conversation = conversation
        return self

    def __exit__(self, *exception: object) -> None:
        conversation = self._conversation
        if conversation is None or conversation.current is not self._run:
            return  # the tracer is another session's now
        self.stop()
        with contextlib.suppress(EngineError):
            for _ in self.events():
                pass
        conversation.close()

    def stop(self) -> None:
        """Ask the tracer to take everything away and detach; may be called by a signal handler."""
        conversation = self._conversation
        if conversation is not None and conversation.current is self._run:
            conversation.outbox.stop()

    def hurry(self) -> bool:
        """Return False: nothing is kept here that the tracer has given up."""
        return False

    def events(self) -> Iterator[Event]:
        """Iterate over what happens until ``Finished``; raise ``EngineError`` if the target cannot be taken over."""
        run, conversation = self._run, self._conversation
        assert conversation is not None
        while True:
            is_over = run.is_over
            while run.items:
                item = run.items.popleft()
                if isinstance(item, Done):
                    yield from self._on_done(conversation, item)
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
            if is_over:
                return
            yield Pause()
            conversation.wait(run)

    # What others may do while somebody iterates over the events

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far, in the order of ``probes``."""
        return self._run.counts()

    def remove(self, probes: Sequence[int]) -> None:
        """
        Take probepoints away, in processes of later on as well; ``events`` reports those that were there as REMOVED.

        What was hit before that may still give its record.
        """
        count = len(self.probes)
        for probe in probes:
            if not 0 <= probe < count:
                there_are = f"they are 0 to {count - 1}" if count else "none was found yet"
                raise IndexError(f"there is no probepoint {probe}: {there_are}")
        if self._conversation is not None:
            self._conversation.outbox.send(Remove(self._run.number, tuple(probes)))

    def local_variables(self) -> list[int]:
        """Return the program's local variables."""
        return self._run.ledger.local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return its CPU variables, a list for each CPU."""
        return self._run.ledger.cpu_variables()

    def reset_variables(self) -> None:
        """Set its local and CPU variables to zero, between two handlers."""
        self._run.ledger.ask_for_reset()

    # The conversation

    def _replace(self, former: object) -> None:
        """Take the place of another session, with its processes and its global variables."""
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
        """Let another program take the place of this one; raise ``EngineError`` or ``SourceError`` if it cannot."""
        conversation = self._conversation
        if conversation is None:
            raise EngineError("the program that is to be replaced is not running")
        conversation.replace(self._run, run, start)
        return conversation

    def _start_message(self) -> Start:
        program = self._job.program
        definitions = tuple(
            ProbeLimits(d.passcount, d.maxhits, program.keeps_log_on_fault(d), isinstance(d.location, Glob))
            for d in program.definitions
        )
        return Start(
            self._run.number,
            definitions,
            int(self._job.items),
            (program.vars, program.gvars, program.cvars),
            self._run.ledger.descriptor,
            called_extensions(program),
            self._core_directory,
            follow=self._job.scope.follow,
            globals=-1 if self.globals is None else self.globals.descriptor,
            everywhere=self._run.answers.everywhere(),
        )

    def _on_done(self, conversation: Conversation, done: Done) -> Iterator[Event]:
        status = None
        if not done.complete and not done.problem and not conversation.outbox.is_stopping:
            yield Notice("the tracer was told to end (SIGTERM); the probepoints are taken away")
        while not conversation.debuggers.is_idle:
            yield Pause()
            yield from conversation.debuggers.look()
            time.sleep(LOOK)
        if done.complete:
            status = conversation.wait_for_command()
        yield Finished(self.counts(), status)
        if done.problem:
            raise InternalError(f"the tracer failed; the probepoints are taken away\n{done.problem.rstrip()}")
