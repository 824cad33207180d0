"""The run of a program, for as long as a command or process lives, or until Ctrl-C, with all that is printed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.cli.option_values import compile_options, names_of, program_of, usage_error
from dprobes.cli.output.run_views import TableOptions, TableOutput, Views
from dprobes.cli.progress import Progress
from dprobes.cli.record_options import has_structure, log_items_of, note_addresses, printed_items, say_problems
from dprobes.cli.resolved_program import files_of, load_program, module_of
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.scope_and_engine import check_scope, note_engine, note_process, note_running_cpus, scope_of, words_of
from dprobes.diagnostics import Severity
from dprobes.engines.engine_options import EngineOptions
from dprobes.engines.engine_registry import engine_row
from dprobes.engines.insertion import insertion
from dprobes.formatters.table_addresses import has_addresses, names_for
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.record.log_record import Item
from dprobes.record.record_origin import RecordSource
from dprobes.resolve.probed_space import Space, space_of
from dprobes.rpn.keyed_tables import FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.cli.output.run_outputs import Outputs
    from dprobes.cli.output.stack_profiles import StacksOptions
    from dprobes.cli.runs.run_options import RunOptions
    from dprobes.cli.runs.tool_blocks import ToolBlocks
    from dprobes.engines.companion_programs import PreparedCompanions

__all__ = ["carry_out"]

_STANDARD_ERROR = 2
_CONSOLE = "console"
_FOR_PROGRAMS = ("json", "csv", "binary")

_GDB = ("gdb", "-q", "-p", "%p", "-ex", "handle SIGSTOP nostop noprint nopass")
"""The debugger at a terminal. Attaching to a stopped process makes the kernel report the stop once more later."""


def carry_out(given: RunOptions) -> int:
    """Run what a line says, and return the exit status."""
    progress = Progress()
    try:
        return _run(given, progress)
    finally:
        progress.end()  # before an error is printed


def _run(given: RunOptions, progress: Progress) -> int:
    chosen = program_of(given.file, given.text)
    scope = scope_of(given.command_line, given.arguments, given.pid, given.cgroup, given.user, follow=given.follow)
    if given.exit_status and not scope.command:
        raise usage_error("--exit-status needs a command (-c COMMAND)")
    named = [*given.targets, *([f"file:{given.output}"] if given.output is not None else [])]
    wants_all = not {"json", "csv"}.isdisjoint((given.format_name, given.log_format)) or has_structure(named)
    has_view = bool(given.counted or given.measured or given.summed or given.top or given.stacks)
    if scope.command and _is_for_programs(
        given.output, given.format_name, given.targets, given.log_format, has_view=has_view
    ):
        # Whoever reads records gets nothing else: what the command prints goes where our messages do.
        scope = replace(scope, output=_STANDARD_ERROR)
    as_json = given.format_name == "json"
    aside = not as_json and _is_for_programs(
        given.output, given.format_name, given.targets, given.log_format, has_view=has_view
    )
    formats = {given.log_format or given.format_name} if given.targets else set()
    if given.output is not None or not (given.targets or has_view):
        formats.add(given.format_name)
    items = log_items_of(given.log_items, is_tree=scope.is_tree, all_by_default=wants_all, for_people="text" in formats)
    views = Views(
        given.counted,
        given.measured,
        given.summed,
        given.by,
        top=given.top,
        stacks=_stacks_of(given.stacks, given.weight, given.baseline),
    )
    items |= views.items
    options = EngineOptions(
        allow_write=given.allow_write,
        debugger=_debugger(given.debugger),
        core_directory=given.core_directory,
        overhead=given.overhead,
        own={"pid_namespace": given.pid_namespace, "exact": given.exact, "ring_size": given.ring_size << 20},
    )
    engine_name, scope = check_scope(given.engine_name, scope, options)
    if given.stop_cpus:
        note_running_cpus(engine_name)
    where = insertion(engine_name, scope, options, allow_self=given.allow_self)
    note_process(scope, where.scope)
    scope = where.scope
    progress.begin("looking for the probepoints")
    loaded = load_program(
        chosen,
        compile_options(given.defines, given.includes, given.cpp, allow_write=given.allow_write),
        symbols=given.symbols,
        groups=names_of(given.groups),
        types=names_of(given.types),
        verify_build_id=not given.dont_verify_build_id,
        verify_opcodes=not given.dont_verify_opcodes,
        module=module_of(scope),
        files=files_of(chosen, given.symbols, scope, engine=engine_name, kernel_types=given.kernel_types),
    )
    if (directory := given.templates or _templates_beside(given.file)) is not None:
        loaded = loaded.with_templates(directory)
    elif loaded.templates:
        from dprobes.formatters.templates.template_collection import templates_of

        say_problems(templates_of(loaded.templates), "the program" if given.file is None else f"'{given.file}'")
    items |= printed_items(loaded.templates)
    if space_of(loaded.program) is not Space.KERNEL:  # whose addresses are the same for all processes
        note_addresses(loaded.templates, items)
    program = loaded.program
    if loaded.is_joined:
        from dprobes.engines.companion_programs import prepared_companions
        from dprobes.rpn.rpn_program import joined_program

        program = joined_program(loaded.programs)
    derived = derived_templates(program)
    source = RecordSource(1, program.name, program.name, program.major, templates=loaded.templates, derived=derived)
    tables_shown = tuple(table for table in loaded.program.tables if table.name != FAULTS)
    # Where samples and accesses are is said by their ip, in outputs that have fields.
    is_anywhere = any(not each.is_in_code for each in program.definitions)
    is_user = space_of(program) is not Space.KERNEL
    names_ip = is_anywhere and is_user and (wants_all or views.names_functions or given.top)
    if source.may_show_addresses or names_ip or given.stacks is not None or has_addresses(tables_shown):
        from dprobes.target.process_images import ProcessImages

        source = replace(source, images=ProcessImages())
        if given.counted or given.by:
            items |= Item.PID | Item.PROCESS_NAME | Item.TIME  # whose address it is
    if is_anywhere and (views.names_functions or given.top):
        items |= Item.IP | Item.PID | Item.PROCESS_NAME | Item.TIME
    views.check(source)
    carries = given.output is not None or bool(given.targets)
    joined: PreparedCompanions | None = None
    if loaded.is_joined:
        joined = prepared_companions(where, loaded.programs, loaded.diagnostics, loaded.all_symbols, given.filters)
    else:
        program = views.at_the_hit(program, source, carries=carries, verbose=given.verbose)
    prepared = joined or where.prepare(program, loaded.diagnostics, loaded.symbols, filters=given.filters)
    engine = prepared.engine.name
    source = replace(source, kernel=prepared.engine.records_kernel)
    compiled = prepared.compiled
    progress.end()
    note_engine(engine, prepared.reason, verbose=given.verbose)
    # That the module is not there yet is of interest where it may still come.
    waits = compiled.resolved is None and engine_row(engine).waits_for_modules
    if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if waits or compiled.kernel is not None else ())):
        console.write(text)
    progress.begin("inserting the probepoints")
    inserted = prepared.session(items, images=source.images)
    how = TableOptions(given.rows, given.interval, as_json=as_json, aside=aside, prometheus=given.prometheus)
    printed = loaded.tool.shown if loaded.tool is not None else ()
    tables = TableOutput(how, inserted, len(tables_shown), names_for(source, tables_shown), printed)
    blocks: ToolBlocks | None = None
    if loaded.tool is not None:
        from dprobes.cli.runs.tool_blocks import ToolBlocks
        from dprobes.engines.companion_session import CompanionSession

        assert isinstance(inserted, CompanionSession)
        blocks = ToolBlocks(loaded.tool, inserted, tables, as_json=as_json, aside=aside)
        inserted.ready = blocks.begin
    with contextlib.ExitStack() as stack:
        outputs = None
        if named:
            outputs = stack.enter_context(_outputs_of(given, source, views))
        early = stack.enter_context(EarlyInterrupt(deferred=not scope.command))
        session = stack.enter_context(inserted)
        from dprobes.cli.runs.run_follower import Run

        # Standard output is there in any case: probes are armed before the modules for it are imported.
        outputs = outputs or stack.enter_context(_outputs_of(given, source, views))
        tables.also = outputs.send_tables
        if given.top:
            progress.end()  # the table is redrawn in its place
        run = Run(
            compiled.program,
            session,
            outputs,
            scope,
            progress,
            exit_status=given.exit_status,
            filters=given.filters,
            duration=given.duration,
        )
        with views.shown(compiled.program, session), tables.shown():
            if blocks is None:
                finished = run.follow(early)
            else:
                with blocks.repeated(run.await_beginning):
                    finished = run.follow(early)
                blocks.end()
        if run.is_over_in_time or (blocks is not None and blocks.has_quit):
            finished = run.end_command(finished)
        views.collect(session, compiled.architecture.word_size)
        views.print()
        tables.print()
        if compiled.kernel is None:
            tables.note_short_times(engine)
        if tables_shown:
            outputs.write_tables(session.tables()[: len(tables_shown)])
        return run.conclude(finished)


def _outputs_of(given: RunOptions, source: RecordSource, views: Views) -> Outputs:
    from dprobes.cli.output.run_outputs import Outputs

    log_format = given.log_format or given.format_name
    return Outputs(source, given.output, given.format_name, given.targets, log_format, views.sinks)


def _is_for_programs(
    output: Path | None, format_name: str, targets: Sequence[str], log_format: str | None, *, has_view: bool
) -> bool:
    """Return whether records go to standard output in a form that programs read."""
    if output is None and not targets and not has_view:
        return format_name in _FOR_PROGRAMS
    return _CONSOLE in targets and (log_format or format_name) in _FOR_PROGRAMS


def _templates_beside(file: Path | None) -> Path | None:
    """Return the directory of templates that comes with an example; None for other programs."""
    if file is None:
        return None
    from dprobes.cli.option_values import example_templates

    return example_templates(file)


def _stacks_of(target: str | None, weight: str | None, baseline: Path | None) -> StacksOptions | None:
    if target is None and weight is None and baseline is None:
        return None
    from dprobes.cli.output.stack_profiles import stacks_of

    return stacks_of(target, weight, baseline)


def _debugger(command_line: str | None) -> tuple[str, ...] | None:
    """Return the words of the debugger's command, None if a process is to be left stopped."""
    if command_line is None:
        return _GDB if os.isatty(0) and os.isatty(1) else None
    words = words_of(command_line, "debugger's command")
    if "%p" not in command_line.replace("%%", ""):
        raise usage_error("--debugger needs %p, where the process id goes: gdb -p %p")
    import shutil

    if shutil.which(words[0]) is None:
        raise usage_error(f"--debugger: command '{words[0]}' is not found")
    return words
