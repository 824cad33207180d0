"""The verb ``profile``: calls and times of functions of a module, by a shadow stack of each thread."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, counted, print_lines, print_table
from dprobes.cli.output.call_profile import TEXT_HEADER, callgrind_lines, json_lines, since, text_rows
from dprobes.cli.output.function_graph import GRAPH_ITEMS, GraphView
from dprobes.cli.output.stack_profiles import FOLDED, check_stacks_target, is_perfetto, write_stacks
from dprobes.cli.runs.code_places import CodePlaces
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.runs.shadow_stack import depth_of, paths_in, profile_in, profiled_code, program_for
from dprobes.cli.scope_and_engine import (
    check_scope,
    command_option,
    engine_option,
    follow_option,
    note_engine,
    note_process,
    process_option,
    scope_of,
    verbose_option,
)
from dprobes.cli.shared_options import DURATION, PROGRAM_FILE, symbols_option
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import EngineOptions, ScopeKind
from dprobes.engines.engine_registry import AUTO, fastest_engine
from dprobes.errors import FormatError, reason_of
from dprobes.record.log_record import Item
from dprobes.runs import run_steps
from dprobes.runs.run_steps import ProgramInput, Request, record_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.cli.output.call_profile import CallProfile
    from dprobes.engines.engine_interface import Attachment, Finished, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.runs.run_steps import RunPlan, Vantage

__all__ = ["profile_command"]

_STANDARD_ERROR = 2


class _Options(NamedTuple):
    """Values of the options of ``profile``."""

    place: str
    scope: Scope
    engine: str
    symbols: Path | None
    rows: int | None
    as_json: bool
    callgrind: Path | None
    stacks: str | None
    with_callees: bool
    top: float | None
    is_graph: bool
    verbose: bool


_TOP_SECONDS = 1.0
"""Interval of ``--top`` if ``--interval`` is not given."""
_TOP_ROWS = 20
"""Number of rows of ``--top`` if ``--rows`` is not given."""


class _Top:
    """
    A printer of the functions with most time in each interval of ``seconds``.

    ``read`` returns the profile of all calls that have ended. A terminal's screen is cleared before each table.
    """

    def __init__(self, seconds: float, rows: int, read: Callable[[], CallProfile]) -> None:
        self._seconds = seconds
        self._rows = rows
        self._read = read
        self._over = threading.Event()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Print the tables until the context ends."""
        timer = threading.Thread(target=self._repeat, daemon=True)
        timer.start()
        try:
            yield
        finally:
            self._over.set()
            timer.join()

    def _repeat(self) -> None:
        before: CallProfile | None = None
        began = time.monotonic()
        while not self._over.wait(self._seconds):
            profile, now = self._read(), time.monotonic()
            recent = profile if before is None else since(before, profile)
            title = f"the last {now - began:.1f} s: {counted(recent.calls, 'call')}"
            before, began = profile, now
            with contextlib.suppress(BrokenPipeError):
                console.clear_screen()
                print_table(TEXT_HEADER, list(text_rows(recent, self._rows)), title)


