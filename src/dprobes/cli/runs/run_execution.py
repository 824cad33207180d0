"""The run of a program for the lifetime of a command or process, or until Ctrl-C, with all its output."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.cli.console import Progress
from dprobes.cli.option_values import chosen_groups, compile_options, names_of, program_of, usage_error
from dprobes.cli.output.run_views import TableOptions, TableOutput, Views
from dprobes.cli.record_options import has_structure, log_items_of, note_addresses, printed_items, say_problems
from dprobes.cli.resolved_program import files_of, load_program, module_of
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.scope_and_engine import check_scope, note_engine, note_process, note_running_cpus, scope_of, words_of
from dprobes.diagnostics import Severity
from dprobes.engines.ebpf.ebpf_options import RING_SIZE
from dprobes.engines.engine_interface import EngineOptions, Stop
from dprobes.engines.engine_registry import engine_row
from dprobes.errors import EngineError
from dprobes.formatters.table_addresses import has_addresses, names_for
from dprobes.record.log_record import Item
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.keyed_tables import FAULTS
from dprobes.rpn.program_needs import logs_stacks, patched_definitions
from dprobes.rpn.rpn_program import joined_program
from dprobes.runs import run_steps
from dprobes.runs.run_steps import ProgramInput, Request, record_source

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.api.compiled_program import CompiledProgram
    from dprobes.cli.output.run_outputs import Outputs
    from dprobes.cli.output.stack_profiles import StacksOptions
    from dprobes.cli.runs.run_follower import Run
    from dprobes.cli.runs.tool_blocks import ToolBlocks
    from dprobes.engines.attachment_group import AttachmentGroup
    from dprobes.engines.engine_interface import Attachment, Finished, Scope
    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Program
    from dprobes.runs.run_steps import RunPlan, Vantage

__all__ = ["RunOptions", "run_line"]

_STANDARD_ERROR = 2
_CONSOLE = "console"
_FOR_PROGRAMS = ("json", "csv", "binary")

_GDB = ("gdb", "-q", "-p", "%p", "-ex", "handle SIGSTOP nostop noprint nopass")
"""
The debugger at a terminal.

SIGSTOP is ignored there: when a debugger attaches to a stopped process, the kernel reports the stop once more later.
"""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The values of options and arguments of ``run``, which ``cli.verbs.run`` documents."""

    file: Path | None = None
    arguments: tuple[str, ...] = ()
    text: str | None = None
    command_line: str | None = None
    pid: int | None = None
    cgroup: str | None = None
    user: str | None = None
    defines: tuple[str, ...] = ()
    includes: tuple[Path, ...] = ()
    cpp: str | None = None
    allow_write: bool = False
    symbols: Path | None = None
    kernel_types: Path | None = None
    templates: Path | None = None
    filters: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    dont_verify_build_id: bool = False
    dont_verify_opcodes: bool = False
    engine_name: str = "auto"
    format_name: str = "text"
    log_items: tuple[str, ...] = ()
    output: Path | None = None
    targets: tuple[str, ...] = ()
    log_format: str | None = None
    top: bool = False
    counted: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    stacks: str | None = None
    weight: str | None = None
    baseline: Path | None = None
    rows: int | None = None
    interval: float | None = None
    prometheus: Path | None = None
    duration: float | None = None
    debugger: str | None = None
    core_directory: str = "."
    follow: bool = True
    pid_namespace: bool = False
    exact: bool = False
    ring_size: int = RING_SIZE >> 20
    overhead: float | None = None
    stop_cpus: bool = False
    allow_self: bool = False
    verbose: bool = False
    explain: bool = False
    exit_status: bool = False

    @property
    def has_view(self) -> bool:
        """True if a view is shown instead of records."""
        return bool(self.counted or self.measured or self.summed or self.top or self.stacks)


def run_line(given: RunOptions) -> int:
    """Execute ``dprobes run`` with the options of a command line, and return the exit status."""
    progress = Progress()
    try:
        with contextlib.ExitStack() as stack:
            face = _LineFace(given, progress, stack)
            return run_steps.run_program(face.request(), face)
    finally:
        progress.end()  # before an error is printed


