"""
The verb ``profile``: calls and times of functions of a module, by a shadow stack of each thread.

::

    entry of a function   push a frame: stack pointer, function, time at the end of the handler
    exit of a function    read the time; pop the frames at or below the stack pointer, and add up their times

A frame is identified by the stack pointer at the entry, where the return address is. A frame at or below the stack
pointer of a later entry or exit has ended, even if its exit was not seen: by ``longjmp``, an exception, or a jump to
another function (a tail call), whose caller is then the caller of the jumping function. So no unwinder needs a probe.

The program is in DProbes C. It has one handler for all entries and one for all exits; an engine needs nothing else.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_lines, print_table
from dprobes.cli.output.call_profile import (
    OUTSIDE,
    TEXT_HEADER,
    CallEdge,
    CallProfile,
    callgrind_lines,
    json_lines,
    text_rows,
)
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.scope_and_engine import (
    check_scope,
    engine_option,
    note_engine,
    note_process,
    scope_of,
    verbose_option,
)
from dprobes.cli.shared_options import PROCESS_ID, PROGRAM_FILE, symbols_option
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import EngineOptions, ScopeKind
from dprobes.engines.engine_registry import AUTO, fastest_engine
from dprobes.errors import FormatError, TargetError, reason_of
from dprobes.record.log_record import Item
from dprobes.rpn.rpn_program import Code
from dprobes.runs import run_steps
from dprobes.runs.run_steps import ProgramInput, Request, record_source
from dprobes.target.code.function_exits import CallFrames, ExitKind, function_exits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment, Finished, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.runs.run_steps import RunPlan, Vantage
    from dprobes.target.code.function_exits import Exits
    from dprobes.target.probed_module import Module
    from dprobes.target.process_images import ProcessImages

__all__ = ["profile_command"]

# The program.

DEPTH = 236
"""Maximum number of frames of a shadow stack; four words of each are variables of the thread, of which 1024 exist."""

_HEADS_SHIFT = 58
_HEADS = 1 << 64 - _HEADS_SHIFT
"""Number of words in which a thread finds whether a function is active, by a hash of its address."""

FUNCTIONS_MAX = 4096
"""Maximum number of functions; each entry and exit has a copy of its handler, some kilobytes of code."""

_ROOM = 1 << 16
"""Number of call edges for which the tables have room."""

_STANDARD_ERROR = 2

_DECLARATIONS = f"""
thread unsigned long depth;
thread unsigned long heads[{_HEADS}];       // the outermost active function of each hash
thread unsigned long places[{DEPTH}];       // the stack pointer at the entry times 4, and a kind of frame
thread unsigned long functions[{DEPTH}];    // the address of the entry
thread unsigned long begins[{DEPTH}];       // the time of the entry
thread unsigned long children[{DEPTH}];     // the time of calls from the frame
static unsigned long too_deep;
"""

_PLAIN, _RECURSIVE, _OWNER = range(3)
"""Kinds of frames: outermost one of its function; within a call of itself; outermost one that owns its head."""


def _hash(function: str) -> str:
    return f"({function} * 0x9E3779B97F4A7C15) >> {_HEADS_SHIFT}"


def _end_frames(*, returning: bool) -> str:
    """
    Return code that ends the frames at or below the stack pointer at the time ``now``; ``d`` is the depth.

    With ``returning`` the frame at the stack pointer is that of the function that is left.
    """
    left = "if ((places[d] >> 2) != sp) " if returning else ""
    return f"""
    while (d > 0 && places[d - 1] <= here) {{
        d = d - 1;
        unsigned long took = now - begins[d], own = took - children[d], function = functions[d], caller = 0;
        if (d > 0) {{
            caller = functions[d - 1];
            children[d - 1] = children[d - 1] + took;
        }}
        unsigned long kind = places[d] & 3;
        @inclusive[(void *)caller, (void *)function] = avg(took);
        @exclusive[(void *)caller, (void *)function] = sum(own);
        if (kind == {_RECURSIVE}) @recursive[(void *)function] = sum(took);
        if (kind == {_OWNER}) heads[{_hash("function")}] = 0;
        {left}@left[(void *)function]++;
    }}
    depth = d;"""


def _entry_handler() -> str:
    """Return the handler of entries."""
    return f"""{{
    unsigned long d = depth, here = sp << 2 | 3;
    if (d > 0 && places[d - 1] <= here) {{
        unsigned long now = nsecs;
        {_end_frames(returning=False)}
    }}
    if (d >= {DEPTH}) {{
        too_deep++;
        return;
    }}
    unsigned long entered = pc, kind = {_PLAIN}, head = {_hash("pc")}, at = d;
    if (heads[head] == 0) {{
        heads[head] = entered;
        kind = {_OWNER};
    }} else if (heads[head] == entered) {{
        kind = {_RECURSIVE};
    }} else {{
        while (at > 0 && kind == {_PLAIN}) {{
            at = at - 1;
            if (functions[at] == entered) kind = {_RECURSIVE};
        }}
    }}
    places[d] = sp << 2 | kind;
    functions[d] = entered;
    children[d] = 0;
    depth = d + 1;
    begins[d] = nsecs;
}}"""


def _exit_handler() -> str:
    """Return the handler of exits, which runs before the return or jump."""
    return f"""{{
    unsigned long now = nsecs, d = depth, here = sp << 2 | 3;
    {_end_frames(returning=True)}
}}"""


class _ProfiledCode(NamedTuple):
    """
    Code of the functions to be profiled.

    ``entries`` maps the file offset of an entry to the function's name, ``exits`` that of an instruction that leaves a
    function. ``left_out`` maps the name of a function that cannot be profiled to the reason.
    """

    entries: dict[int, str]
    exits: dict[int, str]
    left_out: dict[str, str]


def _profiled_code(module: Module, pattern: str) -> _ProfiledCode:
    """
    Return the code of the functions that match a pattern.

    Raise ``TargetError`` if there is none that can be profiled, or if there are too many.
    """
    from dprobes.target.matching_functions import matching_functions
    from dprobes.target.readable_names import Demangler

    functions, _ = matching_functions(module, pattern)
    frames, demangler = CallFrames(module.elf), Demangler()
    entries: dict[int, str] = {}
    exits: dict[int, str] = {}
    left_out: dict[str, str] = {}
    for function in functions:
        name = demangler.name_of(function.name)
        try:
            found = function_exits(module, frames, function.address, function.size)
            _check_exits(module, found, function.offset)
        except TargetError as error:
            left_out[name] = error.message
            continue
        entries[function.offset] = name
        exits |= {each.offset: name for each in found.exits}
    file = module.path.name
    if not entries:
        reason = next(iter(left_out.values()), "no function matches")
        raise TargetError(
            f"no function '{pattern}' of '{file}' can be profiled: {reason}",
            hint=f"dprobes list {file} prints the functions",
        )
    if len(entries) > FUNCTIONS_MAX:
        raise TargetError(
            f"'{pattern}' matches {len(entries)} functions of '{file}'; profile takes at most {FUNCTIONS_MAX}",
            hint=f"name fewer functions: dprobes profile '{file}:PATTERN'",
        )
    return _ProfiledCode(entries, exits, left_out)


def _check_exits(module: Module, found: Exits, entry: int) -> None:
    """Raise ``TargetError`` if the exits of a function, whose entry has a file offset, cannot all be recognized."""
    from iced_x86 import FlowControl

    from dprobes.target.code.machine_code import instructions_between

    if found.goes_back:
        raise TargetError("it jumps to its own entry, as in a loop")
    for leaving in found.exits:
        if leaving.offset == entry:
            raise TargetError("its first instruction leaves it")
        if leaving.kind is ExitKind.JUMP:
            instruction = next(iter(instructions_between(module, leaving.address, leaving.address + 1)))[0]
            if instruction.flow_control == FlowControl.CONDITIONAL_BRANCH:
                raise TargetError("it may leave by a conditional jump")
            if instruction.flow_control == FlowControl.INDIRECT_BRANCH and not instruction.is_ip_rel_memory_operand:
                raise TargetError("it may leave by a jump to a computed address")


def _without_catches(definition: ProbeDefinition) -> ProbeDefinition:
    """
    Return a definition that catches no exceptions.

    Its handlers raise none, except if the program has overwritten the shadow stack. Engines count those. Without
    catches the depth of the RPN stack is known everywhere, and the handler can run without claiming a state.
    """
    code = definition.handler
    kept = [number for number, each in enumerate(code.instructions) if each.row.syntax != "sx <label>"]
    instructions = tuple(code.instructions[number] for number in kept)
    return replace(definition, handler=Code(instructions, {n: bisect_left(kept, at) for n, at in code.labels.items()}))


def _program_for(name: str, code: _ProfiledCode) -> Program:
    """Return the program that profiles code of the module with the given name."""
    from dprobes.api.compiled_program import parse_c
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Expression, Offset
    from dprobes.source_text import SourceFile

    first = next(iter(code.entries))
    text = f"{first:#x} {_entry_handler()}\n{first + 1:#x} {_exit_handler()}\n"
    # A path may contain characters that a string in a program may not, so it is no part of the text.
    source = SourceFile("<profile>", f"module profiled;\n{_DECLARATIONS}\n{text}")
    program = parse_c(source, Diagnostics(), CompileOptions(), "").programs[0]
    enter, leave = map(_without_catches, program.definitions)
    places = [*((offset, enter) for offset in code.entries), *((offset, leave) for offset in code.exits)]
    return replace(
        program,
        name=name,
        definitions=tuple(
            replace(definition, location=Offset(Expression(offset, None)), minor=0) for offset, definition in places
        ),
        tables=tuple(replace(table, room=_ROOM) for table in program.tables),
    )


# The results.


class _Names:
    """Names of the functions of a module by the addresses of their entries in processes."""

    def __init__(self, images: ProcessImages | None, entries: Mapping[int, str]) -> None:
        self._images = images
        self._entries = entries

    def name_of(self, address: int) -> str:
        """Return the function's name, or the address as a number if no process is known to have had it there."""
        for pid, since in self._images.code_at(address) if self._images is not None else ():
            image = None if self._images is None else self._images.at(pid, since)
            mapping = None if image is None else image.covering(address)
            if mapping is not None and (name := self._entries.get(address - mapping.start + mapping.offset)):
                return name
        return f"{address:#x}"


