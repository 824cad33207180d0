"""The verb ``run``: insert a program for as long as a command or process lives, or until Ctrl-C."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.compile import load_program
from dprobes.cli.engines import NAMES, EngineOptions, check_scope, settle
from dprobes.cli.interrupts import EarlyInterrupt
from dprobes.cli.items import LOG_ITEMS, log_items_of
from dprobes.cli.logoptions import has_structure, log_format_option
from dprobes.cli.options import (
    PROGRAM_FILE,
    compile_options,
    names_of,
    program_options,
    selection_options,
    symbols_option,
    verification_options,
)
from dprobes.cli.outputs import Outputs
from dprobes.cli.scope import scope_of, scope_options, words_of
from dprobes.cli.summary import summary
from dprobes.diagnostics import Severity
from dprobes.engines.base import (
    Finished,
    Job,
    Notice,
    Pause,
    ProbeState,
    RecordBatch,
    RecordEvent,
    StateEvent,
)
from dprobes.engines.preparing import look_around, prepare
from dprobes.formatters import FORMATS
from dprobes.record.source import RecordSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from dprobes.engines.base import Event, Scope, Session
    from dprobes.rpn.program import Program

__all__ = ["command"]

_IMPATIENCE = 1.0
"""Seconds within which a second Ctrl-C means that the first one was not enough."""

_GDB = ("gdb", "-q", "-p", "%p", "-ex", "handle SIGSTOP nostop noprint nopass")
"""The debugger at a terminal. Attaching to a stopped process makes the kernel report the stop once more later."""

_NOT_INSERTED = (
    ProbeState.MISMATCH,
    ProbeState.CONFLICT,
    ProbeState.INVALID_OFFSET,
    ProbeState.DEBUGREG_UNAVAIL,
)
"""The states that a process brings about; the file's have been said before."""


@click.command("run")
@click.argument("file", type=PROGRAM_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@scope_options
@program_options
@symbols_option
@selection_options
@verification_options
@click.option("--engine", "engine_name", type=click.Choice(NAMES), default="auto", help="The engine; auto chooses.")
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--log",
    "log_items",
    multiple=True,
    metavar="ITEMS",
    help=f"Header items, separated by commas: {', '.join(LOG_ITEMS)}, or ALL; without -p and -c PROCNAME,PID besides.",
)
@click.option(
    "-o",
    "--output",
    type=PROGRAM_FILE,
    metavar="FILE",
    help="Write records there, not to standard output; a name in .dpt makes a trace file, which is appended to.",
)
@click.option(
    "--log-target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="Send records there, instead of standard output; 'dprobes log-target kinds' lists what there is.",
)
@log_format_option(None)
@click.option(
    "--debugger",
    "debugger",
    metavar="COMMAND",
    help="What 'exit 1' starts, without a shell; %p is the process. At a terminal: gdb -p %p; else nothing.",
)
@click.option(
    "--core-dir",
    "core_directory",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    metavar="DIR",
    help="Where 'exit 3' writes core.dprobes.PID.",
)
@click.option(
    "--pid-namespace", is_flag=True, help="Give pid and tid as the processes' own PID namespace numbers them (ebpf)."
)
@click.option(
    "--exact", is_flag=True, help="Probe the very instruction that is named, where a neighbour is cheaper (ebpf)."
)
@click.option(
    "--ring-size",
    type=click.IntRange(min=1, max=1024),
    default=16,
    show_default=True,
    metavar="MIB",
    help="Room for records that nobody has taken yet, in MiB (ebpf).",
)
@click.option("--allow-self", is_flag=True, help="Allow -p to name a process of another dprobes.")
@click.option("--exit-status", is_flag=True, help="End with the exit status of the command.")
def command(
    file: Path,
    arguments: tuple[str, ...],
    command_line: str | None,
    pid: int | None,
    cgroup: str | None,
    user: str | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    groups: tuple[str, ...],
    types: tuple[str, ...],
    dont_verify_build_id: bool,
    dont_verify_opcodes: bool,
    engine_name: str,
    format_name: str,
    log_items: tuple[str, ...],
    output: Path | None,
    targets: tuple[str, ...],
    log_format: str | None,
    debugger: str | None,
    core_directory: str,
    follow: bool,
    pid_namespace: bool,
    exact: bool,
    ring_size: int,
    allow_self: bool,
    exit_status: bool,
) -> int:
    """
    Run the probe program FILE on a command or a process and all that it starts, or on all processes.

    FILE is the text of a program, or a compiled one (dprobes build). Records go to standard output, everything else to
    standard error, with a summary at the end. Ctrl-C takes the probepoints away; processes that were there before go
    on.
    """  # fmt: skip
    scope = scope_of(command_line, arguments, pid, cgroup, user, follow=follow)
    if exit_status and not scope.command:
        raise click.UsageError("--exit-status needs a command (-c COMMAND)")
    wants_all = format_name == "json" or has_structure([*targets, *([f"file:{output}"] if output else [])])
    items = log_items_of(log_items, is_tree=scope.is_tree, all_by_default=wants_all)
    options = EngineOptions(
        allow_write=allow_write,
        debugger=_debugger(debugger),
        core_directory=core_directory,
        pid_namespace=pid_namespace,
        exact=exact,
        ring_size=ring_size << 20,
    )
    check_scope(engine_name, scope, options)
    vantage = look_around(scope, allow_self=allow_self)
    loaded = load_program(
        file,
        compile_options(defines, includes, cpp, allow_write=allow_write),
        symbols=symbols,
        groups=names_of(groups),
        types=names_of(types),
        verify_build_id=not dont_verify_build_id,
        verify_opcodes=not dont_verify_opcodes,
    )
    prepared = prepare(
        loaded.program,
        loaded.diagnostics,
        scope,
        vantage,
        engine=engine_name,
        options=replace(options, symbols=loaded.symbols),
    )
    compiled = prepared.compiled
    engine = settle(prepared.selection, compiled)
    # That the module is not there yet is of interest where it may still come.
    waits = compiled.resolved is None and engine.name == "ptrace"
    if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if waits else ())):
        console.write(text)
    source = RecordSource(1, compiled.program.name, compiled.program.name, compiled.program.major)
    with Outputs(source, output, format_name, targets, log_format or format_name) as outputs:
        job = Job(compiled.program, scope, items, compiled.resolved)
        with EarlyInterrupt(deferred=not scope.command) as early, engine.run(job) as session:
            run = _Run(compiled.program, session, outputs, scope, exit_status=exit_status)
            return run.follow(early)


