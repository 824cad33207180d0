"""The verb ``run``: insert a program for as long as a command or process lives, or until Ctrl-C."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.compile import compile_program
from dprobes.cli.options import PROCESS_ID, PROGRAM_FILE, compile_options, program_options, symbols_option
from dprobes.cli.summary import summary
from dprobes.diagnostics import Severity
from dprobes.engines.base import (
    Finished,
    Job,
    Notice,
    Pause,
    ProbeState,
    RecordEvent,
    StateEvent,
)
from dprobes.formatters import FORMATS, Formatter, Place, formatter
from dprobes.record.codec import decode_record
from dprobes.record.layout import Item

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from dprobes.engines.base import Engine, Event, Session
    from dprobes.rpn.program import Program
    from dprobes.sinks.stream import StreamSink

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

LOG_ITEMS = {
    "PROCNAME": Item.PROCESS_NAME,
    "PID": Item.PID,
    "UID": Item.UID,
    "CSEIP": Item.CS | Item.IP,
    "SSESP": Item.SS | Item.SP,
    "TSC": Item.TIME,
    "TID": Item.TID,
}
"""The names that ``--log`` takes; the first six are the original's, for x86."""

_ALL = Item.PROCESS_NAME | Item.PID | Item.UID | Item.CS | Item.IP | Item.SS | Item.SP | Item.TIME | Item.TID


@click.command("run")
@click.argument("file", type=PROGRAM_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.option(
    "-c",
    "--command",
    "command_line",
    metavar="COMMAND",
    help="Start this command, without a shell, and insert the program into it.",
)
@click.option("-p", "--pid", type=PROCESS_ID, help="Insert the program into this running process.")
@program_options
@symbols_option
@click.option(
    "--engine", "engine_name", type=click.Choice(["auto", "ptrace"]), default="auto", help="The engine; auto chooses."
)
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--log",
    "log_items",
    multiple=True,
    metavar="ITEMS",
    help=f"Header items, separated by commas: {', '.join(LOG_ITEMS)}, or ALL.",
)
@click.option("-o", "--output", type=PROGRAM_FILE, metavar="FILE", help="Write records there, not to standard output.")
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
    "--follow/--no-follow", default=True, show_default=True, help="Insert it into all processes that are started, too."
)
@click.option("--allow-self", is_flag=True, help="Allow -p to name a process of another dprobes.")
@click.option("--exit-status", is_flag=True, help="End with the exit status of the command.")
def command(
    file: Path,
    arguments: tuple[str, ...],
    command_line: str | None,
    pid: int | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    engine_name: str,
    format_name: str,
    log_items: tuple[str, ...],
    output: Path | None,
    debugger: str | None,
    core_directory: str,
    follow: bool,
    allow_self: bool,
    exit_status: bool,
) -> int:
    """
    Run the probe program FILE on a command or a process, and on all processes that it starts.

    Records go to standard output, everything else to standard error, with a summary at the end. Ctrl-C takes the
    probepoints away; a process given with -p goes on.
    """  # fmt: skip
    argv = _command(command_line, arguments)
    if bool(argv) == (pid is not None):
        raise click.UsageError("give either a command (-c COMMAND) or a process (-p PID)")
    if exit_status and not argv:
        raise click.UsageError("--exit-status needs a command (-c COMMAND)")
    items = _items(log_items, format_name)
    executable = inspected = None
    if argv:
        from dprobes.target.programs import executable_of

        executable = executable_of(argv[0])
    else:
        from dprobes.engines.ptrace.procfs import living_thread
        from dprobes.engines.ptrace.refusals import check_process

        assert pid is not None
        check_process(pid, allow_self=allow_self)
        inspected = living_thread(pid)
    engine = _engine(
        engine_name,
        allow_write=allow_write,
        symbols=symbols,
        debugger=_debugger(debugger),
        core_directory=core_directory,
    )
    options = compile_options(defines, includes, cpp, allow_write=allow_write)
    compiled = compile_program(
        file, options, symbols=symbols, pid=inspected, command=argv[0] if executable else None, engine=engine
    )
    if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if compiled.resolved is None else ())):
        console.write(text)
    sink = _open_sink(output)
    try:
        job = Job(compiled.program, argv, pid, items, follow=follow, resolved=compiled.resolved)
        with engine.run(job) as session:
            return _Run(compiled.program, session, sink, format_name, argv, exit_status=exit_status).follow()
    finally:
        sink.close()


def _command(command_line: str | None, arguments: tuple[str, ...]) -> tuple[str, ...]:
    if command_line is None:
        return arguments
    if arguments:
        raise click.UsageError(f"unexpected argument '{arguments[0]}': the command was given with -c")
    return _words(command_line, "command")


def _words(command_line: str, what: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command_line))
    except ValueError as error:
        raise click.UsageError(f"the {what} is not well formed: {str(error).lower()}") from None
    if not words:
        raise click.UsageError(f"the {what} is empty")
    return words