def _profile_of(module: str, tables: Sequence[TableContents], names: _Names) -> CallProfile:
    """Return the profile in the tables of a program; functions with one name are added up."""
    from dprobes.keyed.table_layout import row_parts

    found = {each.table.name: each for each in tables}

    def rows(name: str) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        for row in found[name].rows:
            keys = (part for part in row_parts(found[name].table, row.key, row.cells) if isinstance(part, int))
            yield tuple(names.name_of(key) if key else OUTSIDE for key in keys), row.cells

    sums: dict[tuple[str, ...], list[int]] = {}
    for key, (count, inclusive) in rows("inclusive"):
        mine = sums.setdefault(key, [0, 0, 0])
        mine[0] += count
        mine[1] += _signed(inclusive)
    for key, (exclusive,) in rows("exclusive"):
        sums.setdefault(key, [0, 0, 0])[2] += _signed(exclusive)
    edges = tuple(CallEdge(caller, callee, *values) for (caller, callee), values in sums.items())
    recursive: dict[str, int] = {}
    for (name,), (inclusive,) in rows("recursive"):
        recursive[name] = recursive.get(name, 0) + _signed(inclusive)
    left: dict[str, int] = {}
    for (name,), (count,) in rows("left"):
        left[name] = left.get(name, 0) + count
    return CallProfile(module, edges, recursive, left)


