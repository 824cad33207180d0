"""The verb ``log-target``: where records go besides the manager's trace file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli.logoptions import log_format_option
from dprobes.cli.managed import client, print_json
from dprobes.cli.output.textoutput import print_line, print_table
from dprobes.sinks.kinds import kinds, parse_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks.target import TargetStatus

__all__ = ["absolute_target", "command"]


@click.group("log-target")
def command() -> None:
    """
    Add, remove and list log targets, also while programs are active.

    'dprobes log-target kinds' lists what TARGET may be: KLOG, the path of a file, syslog:udp://HOST and many
    others. The manager's trace file, which 'dprobes log' reads, always gets all records.
    """


def absolute_target(target: str) -> str:
    """Return the name of a target for the manager, whose current directory is another one."""
    return parse_target(target).absolute(Path.cwd()).text


@command.command("add")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Only records of the program of this name.")
@log_format_option("text", "--format")
def add(target: str, name: str | None, log_format: str) -> int:
    """Add a log target."""
    with client() as manager:
        manager.add_target(absolute_target(target), name, log_format)
    return 0


@command.command("remove")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Only the log target for the program of this name.")
def remove(target: str, name: str | None) -> int:
    """Remove a log target, and print its counts."""
    with client() as manager:
        _print(manager.remove_target(absolute_target(target), name))
    return 0


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_targets(as_json: bool) -> int:
    """List the log targets."""
    with client() as manager:
        targets = manager.targets()
    if as_json:
        print_json({"targets": [asdict(target) for target in targets]})
    elif targets:
        _print(targets)
    else:
        print_line("no log targets besides the manager's trace file")
    return 0


@command.command("kinds")
def list_kinds() -> int:
    """List the kinds of log targets."""
    print_table(("target", "what it is"), [(kind.syntax, kind.doc) for kind in kinds()])
    return 0


def _print(targets: Sequence[TargetStatus]) -> None:
    rows = [
        (
            target.name,
            target.module or "all",
            target.format,
            str(target.written),
            str(target.waiting),
            str(target.lost),
            target.problem or "",
        )
        for target in targets
    ]
    print_table(("target", "program", "format", "written", "waiting", "lost", "problem"), rows)