def _items(names: Sequence[str], format_name: str) -> Item:
    items = Item.MAJOR | Item.MINOR
    if os.sysconf("SC_NPROCESSORS_ONLN") > 1 or format_name == "json":
        items |= Item.CPU
    if format_name == "json":
        return items | _ALL
    for name in ",".join(names).replace(" ", ",").upper().split(","):
        if name == "ALL":
            items |= _ALL
        elif name in LOG_ITEMS:
            items |= LOG_ITEMS[name]
        elif name:
            from dprobes.diagnostics import did_you_mean

            hint = did_you_mean(name, [item.lower() for item in LOG_ITEMS]) or f"write {', '.join(LOG_ITEMS)}, or ALL"
            raise click.UsageError(f"--log knows no item '{name.lower()}'; {hint}")
    return items


def _debugger(command_line: str | None) -> tuple[str, ...] | None:
    """Return the words of the debugger's command, None if a process is to be left stopped."""
    if command_line is None:
        return _GDB if os.isatty(0) and os.isatty(1) else None
    words = _words(command_line, "debugger's command")
    if "%p" not in command_line.replace("%%", ""):
        raise click.UsageError("--debugger needs %p, where the process id goes: gdb -p %p")
    if shutil.which(words[0]) is None:
        raise click.UsageError(f"--debugger: command '{words[0]}' is not found")
    return words


def _engine(
    name: str, *, allow_write: bool, symbols: Path | None, debugger: tuple[str, ...] | None, core_directory: str
) -> Engine:
    """Return the engine called ``name``; ``auto`` has one to choose from in this version."""
    match name:
        case "auto" | "ptrace":
            from dprobes.engines.ptrace.engine import PtraceEngine

            return PtraceEngine(
                allow_write=allow_write, symbols=symbols, debugger=debugger, core_directory=core_directory
            )
    raise KeyError(name)


def _open_sink(output: Path | None) -> StreamSink:
    from dprobes.sinks import stream

    return stream.console() if output is None else stream.file(output)


class _Run:
    """Follow one session to its end."""

    def __init__(
        self,
        program: Program,
        session: Session,
        sink: StreamSink,
        format_name: str,
        argv: tuple[str, ...],
        *,
        exit_status: bool,
    ) -> None:
        self._program = program
        self._session = session
        self._sink = sink
        self._format: Formatter = formatter(format_name, wall_offset=time.time_ns() - time.monotonic_ns())
        self._argv = argv
        self._exit_status = exit_status
        self._inserted = False
        self._places: dict[int, Place] = {}
        self._last_signal = float("-inf")
        self._asked_to_stop = False
        self._reader_is_gone = False
        self._ended_by: int | None = None

    def follow(self) -> int:
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        finished = None
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
            case RecordEvent():
                self._write(event)
            case Pause() if not self._reader_is_gone:
                self._sink.flush()
            case StateEvent():
                self._on_state(event)
            case Notice(message, hint, is_warning):
                (console.warning if is_warning else console.note)(message, hint)
            case Finished():
                if not self._reader_is_gone:
                    self._sink.flush()
                return event
        return None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._session.is_debugging:
            return
        now = time.monotonic()
        recent = now - self._last_signal < _IMPATIENCE
        self._last_signal = now
        if number == signal.SIGINT and self._argv and not recent:
            # The terminal sends Ctrl-C to the command as well, which decides what it means. Two in a row are for us.
            return
        if self._asked_to_stop and recent:
            console.warning("the tracer does not answer; it takes the probepoints away as soon as it can")
            os._exit(128 + number)
        if number == signal.SIGTERM:
            self._ended_by = number
        self._asked_to_stop = recent or number == signal.SIGTERM or not self._argv
        self._session.stop()

    def _write(self, event: RecordEvent) -> None:
        if self._reader_is_gone:
            return
        place = self._places.get(event.probe)
        if place is None:
            probe = self._session.probes[event.probe]
            place = self._places[event.probe] = Place(self._program.name, probe.where, probe.function)
        self._sink.write(self._format(decode_record(event.record), place))

    def _stop_writing(self) -> None:
        """Nobody reads our records any more, as in ``| head``: take the probepoints away, and say what there was."""
        self._reader_is_gone = True
        self._sink.abandon()
        self._session.stop()

    def _on_state(self, event: StateEvent) -> None:
        self._inserted = self._inserted or event.state is ProbeState.ACTIVE
        if event.state in _NOT_INSERTED:
            console.warning(f"{event.state.value} in process {event.pid}: {event.detail}; not inserted there")

    def _status(self, finished: Finished) -> int:
        console.write(summary(self._program, self._session, finished.counts))
        if finished.cut_short:
            console.error("the run was cut short; more may have happened than the summary shows")
            return 1
        if self._inserted and not any(count.hits for count in finished.counts):
            console.note("the probepoints were inserted, but never reached")
        if not self._inserted:
            # Why those that were found were not inserted has been said.
            reason = "" if self._session.probes else f": no process mapped '{self._program.name}' in a fitting form"
            console.error(f"no probepoint was inserted{reason}")
        if self._exit_status and finished.exit_status is not None:
            code = os.waitstatus_to_exitcode(finished.exit_status)
            return code if code >= 0 else 128 - code
        if self._ended_by is not None:
            return 128 + self._ended_by
        return 0 if self._inserted else 1
