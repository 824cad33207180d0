"""Sessions of an engine in this process, each with a thread that iterates over its events, as a manager has them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Finished, Job, RecordBatch, Scope, StateEvent, Stop
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module
from integration.support import TIMEOUT, await_line, running
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment, Engine, Event
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.resolve.probepoints import ProbeState
    from dprobes.rpn.rpn_program import Program


THREE = """vars = 2
cvars = 3
offset = stepped
minor = 1
inc lv, 1
inc cv, 2
exit

offset = emulated
minor = 2
exit

offset = both
minor = 3
remove
"""
"""A program for ``ondemand.c``: one that counts, one that leaves records, one that takes itself away."""


def compiled(text: str) -> Program:
    return parse_source(SourceFile("test.rpn", text), Diagnostics(), CompileOptions())


def job_for(
    path: Path,
    text: str,
    scope: Scope | None = None,
    variables: GlobalVariables | None = None,
    replaces: Attachment | None = None,
) -> Job:
    """Return the job of a probe program whose module is the file at ``path``."""
    program = compiled(f'name = "{path}"\n{text}')
    resolved = resolve(program, Module.load(path), Diagnostics())
    return job_of(program, scope or Scope(), resolved=resolved, globals=variables, replaces=replaces)


@dataclass
class Followed:
    """Hold an entered session and what its events said so far; other threads read it."""

    session: Attachment
    events: list[Event] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    """The probepoints of the records, one for each."""
    failures: list[BaseException] = field(default_factory=list)

    def follow(self) -> None:
        try:
            for event in self.session.poll():
                match event:
                    case RecordBatch():
                        self.records += [probe for probe, _ in event.records]
                    case _:
                        self.events.append(event)
        except BaseException as error:
            self.failures.append(error)
            raise

    @property
    def finished(self) -> Finished | None:
        return next((event for event in self.events if isinstance(event, Finished)), None)

    def probes_in(self, state: ProbeState) -> list[int]:
        """Return the probepoints that were reported in a state."""
        events = [event for event in self.events if isinstance(event, StateEvent)]
        return [probe for event in events if event.state is state for probe in event.probes]

    @property
    def hits(self) -> list[int]:
        return [counts.hits for counts in self.session.counts()]


@contextlib.contextmanager
def followed(engine: Engine, job: Job) -> Iterator[Followed]:
    """Enter a session and follow it in a thread until it is stopped, at the end of the context at the latest."""
    with attached(engine, job) as session:
        following = Followed(session)
        thread = threading.Thread(target=following.follow)
        thread.start()
        try:
            yield following
        finally:
            session.change([Stop()])
            thread.join(TIMEOUT)
            assert not thread.is_alive()
            assert not following.failures


class OnDemand:
    """Speak with a process of ``ondemand.c``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, line: str) -> int:
        """Say a line and return how many calls there were when it had been carried out."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(await_line(self.process, TIMEOUT))

    def end(self) -> int:
        """Let the process end, and return its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(TIMEOUT)


@contextlib.contextmanager
def on_demand(path: Path, *arguments: object) -> Iterator[OnDemand]:
    with running(path, *arguments, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield OnDemand(process)
