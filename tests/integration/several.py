"""Several programs of the ptrace engine in one tracer, each followed by a thread of this process."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import threading
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Begun, EngineOptions, Job, Pause, RecordBatch, Scope, Stop
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import Followed, compiled
from integration.support import TIMEOUT, await_line, await_true, running
from support.attachments import attach, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment


BOTH = "vars = 1\noffset = stepped\nminor = 1\ninc lv, 0\nexit\noffset = emulated\nminor = 2\ninc lv, 0\nexit\n"
"""A program for ``ondemand.c`` with a probepoint that is stepped and one that is emulated."""


class Program(Followed):
    """Hold a program's session, followed by a thread, with its records' bytes."""

    def __init__(self, session: Attachment) -> None:
        super().__init__(session)
        self.logs: list[bytes] = []
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()

    def follow(self) -> None:
        try:
            for event in self.session.poll():
                match event:
                    case RecordBatch(records):
                        self.records += (probe for probe, _ in records)
                        self.logs += (record for _, record in records)
                    case Pause():
                        pass
                    case _:
                        self.events.append(event)
        except BaseException as error:  # noqa: BLE001 - the test looks at what failed
            self.failures.append(error)

    def await_active(self, *probes: int) -> None:
        def are_active() -> bool:
            wanted = set(probes or range(len(self.session.probes)))
            return bool(wanted) and wanted <= set(self.probes_in(ProbeState.ACTIVE))

        await_true(are_active, "the probepoints")

    def await_state(self, state: ProbeState, *probes: int) -> None:
        await_true(lambda: self.probes_in(state) == list(probes), f"the state {state.value} of {probes}")

    def await_begun(self) -> None:
        await_true(lambda: self.events.count(Begun()) == 1, "the word that it has begun")

    def words(self) -> list[tuple[int, ...]]:
        """Return what was logged in each record, as words of 8 bytes."""
        logs = [record[12:] for record in self.logs]  # flags, major, minor
        return [struct.unpack(f"<{len(log) // 8}Q", log) for log in logs]

    def end(self) -> None:
        """End the program, and see that it comes to its end."""
        self.session.change([Stop()])
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()
        self.session.close()


class Group:
    """Insert programs beside each other."""

    def __init__(
        self, *, allow_write: bool = False, core_directory: str = ".", engine: type[PtraceEngine] = PtraceEngine
    ) -> None:
        self._engine = engine(EngineOptions(allow_write, core_directory=core_directory))
        self.programs: list[Program] = []

    def enter(self, job: Job) -> Program:
        session = attach(self._engine, job._replace(beside=tuple(each.session for each in self.programs)))
        program = Program(session)
        self.programs.append(program)
        return program

    def insert(self, path: Path, text: str, pid: int, *, follow: bool = True) -> Program:
        """Insert a program, and wait until its probepoints are active."""
        program = self.enter(job_of(compiled(f'name = "{path}"\n{text}'), Scope(pid=pid, follow=follow)))
        program.await_active()
        return program

    def close(self) -> None:
        for program in self.programs:
            program.end()
        assert [failure for program in self.programs for failure in program.failures] == []

    def end(self) -> None:
        """End all programs."""
        for program in self.programs:
            program.end()


@contextlib.contextmanager
def grouped(
    *, allow_write: bool = False, core_directory: str = ".", engine: type[PtraceEngine] = PtraceEngine
) -> Iterator[Group]:
    """Give a group whose programs end with the context, at the latest, and without a failure."""
    group = Group(allow_write=allow_write, core_directory=core_directory, engine=engine)
    try:
        yield group
    finally:
        group.close()


@contextlib.contextmanager
def before_exec(*command: object) -> Iterator[subprocess.Popen[str]]:
    """Run a shell that executes a command when it is told to by a line."""
    script = 'echo ready; read line; exec "$@"'
    with running("sh", "-c", script, "sh", *command, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield process


def go(process: subprocess.Popen[str]) -> None:
    """Let it execute the command."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def await_hits(program: Program, goal: int) -> None:
    await_true(lambda: sum(program.hits) >= goal or program.finished is not None, f"{goal} hits", TIMEOUT)


def assert_complete(program: Program) -> None:
    """See that each hit that ran the handler has left its record."""
    run = [counts.hits - counts.passed for counts in program.session.counts()]
    assert [program.records.count(n) for n in range(len(run))] == run
    assert program.finished is not None
    assert program.finished.counts == program.session.counts()