def _debugger(command_line: str | None) -> tuple[str, ...] | None:
    """Return the words of the debugger's command, None if a process is to be left stopped."""
    if command_line is None:
        return _GDB if os.isatty(0) and os.isatty(1) else None
    words = words_of(command_line, "debugger's command")
    if "%p" not in command_line.replace("%%", ""):
        raise click.UsageError("--debugger needs %p, where the process id goes: gdb -p %p")
    if shutil.which(words[0]) is None:
        raise click.UsageError(f"--debugger: command '{words[0]}' is not found")
    return words


class _Run:
    """Follow one session to its end."""

    def __init__(
        self,
        program: Program,
        session: Session,
        outputs: Outputs,
        scope: Scope,
        *,
        exit_status: bool,
    ) -> None:
        self._program = program
        self._session = session
        self._outputs = outputs
        self._argv = scope.command
        self._announces = not scope.is_tree
        self._exit_status = exit_status
        self._inserted = False
        self._last_signal = float("-inf")
        self._asked_to_stop = False
        self._is_early = False
        self._reader_is_gone = False
        self._ended_by: int | None = None

    def follow(self, early: EarlyInterrupt) -> int:
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        self._is_early = early.came
        if early.came:
            self._on_signal(signal.SIGINT, None)
        finished = None
        gc.freeze()
        gc.enable()
        try:
            for event in self._session.events():
                try:
                    finished = self._on_event(event) or finished
                except BrokenPipeError:
                    self._stop_writing()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._status(finished) if finished is not None else 1

    def _on_event(self, event: Event) -> Finished | None:
        match event:
            case RecordBatch(records):
                self._write(records)
            case RecordEvent():
                self._write([event])
            case Pause() if not self._reader_is_gone:
                self._outputs.flush()
            case StateEvent():
                self._on_state(event)
            case Notice(message, hint, is_warning):
                (console.warning if is_warning else console.note)(message, hint)
            case Finished():
                if not self._reader_is_gone:
                    self._outputs.flush()
                return event
        return None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._session.is_debugging:
            return
        now = time.monotonic()
        recent = now - self._last_signal < _IMPATIENCE
        self._last_signal = now
        if number == signal.SIGTERM:
            self._ended_by = number
        if self._session.hurry():
            return
        if number == signal.SIGINT and self._argv and not recent:
            # The terminal sends Ctrl-C to the command as well, which decides what it means. Two in a row are for us.
            return
        if self._asked_to_stop and recent:
            console.warning("ended before everything was written; the probepoints are taken away as soon as possible")
            os._exit(128 + number)
        self._asked_to_stop = recent or number == signal.SIGTERM or not self._argv
        self._session.stop()

    def _write(self, records: Sequence[tuple[int, bytes]]) -> None:
        if self._reader_is_gone:
            return
        self._outputs.write(self._session.probes, records)

    def _stop_writing(self) -> None:
        """Nobody reads our records any more, as in ``| head``: take the probepoints away, and say what there was."""
        self._reader_is_gone = True
        self._outputs.abandon()
        self._session.stop()

    def _on_state(self, event: StateEvent) -> None:
        if event.state is ProbeState.ACTIVE and not self._inserted:
            self._inserted = True
            if self._announces and not self._asked_to_stop:
                count = len(event.probes)
                console.note(f"{count} probepoint{'s are' if count > 1 else ' is'} active; Ctrl-C ends the run")
        if event.state in _NOT_INSERTED:
            where, there = (f" in process {event.pid}", " there") if event.pid else ("", "")
            console.warning(f"{event.state.value}{where}: {event.detail}; not inserted{there}")

    def _status(self, finished: Finished) -> int:
        console.write(summary(self._program, self._session, finished.counts))
        if finished.cut_short:
            console.error("the run was cut short; more may have happened than the summary shows")
            return 1
        if self._inserted and not any(count.hits for count in finished.counts):
            console.note("the probepoints were inserted, but never reached")
        if not self._inserted and self._is_early:
            console.note("the run was ended before a probepoint was inserted")
        elif not self._inserted:
            # Why those that were found were not inserted has been said.
            reason = "" if self._session.probes else f": no process mapped '{self._program.name}' in a fitting form"
            console.error(f"no probepoint was inserted{reason}")
        if self._exit_status and finished.exit_status is not None:
            code = os.waitstatus_to_exitcode(finished.exit_status)
            return code if code >= 0 else 128 - code
        if self._ended_by is not None:
            return 128 + self._ended_by
        return 0 if self._inserted or self._is_early else 1