class _ProfileFace(run_steps.Face[int]):
    """The steps of a run that profiles a module; ``stack`` closes what they open."""

    def __init__(self, given: _Options, progress: Progress, stack: contextlib.ExitStack) -> None:
        self._given = given
        self._progress = progress
        self._stack = stack

    def request(self) -> Request:
        """Return the request for the processes and the engine of the command line."""
        options = EngineOptions()
        chosen = fastest_engine() if self._given.engine == AUTO else self._given.engine
        scope = self._given.scope
        if scope.command and (self._given.as_json or self._given.stacks == FOLDED):
            scope = replace(scope, output=_STANDARD_ERROR)
        engine, scope = check_scope(chosen, scope, options)
        return Request(engine, scope, options)

    def load(self, vantage: Vantage) -> ProgramInput:
        """Find the module and the exits of its functions, and return the program that profiles them."""
        from dprobes.cli.verbs.locate import not_there
        from dprobes.target.module_lookup import find_module
        from dprobes.target.probed_module import FileSymbols, Module

        given = self._given
        note_process(given.scope, vantage.request.scope)
        self._progress.begin("looking for the functions")
        name, _, pattern = given.place.partition(":")
        path = find_module(name, pid=vantage.tid, command=vantage.command)
        if path is None:
            raise not_there(name, vantage.tid)
        symbols = FileSymbols(given.symbols)
        self._code = profiled_code(
            Module.load(path, given.symbols), name, pattern or "*", with_callees=given.with_callees
        )
        self._module, self._inode = path, path.stat().st_ino
        program = program_for(name, self._code, keeps_paths=given.stacks is not None, logs_calls=given.is_graph)
        self._source = record_source(program, {}, names_addresses=True)
        items = GRAPH_ITEMS if given.is_graph else Item(0)
        return ProgramInput((program,), (symbols,), Diagnostics(), self._source, items)

    def announce(self, planned: RunPlan) -> None:
        """Print the engine and the number of functions that are left out."""
        self._progress.end()
        note_engine(planned.engine, planned.reason, verbose=self._given.verbose)
        if left_out := self._code.left_out:
            name, reason = next(iter(left_out.items()))
            are = f"{len(left_out)} functions are" if len(left_out) > 1 else "1 function is"
            console.note(f"{are} not profiled, such as '{name}': {reason}")
        self._tell_reached()
        self._progress.begin("inserting the probepoints")
        is_command = bool(planned.members[0].job.scope.command)
        self._early = self._stack.enter_context(EarlyInterrupt(deferred=not is_command))

    def _tell_reached(self) -> None:
        """Print the number of functions that calls may reach, and which calls lead to functions that do not count."""
        reached = self._code.reached
        if reached is None:
            return
        profiled = len(self._code.entries)
        console.note(
            "1 function of the module is profiled: the given one"
            if profiled == 1
            else f"{profiled} functions of the module are profiled: the given ones, and those that calls from them may "
            "reach"
        )
        if (calls := reached.indirect) > 0:
            callers = reached.indirect_callers
            are = f"{counted(calls, 'call')} in {counted(callers, 'function')} {'is' if calls == 1 else 'are'}"
            console.note(
                f"{are} indirect: a function that only such calls reach is not profiled, and its time counts as time "
                "of the caller"
            )
        if elsewhere := sorted(reached.elsewhere):
            are = f"{len(elsewhere)} functions of other files, such as '{elsewhere[0]}', are"
            if len(elsewhere) == 1:
                are = f"1 function of another file, '{elsewhere[0]}', is"
            console.note(f"{are} called: their time is that of the callers")

    def follow(self, planned: RunPlan, attachment: Attachment) -> int:
        """Wait for the end of the run, print the profile, and return the exit status."""
        self._stack.callback(attachment.close)
        from dprobes.cli.output.run_outputs import Outputs
        from dprobes.cli.output.run_summary import SummaryOptions
        from dprobes.cli.runs.run_follower import Run

        views = (GraphView(self._code.entries.values(), self._code.exits.values()),) if self._given.is_graph else ()
        run = Run(
            planned.compiled.program,
            attachment,
            self._stack.enter_context(Outputs(self._source, None, "text", (), "text", views)),
            planned.members[0].job.scope,
            self._progress,
            SummaryOptions(planned.engine),
            exit_status=False,
        )
        names = CodePlaces(self._source.images, self._code.entries, self._inode)
        module = str(self._module)
        with contextlib.ExitStack() as shown:
            if (seconds := self._given.top) is not None:
                rows = self._given.rows or _TOP_ROWS
                top = _Top(seconds, rows, lambda: profile_in(module, attachment.tables(), names))
                shown.enter_context(top.shown())
            finished = run.follow(self._early)
        tables = attachment.tables()
        if self._given.is_graph:
            self._tell_losses(tables, attachment)
            if finished is not None and (lost := sum(count.lost for count in finished.counts)):
                are, their = "1 entry or return is", "its record"
                if lost > 1:
                    are, their = f"{lost} entries and returns are", "their records"
                console.warning(f"{are} missing: {their} found no room")
            if refused := sum(view.refused for view in views):
                are, them = (f"{refused} records are", "them") if refused > 1 else ("1 record is", "it")
                console.warning(f"{are} missing: the program has overwritten {them}")
            if finished is not None:
                self._tell_breakpoints(attachment, finished)
            if not any(view.events for view in views):
                self._refuse_empty()
                return 1
            return 0 if finished is not None else 1
        profile = profile_in(module, tables, names)
        self._print(profile)
        if self._given.stacks is not None:
            from dprobes.sinks.stacks.stack_profile import StackProfile

            stacks = StackProfile(paths_in(tables, names), "nanoseconds", self._given.place)
            write_stacks(stacks, self._given.stacks)
        self._tell_losses(tables, attachment)
        if finished is not None:
            self._tell_breakpoints(attachment, finished)
        return 0 if finished is not None and profile.edges else 1

    def _print(self, profile: CallProfile) -> None:
        given = self._given
        if not profile.edges:
            self._refuse_empty()
        elif given.stacks == FOLDED:
            pass  # the stacks are the output
        elif given.as_json:
            print_lines(json_lines(profile))
        else:
            print_table(TEXT_HEADER, list(text_rows(profile, given.rows)))
        if given.callgrind is not None:
            _write(given.callgrind, "\n".join(callgrind_lines(profile, given.scope.command)) + "\n")

    def _refuse_empty(self) -> None:
        console.error(f"no call of a function of '{self._module.name}' has ended")

    def _tell_losses(self, tables: Sequence[TableContents], attachment: Attachment) -> None:
        """Print how many calls are missing in the profile, and why."""
        lost = sum(table.lost for table in tables)
        if lost:
            console.warning(f"{counted(lost, 'call')} had no room in the tables: the profile is incomplete")
        deep = sum(attachment.local_variables())
        if deep:
            depth = depth_of(keeps_paths=self._given.stacks is not None)
            console.warning(_deep_calls(deep, depth, is_graph=self._given.is_graph))

    def _tell_breakpoints(self, attachment: Attachment, finished: Finished) -> None:
        """Print which functions took breakpoints, if others had jumps: their times include those of the tracer."""
        of_instruction = self._code.entries | self._code.exits
        slow: dict[str, None] = {}
        has_jumps = False
        jump = fastest_engine()
        for probe, count in zip(attachment.probes, finished.counts, strict=False):
            has_jumps |= any(each.startswith(jump) for each in count.executed)
            if count.hits and not all(each.startswith(jump) for each in count.executed):
                slow[of_instruction.get(probe.instruction.offset, probe.function)] = None
        if slow and has_jumps:
            names = ", ".join(slow)
            console.warning(f"the times of {names} and their callers include breakpoints, tens of microseconds a call")


