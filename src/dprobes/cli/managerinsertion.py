"""The options of ``insert`` and ``apply``, and their conversation with the manager."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.enginechoice import check_scope, note_engine, note_process, note_uprobe_holders
from dprobes.cli.engineoptions import engine_option, verbose_option
from dprobes.cli.headeritems import log_items_of
from dprobes.cli.logoptions import has_structure, log_format_option
from dprobes.cli.managed import client, print_json
from dprobes.cli.options import filter_option, overhead_option, selection_options, verification_options
from dprobes.cli.optionvalues import names_of
from dprobes.cli.original import ORIGINAL_OPTION
from dprobes.cli.output.textoutput import print_line
from dprobes.cli.progress import Progress
from dprobes.cli.scopechoice import scope_of
from dprobes.cli.verbs.log_target import absolute_target
from dprobes.engines.insertion import insertion
from dprobes.engines.launchedcommand import LaunchedCommand
from dprobes.engines.options import EngineOptions
from dprobes.engines.registry import engine_row
from dprobes.record.layout import Item
from dprobes.resolve.probepoints import NEVER_RETURNS
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.insertion import Insertion
    from dprobes.manager import results

__all__ = ["insert", "insertion_from", "insertion_options"]


def insertion_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a program is inserted to a command; ``insert`` reads them."""
    for option in reversed(
        (
            click.option("--merge", "merges", is_flag=True, help="Add FILE to the program that is already inserted."),
            click.option("--replace", "replaces", is_flag=True, help="Replace the inserted program; no hit is lost."),
            click.option("--as", "as_name", metavar="NAME", help="Insert FILE under this name, in addition to others."),
            click.option(
                "--log", "log_items", multiple=True, metavar="ITEMS",
                help="Header items, separated by commas, or ALL; see 'dprobes run --help'.",
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
            engine_option("auto chooses.", with_arguments=True, managed=True),
            click.option("--exact", is_flag=True, help="Probe exactly the named instruction (ebpf)."),
            click.option("--pid-namespace", is_flag=True, help="Log pid and tid of the PID namespace (ebpf)."),
            click.option(
                "--core-dir", "core_directory", type=click.Path(exists=True, file_okay=False), default=".",
                metavar="DIR", help="Where 'exit 3' writes core.dprobes.PID.",
            ),
            click.option(
                "--ring-size", type=click.IntRange(min=1, max=1024), metavar="MIB",
                help="Buffer for records not yet read, in MiB (ebpf; 4, and less if many programs are inserted).",
            ),
            overhead_option,
            click.option("--json", "as_json", is_flag=True, help="Print the inserted and replaced programs as JSON."),
        )
    ):  # fmt: skip
        function = option(function)
    return filter_option(selection_options(verification_options(verbose_option(function))))


def insertion_from(options: dict[str, Any], arguments: tuple[str, ...]) -> Insertion:
    """Take the options of the scope and the engine out of ``options``, and return what is to be inserted into."""
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
        if Path(scope.endpoint).exists():  # the manager's current directory is another one
            scope = replace(scope, endpoint=str(Path(scope.endpoint).absolute()))
    # The manager knows which processes of dprobes are to be left alone.
    where = insertion(engine, scope, known, allow_self=True)
    note_process(scope, where.scope)
    return where


def _log_format(options: dict[str, Any], ppdf: bytes) -> str:
    """Return how log targets get records; those of the original's command lines as it had them."""
    if options["unformatted"]:
        return "dprobes"
    if not options["is_original"]:
        return str(options["log_format"])
    from dprobes.ppdf.reader import decode

    return "dprobes" if decode(ppdf).templates else "dump"


def insert(ppdf: bytes, where: Insertion, options: dict[str, Any], **more: Any) -> int:
    """Have the manager insert a compiled program, and print what has become of it."""
    targets = [absolute_target(target) for target in options["targets"]]
    if options["merges"] and options["replaces"]:
        raise click.UsageError("give one of --merge and --replace")
    scope = where.scope
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
                engine=where.engine if scope.endpoint is None else f"{where.engine}={scope.endpoint}",
                groups=names_of(options["groups"]),
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
    """Return the header items that the templates in a compiled program print; the manager says if it is none."""
    from dprobes.cli.templateoption import printed_items
    from dprobes.errors import FormatError
    from dprobes.ppdf.reader import decode

    try:
        return printed_items(decode(ppdf).templates)
    except FormatError:
        return Item(0)


def _report(result: results.Insertion, *, as_json: bool, verbose: bool, program: str | None) -> int:
    """Print what was inserted, before ``program`` is executed if there is one; return the exit status."""
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