def _signed(number: int) -> int:
    """Return a number of 64 bits as a signed one: clocks of two CPUs may differ by some nanoseconds."""
    return number - (1 << 64) if number >> 63 else number


# The run.


class _Options(NamedTuple):
    """Values of the options of ``profile``."""

    place: str
    scope: Scope
    engine: str
    symbols: Path | None
    rows: int | None
    as_json: bool
    callgrind: Path | None
    verbose: bool


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
        if scope.command and self._given.as_json:
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
        self._code = _profiled_code(Module.load(path, given.symbols), pattern or "*")
        self._module = path
        program = _program_for(name, self._code)
        self._source = record_source(program, {}, names_addresses=True)
        return ProgramInput((program,), (symbols,), Diagnostics(), self._source, Item(0))

    def announce(self, planned: RunPlan) -> None:
        """Print the engine and the number of functions that are left out."""
        self._progress.end()
        note_engine(planned.engine, planned.reason, verbose=self._given.verbose)
        if left_out := self._code.left_out:
            name, reason = next(iter(left_out.items()))
            are = f"{len(left_out)} functions are" if len(left_out) > 1 else "1 function is"
            console.note(f"{are} not profiled, such as '{name}': {reason}")
        self._progress.begin("inserting the probepoints")
        is_command = bool(planned.members[0].job.scope.command)
        self._early = self._stack.enter_context(EarlyInterrupt(deferred=not is_command))

    def follow(self, planned: RunPlan, attachment: Attachment) -> int:
        """Wait for the end of the run, print the profile, and return the exit status."""
        self._stack.callback(attachment.close)
        from dprobes.cli.output.run_outputs import Outputs
        from dprobes.cli.output.run_summary import SummaryOptions
        from dprobes.cli.runs.run_follower import Run

        run = Run(
            planned.compiled.program,
            attachment,
            self._stack.enter_context(Outputs(self._source, None, "text", (), "text")),
            planned.members[0].job.scope,
            self._progress,
            SummaryOptions(planned.engine),
            exit_status=False,
        )
        finished = run.follow(self._early)
        tables = attachment.tables()
        profile = _profile_of(str(self._module), tables, _Names(self._source.images, self._code.entries))
        self._print(profile)
        self._tell_losses(tables, attachment)
        if finished is not None:
            self._tell_breakpoints(attachment, finished)
        return 0 if finished is not None and profile.edges else 1

    def _print(self, profile: CallProfile) -> None:
        given = self._given
        if not profile.edges:
            console.error(f"no call of a function of '{self._module.name}' has ended")
        elif given.as_json:
            print_lines(json_lines(profile))
        else:
            print_table(TEXT_HEADER, list(text_rows(profile, given.rows)))
        if given.callgrind is not None:
            _write(given.callgrind, "\n".join(callgrind_lines(profile, given.scope.command)) + "\n")

    def _tell_losses(self, tables: Sequence[TableContents], attachment: Attachment) -> None:
        """Print how many calls are missing in the profile, and why."""
        lost = sum(table.lost for table in tables)
        if lost:
            console.warning(f"{lost} times of calls had no room in the tables: the profile is incomplete")
        deep = sum(attachment.local_variables())
        if deep:
            console.warning(f"{deep} calls were more than {DEPTH} calls deep: their time is that of their callers")

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


