"""The verbs ``insert`` and ``apply``, which insert programs through the manager."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dprobes.api.compiled_program import compiled_bytes, is_compiled
from dprobes.cli import console
from dprobes.cli.console import Progress, print_line
from dprobes.cli.option_values import (
    chosen_groups,
    compile_options,
    example_templates,
    names_of,
    program_of,
    word_of_program,
)
from dprobes.cli.original_lines import ORIGINAL_OPTION
from dprobes.cli.record_options import has_structure, log_format_option, log_items_of, templates_option
from dprobes.cli.scope_and_engine import (
    check_scope,
    engine_option,
    note_engine,
    note_process,
    note_uprobe_holders,
    scope_of,
    scope_options,
    verbose_option,
)
from dprobes.cli.shared_options import (
    PROGRAM,
    PROGRAM_FILE,
    filter_option,
    kernel_types_option,
    overhead_option,
    program_options,
    selection_options,
    symbols_option,
    text_option,
    verification_options,
    with_options,
)
from dprobes.cli.verbs.manager_verbs import absolute_target, client, print_json
from dprobes.diagnostics import Diagnostics, Severity
from dprobes.engines.command_launcher import LaunchedCommand
from dprobes.engines.engine_interface import EngineOptions
from dprobes.engines.engine_registry import engine_row
from dprobes.record.log_record import Item
from dprobes.resolve.probepoints import NEVER_RETURNS, ProbeState
from dprobes.runs.run_steps import Request, look_around

if TYPE_CHECKING:
    from dprobes.manager import manager_messages
    from dprobes.runs.run_steps import Vantage


insertion_options = with_options(
    filter_option, selection_options, verification_options, verbose_option,
    click.option("--merge", "merges", is_flag=True, help="Add FILE to the program that is already inserted."),
    click.option("--replace", "replaces", is_flag=True, help="Replace the inserted program; no hit is lost."),
    click.option("--as", "as_name", metavar="NAME", help="Insert FILE under this name, in addition to others."),
    click.option(
        "--log", "log_items", multiple=True, metavar="ITEMS",
        help="Log these header items with each record, separated by commas, or ALL; see 'dprobes run --help'.",
    ),
    click.option(
        "--log-target", "targets", multiple=True, metavar="TARGET",
        help="Also send records there: KLOG, a file, ...; 'dprobes log-target kinds' lists them all.",
    ),
    log_format_option("text"),
    click.option(
        "--unformatted-output", "-f", "unformatted", is_flag=True,
        help="The original's name for --log-format dprobes.",
    ),
    click.option(ORIGINAL_OPTION, "is_original", is_flag=True, hidden=True),
    engine_option("The engine; with auto, dprobes chooses it.", with_arguments=True, managed=True),
    click.option("--exact", is_flag=True, help="Probe exactly the named instruction (ebpf)."),
    click.option("--pid-namespace", is_flag=True, help="Log pid and tid of the PID namespace (ebpf)."),
    click.option(
        "--core-dir", "core_directory", type=click.Path(exists=True, file_okay=False), default=".",
        metavar="DIR", help="Directory in which 'exit 3' writes core.dprobes.PID.",
    ),
    click.option(
        "--ring-size", type=click.IntRange(min=1, max=1024), metavar="MIB",
        help="Size of the buffer for unread records, in MiB (ebpf). Default: 4, less if many programs are inserted.",
    ),
    overhead_option,
    click.option("--json", "as_json", is_flag=True, help="Print the inserted and replaced programs as JSON."),
)  # fmt: skip
"""Options of an insertion. ``insert`` evaluates them."""


def insertion_from(options: dict[str, Any], arguments: tuple[str, ...]) -> Vantage:
    """
    Remove the options of scope and engine from ``options``; return the insertion's vantage.

    Raise a usage error for an invalid option.
    """
    scope = scope_of(
        options.pop("command_line"),
        arguments,
        options.pop("pid"),
        options.pop("cgroup"),
        options.pop("user"),
        follow=options.pop("follow"),
    )
    known = EngineOptions(own={"pid_namespace": options["pid_namespace"]})
    engine, scope = check_scope(options.pop("engine_name"), scope, known)
    if scope.endpoint is not None:
        if not engine_row(engine).is_managed:
            raise click.UsageError(f"a program that is inserted cannot have the {engine} engine; use 'dprobes run'")
        if scope.command:
            raise click.UsageError("leave out -c: the probe manager starts no command that has a stub")
        if Path(scope.endpoint).exists():  # the manager has another current directory
            scope = replace(scope, endpoint=str(Path(scope.endpoint).absolute()))
    # The manager knows which dprobes processes must be excluded.
    vantage = look_around(Request(engine, scope, known, allow_self=True))
    note_process(scope, vantage.request.scope)
    return vantage


def _log_format(options: dict[str, Any], ppdf: bytes) -> str:
    """Return the format of records for log targets, by default that of the original for its command lines."""
    if options["unformatted"]:
        return "dprobes"
    if not options["is_original"]:
        return str(options["log_format"])
    from dprobes.ppdf.ppdf_file import decode

    return "dprobes" if decode(ppdf).templates else "dump"


def insert(ppdf: bytes, vantage: Vantage, options: dict[str, Any], **more: Any) -> int:
    """
    Send a PPDF to the manager for insertion with ``options``, print the result, and return the exit status.

    ``vantage`` has the processes and the engine. ``more`` are further arguments of ``ManagerClient.insert``.
    """
    targets = [absolute_target(target) for target in options["targets"]]
    if options["merges"] and options["replaces"]:
        raise click.UsageError("give one of --merge and --replace")
    engine, scope = vantage.request.engine, vantage.request.scope
    items = log_items_of(
        options["log_items"],
        is_tree=scope.is_tree,
        all_by_default=has_structure(targets),
        for_people=not options["is_original"],  # 'dprobes log' prints lines
    )
    command = LaunchedCommand(scope.command, follow=scope.follow) if scope.command else None
    try:
        if command is not None:
            scope = command.scope()
        with Progress("waiting for the probe manager"), client(starts=True) as manager:
            result = manager.insert(
                ppdf,
                **more,
                name=options["as_name"],
                merges=options["merges"],
                replaces=options["replaces"],
                scope=scope,
                engine=engine if scope.endpoint is None else f"{engine}={scope.endpoint}",
                groups=chosen_groups(options["groups"]),
                types=names_of(options["types"]),
                filters=options["filters"],
                items=items | _printed_items(ppdf),
                targets=targets,
                log_format=_log_format(options, ppdf) if targets else "text",
                verify_build_id=not options["dont_verify_build_id"],
                verify_opcodes=not options["dont_verify_opcodes"],
                exact=options["exact"],
                pid_namespace=options["pid_namespace"],
                core_directory=options["core_directory"],
                overhead=options["overhead"],
                ring_size=None if options["ring_size"] is None else options["ring_size"] << 20,
            )
        status = _report(result, as_json=options["as_json"], verbose=options["verbose"], program=scope.program)
        if command is not None:
            command.go()
    finally:
        if command is not None:
            command.close()
    return status


def _printed_items(ppdf: bytes) -> Item:
    """Return the header items that the templates in a compiled program print; for an invalid PPDF none."""
    from dprobes.cli.record_options import printed_items
    from dprobes.errors import FormatError
    from dprobes.ppdf.ppdf_file import decode

    try:
        return printed_items(decode(ppdf).templates)
    except FormatError:
        return Item(0)


def _report(result: manager_messages.Insertion, *, as_json: bool, verbose: bool, program: str | None) -> int:
    """
    Print the result of an insertion, with ``as_json`` the manager's reply; return the exit status.

    ``program`` is the name of the command that is executed afterwards, None without one.
    """
    inserted = result.program
    note_engine(inserted.engine, result.reason, verbose=verbose)
    probes = inserted.probepoints
    active = sum(probe.state is ProbeState.ACTIVE for probe in probes)
    for probe in probes:
        if probe.state.is_obstacle and probe.detail:
            console.warning(probe.state.line(probe.detail, f"at {probe.where}"))
    if any(probe.state is ProbeState.CONFLICT for probe in probes):
        note_uprobe_holders()
    waits = inserted.not_resolved or any(
        probe.state is ProbeState.COMPILED and probe.detail != NEVER_RETURNS for probe in probes
    )
    text = f"inserted '{inserted.name}': {active} of {len(probes)} probepoints active"
    if not probes or (waits and not active):
        text = f"inserted '{inserted.name}': it waits for the module '{inserted.module}'"
        if program is not None:
            name = os.path.basename(program)  # noqa: PTH119 - text
            text = f"inserted '{inserted.name}': active as soon as '{name}' maps the module '{inserted.module}'"
    if as_json:
        print_json(result.answer)
    else:
        print_line(text)
    return 0 if active or waits else 1


# The verb ``apply``: insertion of a compiled program through the manager.


@click.command("apply")
@click.argument("file", type=PROGRAM_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@scope_options
@insertion_options
@click.option("--allow-write", is_flag=True, help="Allow instructions that change or stop the target.")
def apply_command(file: Path, arguments: tuple[str, ...], **options: Any) -> int:
    """
    Insert the compiled probe program FILE (a PPDF, see 'dprobes build') through the probe manager.

    Neither symbols nor sources are needed. The module must be a build that FILE was compiled for. The instructions at
    the probepoints are compared with those of that build.
    """
    vantage = insertion_from(options, arguments)
    return insert(compiled_bytes(file), vantage, options, allow_write=options["allow_write"])


# The verb ``insert``: compilation and insertion through the manager.


@click.command("insert")
@click.argument("file", type=PROGRAM, required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@text_option("Insert")
@scope_options
@program_options
@symbols_option
@kernel_types_option
@templates_option("Print its records by the templates in this directory; they are sent to the manager.")
@insertion_options
def insert_command(
    file: Path | None,
    arguments: tuple[str, ...],
    text: str | None,
    symbols: Path | None,
    kernel_types: Path | None,
    templates: Path | None,
    **options: Any,
) -> int:
    """
    Insert the probe program FILE into all processes, or into those that -p, -c, --cgroup or --uid selects.

    FILE is a source in DProbes C or RPN, a compiled program, or the name of an instrumentation set (SET, SET:GROUP,
    SET/VIEW). The probe manager, which is started if necessary, keeps
    the program inserted until 'dprobes remove'. Records go to the manager's trace file ('dprobes log' prints it) and to
    log targets.
    """
    if text is not None and file is not None:
        file, arguments = None, (word_of_program(), *arguments)
    program = program_of(file, text)
    vantage = insertion_from(options, arguments)
    templates = templates or (example_templates(file) if file is not None else None)
    allow_write = options["allow_write"]
    if file is not None and is_compiled(file):
        data = compiled_bytes(file) if templates is None else _with_templates(file, templates)
        return insert(data, vantage, options, allow_write=allow_write)
    from dprobes.cli.compilation import compiled_here

    diagnostics = Diagnostics()
    compiling = compile_options(options["defines"], options["includes"], options["cpp"], allow_write=allow_write)
    ppdf = compiled_here(program, compiling, symbols, vantage, diagnostics, templates, kernel_types)
    if said := "\n".join(d.render() for d in diagnostics if d.severity is Severity.WARNING):
        console.write(said)
    return insert(ppdf, vantage, options, allow_write=allow_write, own_symbols=symbols is None)


def _with_templates(file: Path, templates: Path) -> bytes:
    """Return the PPDF in ``file`` with its templates replaced by those of the directory ``templates``."""
    from dprobes.api.compiled_program import load_ppdf

    loaded = load_ppdf(file).with_templates(templates)
    if text := loaded.diagnostics.render():
        console.write(text)
    return loaded.to_bytes()