class _LineFace(run_steps.Face[int]):
    """Steps of a run for a command line. ``stack`` closes what they open."""

    def __init__(self, given: RunOptions, progress: Progress, stack: contextlib.ExitStack) -> None:
        self._given = given
        self._progress = progress
        self._stack = stack
        self._chosen = program_of(given.file, given.text)
        self._asked = scope_of(
            given.command_line, given.arguments, given.pid, given.cgroup, given.user, follow=given.follow
        )
        if given.exit_status and not self._asked.command:
            raise usage_error("--exit-status needs a command (-c COMMAND)")
        self._named = [*given.targets, *([f"file:{given.output}"] if given.output is not None else [])]
        formats = (given.format_name, given.log_format)
        self._wants_all = not {"json", "csv"}.isdisjoint(formats) or has_structure(self._named)
        self._items = self._header_items()
        self._views = Views(
            given.counted,
            given.measured,
            given.summed,
            given.by,
            top=given.top,
            stacks=_stacks_of(given.stacks, given.weight, given.baseline),
        )
        self._tables: TableOutput | None = None
        self._blocks: ToolBlocks | None = None
        self._outputs: Outputs | None = None

    def _header_items(self) -> Item:
        given = self._given
        formats = {given.log_format or given.format_name} if given.targets else set()
        if given.output is not None or not (given.targets or given.has_view):
            formats.add(given.format_name)
        return log_items_of(
            given.log_items,
            is_tree=self._asked.is_tree,
            all_by_default=self._wants_all,
            for_people="text" in formats,
        )

    def request(self) -> Request:
        """Return the request that corresponds to the options of the command line: processes, engine, record options."""
        given, scope = self._given, self._asked
        if scope.command and _is_for_programs(given):
            # The output of records must not be mixed with the command's, which goes to standard error.
            scope = replace(scope, output=_STANDARD_ERROR)
        options = EngineOptions(
            allow_write=given.allow_write,
            debugger=_debugger(given.debugger),
            core_directory=given.core_directory,
            overhead=given.overhead,
            own={"pid_namespace": given.pid_namespace, "exact": given.exact, "ring_size": given.ring_size << 20},
        )
        engine, scope = check_scope(given.engine_name, scope, options)
        if given.stop_cpus:
            note_running_cpus(engine)
        return Request(engine, scope, options, allow_self=given.allow_self)

    # The steps of the run

    def load(self, vantage: Vantage) -> ProgramInput:
        """Read the program, and determine the items that its records have to carry."""
        given, scope = self._given, vantage.request.scope
        note_process(self._asked, scope)
        self._progress.begin("looking for the probepoints")
        loaded = self._loaded = self._with_templates(self._read(vantage))
        items = self._items | self._views.items | printed_items(loaded.templates)
        if space_of(loaded.program) is not Space.KERNEL:  # kernel addresses are the same for all processes
            note_addresses(loaded.templates, items)
        program = joined_program(loaded.programs)
        if patched_definitions(program):
            self._check_patches(scope)
        self._views.use_tables(self._shown_tables, logs_stacks=logs_stacks(program))
        source, items = self._described(program, items)
        self._views.check(source)
        programs = loaded.programs
        if not loaded.is_joined:
            carries = given.output is not None or bool(given.targets)
            programs = (self._views.at_the_hit(program, source, carries=carries, verbose=given.verbose),)
        return ProgramInput(
            programs,
            loaded.all_symbols,
            loaded.diagnostics,
            source,
            items,
            given.filters,
            is_group=loaded.is_joined,
        )

    def _check_patches(self, scope: Scope) -> None:
        """Raise ``DprobesError`` for a scope or options that a program with patches cannot have."""
        given = self._given
        if scope.pid is None and scope.endpoint is None:
            message = "a patch needs a running process, whose libraries are loaded"
            raise EngineError(message, hint="give the id of the process with -p")
        of_hits = {
            "--filter": given.filters, "--count": given.counted, "--hist": given.measured, "--sum": given.summed,
            "--stacks": given.stacks, "--top": given.top,
        }  # fmt: skip
        for option, value in of_hits.items():
            if value:
                raise usage_error(f"{option} is for hits, and a patch has none")

    def _read(self, vantage: Vantage) -> CompiledProgram:
        given = self._given
        return load_program(
            self._chosen,
            compile_options(given.defines, given.includes, given.cpp, allow_write=given.allow_write),
            symbols=given.symbols,
            groups=chosen_groups(given.groups),
            types=names_of(given.types),
            verify_build_id=not given.dont_verify_build_id,
            verify_opcodes=not given.dont_verify_opcodes,
            module=module_of(vantage.request.scope),
            files=files_of(self._chosen, given.symbols, vantage, kernel_types=given.kernel_types),
        )

    def _with_templates(self, loaded: CompiledProgram) -> CompiledProgram:
        """
        Return the program with the templates of ``--templates`` or of an example.

        Without any, return it unchanged, and print errors in its own templates.
        """
        given = self._given
        if (directory := _templates_of(given)) is not None:
            return loaded.with_templates(directory)
        if loaded.templates:
            from dprobes.formatters.templates.template_collection import templates_of

            say_problems(templates_of(loaded.templates), "the program" if given.file is None else f"'{given.file}'")
        return loaded

    def _described(self, program: Program, items: Item) -> tuple[RecordSource, Item]:
        """Return the description of the records, and the items that they need for it."""
        given, views = self._given, self._views
        # In outputs with fields the ip shows the location of samples and accesses.
        is_anywhere = any(not each.is_in_code for each in program.definitions)
        counts_places = is_anywhere and (views.names_functions or given.top)
        names_ip = space_of(program) is not Space.KERNEL and (counts_places or (is_anywhere and self._wants_all))
        source = record_source(
            program,
            self._loaded.templates,
            number=1,
            names_addresses=names_ip or given.stacks is not None or has_addresses(self._shown_tables),
        )
        if source.images is not None and (given.counted or given.by):
            items |= Item.PID | Item.PROCESS_NAME | Item.TIME  # the process of the address
        if counts_places:
            items |= Item.IP | Item.PID | Item.PROCESS_NAME | Item.TIME
        return source, items

    def announce(self, planned: RunPlan) -> None:
        """Print the engine and warnings; open the outputs of records."""
        compiled = planned.compiled
        self._progress.end()
        note_engine(planned.engine, planned.reason, verbose=self._given.verbose)
        # A missing module is worth a note if it may still be mapped later.
        waits = compiled.resolved is None and engine_row(planned.engine).waits_for_modules
        notes = (Severity.NOTE,) if waits or compiled.kernel is not None else ()
        if text := compiled.render(Severity.WARNING, *notes):
            console.write(text)
        self._progress.begin("inserting the probepoints")
        self._source = planned.source
        if self._named:
            self._outputs = self._stack.enter_context(self._opened_outputs())
        is_command = bool(planned.members[0].job.scope.command)
        self._early = self._stack.enter_context(EarlyInterrupt(deferred=not is_command))

    def ready(self, group: AttachmentGroup) -> None:
        """Execute the ``begin`` blocks of the program, once all initial probepoints are inserted."""
        if (tool := self._loaded.tool) is not None:
            from dprobes.cli.runs.tool_blocks import ToolBlocks

            tables = self._table_output(group)
            as_json, aside = self._json
            self._blocks = ToolBlocks(tool, group, tables, as_json=as_json, aside=aside)
            self._blocks.begin()

    def follow(self, planned: RunPlan, attachment: Attachment) -> int:
        """Print records and messages until the attachment ends, and return the exit status."""
        self._stack.callback(attachment.close)
        from dprobes.cli.output.run_summary import SummaryOptions
        from dprobes.cli.runs.run_follower import Run

        names: dict[int, str] = {}
        if planned.source.templates:
            from dprobes.formatters.templates.template_collection import probe_names

            names = probe_names(planned.source)
        given, compiled = self._given, planned.compiled
        # Standard output exists in any case: probes are armed before its modules are imported.
        outputs = self._outputs or self._stack.enter_context(self._opened_outputs())
        tables = self._table_output(attachment)
        tables.also = outputs.send_tables
        if given.top:
            self._progress.end()  # the table is redrawn in its place
        run = Run(
            compiled.program,
            attachment,
            outputs,
            planned.members[0].job.scope,
            self._progress,
            SummaryOptions(engine_row(planned.engine).name, given.rows, given.explain, names),
            exit_status=given.exit_status,
            filters=given.filters,
            duration=given.duration,
        )
        with self._views.shown(compiled.program, attachment), tables.shown():
            finished = self._finished(run, attachment)
        self._views.collect(attachment, compiled.architecture.word_size)
        self._views.collect_stacks(attachment.tables(), tables.names)
        self._views.print()
        tables.print()
        if compiled.kernel is None:
            tables.note_short_times(planned.engine, self._views.shortest_times)
        if shown := self._shown_tables:
            outputs.write_tables(attachment.tables()[: len(shown)])
        return run.conclude(finished)

    def _finished(self, run: Run, attachment: Attachment) -> Finished | None:
        """Follow the run, with the blocks of the tool; return its end, or None if the engine reported none."""
        blocks = self._blocks
        if blocks is None:
            finished = run.follow(self._early)
        else:
            if not (self._loaded.program.definitions or self._asked.is_tree or blocks.are_repeated):
                attachment.change([Stop()])  # nothing can happen any more
            with blocks.repeated(run.await_beginning):
                finished = run.follow(self._early)
            blocks.end()
        is_ended = run.is_over_in_time or (blocks is not None and blocks.has_quit)
        return run.end_command(finished) if is_ended else finished

    # Outputs of records and tables

    @property
    def _shown_tables(self) -> tuple[Table, ...]:
        """Tables of the program, without the table of faults, which comes after them and is not shown."""
        return tuple(table for table in self._loaded.program.tables if table.name != FAULTS)

    @property
    def _json(self) -> tuple[bool, bool]:
        """Two flags: tables are JSON, and tables go to standard error because records occupy standard output."""
        as_json = self._given.format_name == "json"
        return as_json, not as_json and _is_for_programs(self._given)

    def _table_output(self, attachment: Attachment) -> TableOutput:
        """Return the printer of keyed tables for the options of the command line."""
        if self._tables is None:
            given, shown = self._given, self._shown_tables
            as_json, aside = self._json
            how = TableOptions(given.rows, given.interval, as_json=as_json, aside=aside, prometheus=given.prometheus)
            names = names_for(self._source, shown)
            left_out = {*(self._loaded.tool.shown if self._loaded.tool is not None else ()), self._views.profiled}
            self._tables = TableOutput(how, attachment, len(shown), names, left_out)
        return self._tables

    def _opened_outputs(self) -> Outputs:
        from dprobes.cli.output.run_outputs import Outputs

        given = self._given
        log_format = given.log_format or given.format_name
        return Outputs(self._source, given.output, given.format_name, given.targets, log_format, self._views.sinks)