def _write(path: Path, text: str) -> None:
    """Replace the contents of a file; raise ``FormatError`` if that fails."""
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")  # names of files may be no UTF-8
    except OSError as error:
        raise FormatError(f"'{path}': {reason_of(error)}") from error


@click.command("profile")
@click.argument("place", metavar="MODULE[:PATTERN]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.option("-c", "--command", "command_line", metavar="COMMAND", help="Start this command, without a shell.")
@click.option("-p", "--pid", type=PROCESS_ID, help="Profile this running process, until Ctrl-C.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Profile child processes as well.")
@symbols_option
@engine_option("The engine; with auto, it is inline, because the others take microseconds for each call.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Print only the N functions with most time.")
@click.option("--json", "as_json", is_flag=True, help="Print functions and call edges as JSON lines.")
@click.option("--callgrind", type=PROGRAM_FILE, metavar="FILE", help="Also write FILE in callgrind's format.")
@verbose_option
def profile_command(
    place: str,
    arguments: tuple[str, ...],
    command_line: str | None,
    pid: int | None,
    follow: bool,
    symbols: Path | None,
    engine_name: str,
    rows: int | None,
    as_json: bool,
    callgrind: Path | None,
    verbose: bool,
) -> int:
    """
    Print calls, inclusive and exclusive wall time of functions of a module.

    MODULE is a path or a name, as in programs. PATTERN selects functions, such as 'sqlite3Btree*'; the default is all.
    Time in functions that are not profiled counts as time of the profiled function that called them.
    """
    scope = scope_of(command_line, arguments, pid, None, None, follow=follow)
    if scope.kind is ScopeKind.EVERYWHERE:
        raise click.UsageError("profile needs a command (-c COMMAND, or -- COMMAND) or a process (-p PID)")
    if callgrind is not None:
        _write(callgrind, "")  # an unusable path is an error before the command runs, not after it
    given = _Options(place, scope, engine_name, symbols, rows, as_json, callgrind, verbose)
    progress = Progress()
    try:
        with contextlib.ExitStack() as stack:
            face = _ProfileFace(given, progress, stack)
            return run_steps.run_program(face.request(), face)
    finally:
        progress.end()
