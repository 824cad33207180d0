"""The verb ``run``: insert a program for as long as a command or process lives, or until Ctrl-C."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.enginechoice import (
    check_scope,
    engine_option,
    note_engine,
    note_running_cpus,
    stop_cpus_option,
    verbose_option,
)
from dprobes.cli.headeritems import LOG_ITEMS, log_items_of
from dprobes.cli.headstarts import HeadStart
from dprobes.cli.interrupts import EarlyInterrupt
from dprobes.cli.keptcompilation import KeptCompilation
from dprobes.cli.logoptions import has_structure, log_format_option
from dprobes.cli.options import (
    PROGRAM,
    PROGRAM_FILE,
    compile_options,
    filter_option,
    names_of,
    overhead_option,
    program_of,
    program_options,
    selection_options,
    stacks_options,
    sum_options,
    symbols_option,
    table_options,
    text_option,
    verification_options,
    word_of_program,
)
from dprobes.cli.output.outputs import Outputs
from dprobes.cli.output.tableoutput import TableOptions, TableOutput
from dprobes.cli.output.views import Views
from dprobes.cli.progress import Progress
from dprobes.cli.resolvedprogram import files_of, load_program, module_of
from dprobes.cli.runfollower import Run
from dprobes.cli.scopeoptions import scope_of, scope_options, words_of
from dprobes.cli.templateoption import note_addresses, printed_items, say_problems, templates_option
from dprobes.diagnostics import Severity
from dprobes.engines.ebpf.options import RING_SIZE
from dprobes.engines.insertion import insertion
from dprobes.engines.options import EngineOptions
from dprobes.engines.registry import engine_row
from dprobes.formatters import FORMATS
from dprobes.formatters.tablenames import has_addresses, names_for
from dprobes.formatters.templates.derived import derived_templates
from dprobes.record.layout import Item
from dprobes.record.origin import RecordSource
from dprobes.resolve.spaces import Space, space_of
from dprobes.rpn.tables import FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.cli.output.stackprofiles import StacksOptions
    from dprobes.engines.companions import PreparedCompanions

__all__ = ["command"]

_STANDARD_ERROR = 2
_CONSOLE = "console"
_FOR_PROGRAMS = ("json", "csv", "binary")

_GDB = ("gdb", "-q", "-p", "%p", "-ex", "handle SIGSTOP nostop noprint nopass")
"""The debugger at a terminal. Attaching to a stopped process makes the kernel report the stop once more later."""


@click.command("run")
@click.argument("file", type=PROGRAM, required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@text_option("Run")
@scope_options
@program_options
@symbols_option
@templates_option("Print records by the templates in this directory.")
@filter_option
@selection_options
@verification_options
@engine_option("The engine; auto chooses.", with_arguments=True)
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--log",
    "log_items",
    multiple=True,
    metavar="ITEMS",
    help=f"Header items, joined by commas: {', '.join(LOG_ITEMS)}, or ALL; text has PROCNAME,PID,TSC if nothing is "
    "said. Without -p and -c PROCNAME,PID are added.",
)
@click.option(
    "-o",
    "--output",
    type=PROGRAM_FILE,
    metavar="FILE",
    help="Write records there instead of to standard output. A name in .dpt appends to a trace file, "
    ".dptz to a compressed one.",
)
@click.option(
    "--log-target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="Send records there instead of to standard output; 'dprobes log-target kinds' lists the targets.",
)
@log_format_option(None)
@click.option("--top", is_flag=True, help="Show a live table of the probepoints instead of records.")
@click.option(
    "--count",
    "counted",
    multiple=True,
    metavar="FIELD[,FIELD...]",
    help="At the end, print how often each value occurred, instead of records.",
)
@click.option(
    "--hist",
    "measured",
    multiple=True,
    metavar="FIELD",
    help="At the end, print a histogram of the field, instead of records.",
)
@sum_options("At the end, print", ", instead of records")
@stacks_options
@table_options
@click.option(
    "--debugger",
    "debugger",
    metavar="COMMAND",
    help="What 'exit 1' starts, without a shell; %p is the process. Default: gdb -p %p at a terminal, else nothing.",
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
    "--pid-namespace", is_flag=True, help="Log pid and tid as seen in the process's own PID namespace (ebpf)."
)
@click.option(
    "--exact", is_flag=True, help="Probe exactly the named instruction, even if a neighbour is cheaper (ebpf)."
)
@click.option(
    "--ring-size",
    type=click.IntRange(min=1, max=1024),
    default=RING_SIZE >> 20,
    show_default=True,
    metavar="MIB",
    help="Size of the buffer for records not yet read, in MiB (ebpf).",
)
@overhead_option
@stop_cpus_option
@click.option("--allow-self", is_flag=True, help="Allow -p for a process of another dprobes.")
@verbose_option
@click.option("--exit-status", is_flag=True, help="Return the exit status of the command.")
def command(
    file: Path | None,
    arguments: tuple[str, ...],
    text: str | None,
    command_line: str | None,
    pid: int | None,
    cgroup: str | None,
    user: str | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    templates: Path | None,
    filters: tuple[str, ...],
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
    top: bool,
    counted: tuple[str, ...],
    measured: tuple[str, ...],
    summed: tuple[str, ...],
    by: tuple[str, ...],
    stacks: str | None,
    weight: str | None,
    baseline: Path | None,
    rows: int | None,
    interval: float | None,
    prometheus: Path | None,
    duration: float | None,
    debugger: str | None,
    core_directory: str,
    follow: bool,
    pid_namespace: bool,
    exact: bool,
    ring_size: int,
    overhead: float | None,
    stop_cpus: bool,
    allow_self: bool,
    verbose: bool,
    exit_status: bool,
) -> int:
    """
    Run the probe program FILE on a command or a process and its child processes, or on all processes.

    FILE is the source of a program, - for a source on standard input, a compiled program (dprobes build), or the name
    of an example, which is run with its template (dprobes examples). Records go to standard output; everything else,
    with a summary at the end, goes to standard error. With --format json and csv only records go to standard output,
    and the output of the command goes to standard error. Ctrl-C removes the probepoints; processes that were running
    before continue.
    """  # fmt: skip
    if text is not None and file is not None:
        file, arguments = None, (word_of_program(), *arguments)
    chosen = program_of(file, text)
    scope = scope_of(command_line, arguments, pid, cgroup, user, follow=follow)
    if exit_status and not scope.command:
        raise click.UsageError("--exit-status needs a command (-c COMMAND)")
    named = [*targets, *([f"file:{output}"] if output is not None else [])]
    wants_all = not {"json", "csv"}.isdisjoint((format_name, log_format)) or has_structure(named)
    has_view = bool(counted or measured or summed or top or stacks)
    if scope.command and _is_for_programs(output, format_name, targets, log_format, has_view=has_view):
        # Whoever reads records gets nothing else: what the command prints goes where our messages do.
        scope = replace(scope, output=_STANDARD_ERROR)
    as_json = format_name == "json"
    aside = not as_json and _is_for_programs(output, format_name, targets, log_format, has_view=has_view)
    formats = {log_format or format_name} if targets else set()
    if output is not None or not (targets or has_view):
        formats.add(format_name)
    items = log_items_of(log_items, is_tree=scope.is_tree, all_by_default=wants_all, for_people="text" in formats)
    views = Views(counted, measured, summed, by, top=top, stacks=_stacks_of(stacks, weight, baseline))
    items |= views.items
    options = EngineOptions(
        allow_write=allow_write,
        debugger=_debugger(debugger),
        core_directory=core_directory,
        overhead=overhead,
        own={"pid_namespace": pid_namespace, "exact": exact, "ring_size": ring_size << 20},
    )
    engine_name, scope = check_scope(engine_name, scope, options)
    if stop_cpus:
        note_running_cpus(engine_name)
    where = insertion(engine_name, scope, options, allow_self=allow_self)
    progress = Progress.of_command()
    progress.begin("looking for the probepoints")
    how_compiled, module = compile_options(defines, includes, cpp, allow_write=allow_write), module_of(scope)
    others = symbols, filters, groups, types, dont_verify_opcodes
    kept = KeptCompilation(chosen, how_compiled, module, engine_name, where.vantage, others=others)
    with kept.noting():
        loaded = kept.loaded or load_program(
            chosen,
            how_compiled,
            symbols=symbols,
            groups=names_of(groups),
            types=names_of(types),
            verify_build_id=not dont_verify_build_id,
            verify_opcodes=not dont_verify_opcodes,
            module=module,
            files=files_of(chosen, symbols, scope, engine=engine_name),
        )
    if (directory := templates or _templates_beside(file)) is not None:
        loaded = loaded.with_templates(directory)
    elif loaded.templates:
        from dprobes.formatters.templates.collection import templates_of

        say_problems(templates_of(loaded.templates), f"'{file}'")
    items |= printed_items(loaded.templates)
    if space_of(loaded.program) is not Space.KERNEL:  # whose addresses are the same for all processes
        note_addresses(loaded.templates, items)
    program = loaded.program
    if loaded.is_joined:
        from dprobes.engines.companions import prepared_companions
        from dprobes.rpn.joined import joined_program

        program = joined_program(loaded.programs)
    derived = derived_templates(program)
    source = RecordSource(1, program.name, program.name, program.major, templates=loaded.templates, derived=derived)
    tables_shown = tuple(table for table in loaded.program.tables if table.name != FAULTS)
    # Where samples and accesses are is said by their ip, in outputs that have fields.
    is_anywhere = any(not each.is_in_code for each in program.definitions)
    is_user = space_of(program) is not Space.KERNEL
    names_ip = is_anywhere and is_user and (wants_all or views.names_functions or top)
    if source.may_show_addresses or names_ip or stacks is not None or has_addresses(tables_shown):
        from dprobes.target.processimages import ProcessImages

        source = replace(source, images=ProcessImages())
        if counted or by:
            items |= Item.PID | Item.PROCESS_NAME | Item.TIME  # whose address it is
    if is_anywhere and (views.names_functions or top):
        items |= Item.IP | Item.PID | Item.PROCESS_NAME | Item.TIME
    views.check(source)
    carries = output is not None or bool(targets)
    joined: PreparedCompanions | None = None
    if loaded.is_joined:
        joined = prepared_companions(where, loaded.programs, loaded.diagnostics, loaded.all_symbols, filters)
    else:
        program = views.at_the_hit(program, source, carries=carries, verbose=verbose)
    with kept.noting():
        prepared = joined or where.prepare(
            program, loaded.diagnostics, loaded.symbols, filters=filters, known=kept.places_of(program), keeps=True
        )
        engine = prepared.engine.name
    source = replace(source, kernel=prepared.engine.records_kernel)
    compiled = prepared.compiled
    progress.end()
    head_start = click.get_current_context().find_object(HeadStart) or HeadStart(())
    head_start.settle(is_possible=engine == "ebpf" and not loaded.is_joined)
    note_engine(engine, prepared.reason, verbose=verbose)
    # That the module is not there yet is of interest where it may still come.
    waits = compiled.resolved is None and engine_row(engine).waits_for_modules
    if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if waits or compiled.kernel is not None else ())):
        console.write(text)
    progress.begin("inserting the probepoints")
    inserted = prepared.session(items, images=source.images)
    how = TableOptions(rows, interval, duration, as_json=as_json, aside=aside, prometheus=prometheus)
    printed = loaded.tool.shown if loaded.tool is not None else ()
    tables = TableOutput(how, inserted, len(tables_shown), names_for(source, tables_shown), printed)
    blocks: ToolBlocks | None = None
    if loaded.tool is not None:
        from dprobes.cli.toolblocks import ToolBlocks
        from dprobes.engines.companionsession import CompanionSession

        assert isinstance(inserted, CompanionSession)
        blocks = ToolBlocks(loaded.tool, inserted, tables, as_json=as_json, aside=aside)
        inserted.ready = blocks.begin
    with (
        Outputs(source, output, format_name, targets, log_format or format_name, views.sinks) as outputs,
        EarlyInterrupt(deferred=not scope.command) as early,
        head_start.noting(),
        inserted as session,
    ):
        kept.keep(loaded, compiled)
        head_start.keep(scope.pid, *kept.sources)
        tables.also = outputs.send_tables
        if top:
            progress.end()  # the table is redrawn in its place
        run = Run(compiled.program, session, outputs, scope, progress, exit_status=exit_status, filters=filters)
        with views.shown(compiled.program, session), tables.shown(head_start.lead):
            if blocks is None:
                finished = run.follow(early)
            else:
                with blocks.repeated():
                    finished = run.follow(early)
                blocks.end()
        views.collect(session, compiled.architecture.word_size)
        views.print()
        tables.print()
        if tables_shown:
            outputs.write_tables(session.tables()[: len(tables_shown)])
        return run.conclude(finished)


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
    from dprobes.cli.shippedexamples import example_templates

    return example_templates(file)


def _stacks_of(target: str | None, weight: str | None, baseline: Path | None) -> StacksOptions | None:
    if target is None and weight is None and baseline is None:
        return None
    from dprobes.cli.output.stackprofiles import stacks_of

    return stacks_of(target, weight, baseline)


def _debugger(command_line: str | None) -> tuple[str, ...] | None:
    """Return the words of the debugger's command, None if a process is to be left stopped."""
    if command_line is None:
        return _GDB if os.isatty(0) and os.isatty(1) else None
    words = words_of(command_line, "debugger's command")
    if "%p" not in command_line.replace("%%", ""):
        raise click.UsageError("--debugger needs %p, where the process id goes: gdb -p %p")
    import shutil

    if shutil.which(words[0]) is None:
        raise click.UsageError(f"--debugger: command '{words[0]}' is not found")
    return words