def _is_for_programs(given: RunOptions) -> bool:
    """Return whether records go to standard output in a machine-readable form."""
    if given.output is None and not given.targets and not given.has_view:
        return given.format_name in _FOR_PROGRAMS
    return _CONSOLE in given.targets and (given.log_format or given.format_name) in _FOR_PROGRAMS


def _templates_of(given: RunOptions) -> Path | None:
    """Return the requested directory of templates, or that of an example, or None for other programs."""
    from dprobes.cli.option_values import example_templates, is_untemplated_example

    if given.templates is not None:
        return None if is_untemplated_example(given.file, given.templates) else given.templates
    return None if given.file is None else example_templates(given.file)


def _stacks_of(target: str | None, weight: str | None, baseline: Path | None) -> StacksOptions | None:
    if target is None and weight is None and baseline is None:
        return None
    from dprobes.cli.output.stack_profiles import stacks_of

    return stacks_of(target, weight, baseline)


def _debugger(command_line: str | None) -> tuple[str, ...] | None:
    """Return the words of the debugger's command, or None if a process is to be left stopped instead."""
    if command_line is None:
        return _GDB if os.isatty(0) and os.isatty(1) else None
    words = words_of(command_line, "debugger's command")
    if "%p" not in command_line.replace("%%", ""):
        raise usage_error("--debugger needs %p, where the process id goes: gdb -p %p")
    import shutil

    if shutil.which(words[0]) is None:
        raise usage_error(f"--debugger: command '{words[0]}' is not found")
    return words