def _deep_calls(number: int, depth: int, *, is_graph: bool) -> str:
    """Return the warning about calls for which a shadow stack of ``depth`` frames had no room."""
    if is_graph:
        are, were = ("1 call is", "it was") if number == 1 else (f"{number} calls are", "they were")
        return f"{are} missing: {were} more than {depth} calls deep"
    if number == 1:
        return f"1 call was more than {depth} calls deep: its time is that of its caller"
    return f"{number} calls were more than {depth} calls deep: their time is that of their callers"


def _write(path: Path, text: str) -> None:
    """Replace the contents of a file; raise ``FormatError`` if that fails."""
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")  # names of files may be no UTF-8
    except OSError as error:
        raise FormatError(f"'{path}': {reason_of(error)}") from error


@click.command("profile")
@click.argument("place", metavar="MODULE[:PATTERN]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.option(
    "--callees",
    "with_callees",
    is_flag=True,
    help="Also profile the functions of MODULE that calls from PATTERN reach.",
)
@command_option("Start this command, without a shell.")
@process_option("Profile this running process, until Ctrl-C.")
@follow_option("Profile child processes as well.")
@symbols_option
@engine_option("The engine; with auto, it is inline, because the others take microseconds for each call.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Print only the N functions with most time.")
@click.option("--json", "as_json", is_flag=True, help="Print functions and call edges as JSON lines.")
@click.option("--callgrind", type=PROGRAM_FILE, metavar="FILE", help="Also write FILE in callgrind's format.")
@click.option(
    "--stacks",
    metavar="folded|FILE",
    help="Print the exclusive time of each path of calls, folded, or write it to FILE: .html is a flame graph, "
    ".pb.gz is for pprof, .folded is text.",
)
@click.option("--graph", "is_graph", is_flag=True, help="Print each entry and return, indented, instead of a profile.")
@click.option(
    "--top", "with_top", is_flag=True, help="While it runs, print the functions with most time since the last table."
)
@click.option("--interval", type=DURATION, metavar="TIME", help="The interval of --top. Default: 1s.")
@verbose_option
def profile_command(
    place: str,
    arguments: tuple[str, ...],
    with_callees: bool,
    command_line: str | None,
    pid: int | None,
    follow: bool,
    symbols: Path | None,
    engine_name: str,
    rows: int | None,
    as_json: bool,
    callgrind: Path | None,
    stacks: str | None,
    is_graph: bool,
    with_top: bool,
    interval: float | None,
    verbose: bool,
) -> int:
    """
    Print calls, inclusive and exclusive wall time of functions of a module.

    MODULE is a path or a name, as in programs. PATTERN selects functions, such as 'sqlite3Btree*'; the default is all.
    With --callees these and all functions of MODULE that calls from them may reach are profiled, within calls of the
    selected functions only. Time in functions that are not profiled counts as time of the profiled function that called
    them.
    """
    scope = scope_of(command_line, arguments, pid, None, None, follow=follow)
    if scope.kind is ScopeKind.EVERYWHERE:
        raise click.UsageError("profile needs a command (-c COMMAND, or -- COMMAND) or a process (-p PID)")
    if with_callees and not place.partition(":")[2]:
        raise click.UsageError(f"--callees needs the function whose calls count: {place}:FUNCTION")
    others = {"--json": as_json, "--stacks": stacks, "--callgrind": callgrind, "--top": with_top, "--rows": rows}
    if is_graph and (given_other := next((name for name, value in others.items() if value), None)):
        raise click.UsageError(f"--graph prints each call instead of a profile: leave out {given_other}")
    if with_top and (as_json or stacks == FOLDED):
        raise click.UsageError(f"--top prints tables: leave out {'--json' if as_json else '--stacks folded'}")
    if interval is not None and not with_top:
        raise click.UsageError("--interval needs --top")
    if as_json and stacks == FOLDED:
        raise click.UsageError("--json and --stacks folded exclude each other: both print on standard output")
    if rows is not None and (as_json or stacks == FOLDED):
        raise click.UsageError(f"--rows is for the table: leave out {'--json' if as_json else '--stacks folded'}")
    if stacks is not None:
        if is_perfetto(stacks):
            raise click.UsageError(f"--stacks: '{stacks}' would need the time of each call; profile adds the times up")
        check_stacks_target(stacks)
    if callgrind is not None:
        _write(callgrind, "")  # an unusable path is an error before the command runs, not after it
    top = (interval or _TOP_SECONDS) if with_top else None
    given = _Options(
        place, scope, engine_name, symbols, rows, as_json, callgrind, stacks, with_callees, top, is_graph, verbose
    )
    progress = Progress()
    try:
        with contextlib.ExitStack() as stack:
            face = _ProfileFace(given, progress, stack)
            return run_steps.run_program(face.request(), face)
    finally:
        progress.end()
