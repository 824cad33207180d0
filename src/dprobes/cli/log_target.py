"""The verb ``log-target``: where records go besides the manager's trace file."""

from __future__ import annotations

import os

import click

from dprobes.cli.managed import client, print_json
from dprobes.cli.tables import print_table
from dprobes.formatters import FORMATS

__all__ = ["absolute_target", "command"]


@click.group("log-target")
def command() -> None:
    """
    Add, remove and list where records go, while programs are active.

    A TARGET is KLOG (the kernel's log), COM1 or COM2 (serial lines), or the path of a file, which is appended to. The
    manager's trace file, which 'dprobes log' reads, always gets all records.
    """


def absolute_target(target: str) -> str:
    """Return the name of a target for the manager, whose current directory is another one."""
    path = target.removeprefix("file:")
    return f"file:{os.path.abspath(path)}" if "/" in path or path != target else target  # noqa: PTH100 - text


@command.command("add")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Only records of the program of this name.")
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
def add(target: str, name: str | None, format_name: str) -> int:
    """Add a log target."""
    with client() as manager:
        manager.ask("add-target", target=absolute_target(target), name=name, format=format_name)
    return 0


@command.command("remove")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Only the one for the program of this name.")
def remove(target: str, name: str | None) -> int:
    """Remove a log target, and print what it has got."""
    with client() as manager:
        _print(manager.ask("remove-target", target=absolute_target(target), name=name)["targets"])
    return 0


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_targets(as_json: bool) -> int:
    """List the log targets."""
    with client() as manager:
        targets = manager.ask("targets")["targets"]
    if as_json:
        print_json({"targets": targets})
    elif targets:
        _print(targets)
    else:
        click.echo("no log targets besides the manager's trace file")
    return 0


def _print(targets: list[dict[str, object]]) -> None:
    rows = [
        (
            str(target["name"]),
            str(target["module"] or "all"),
            str(target["format"]),
            str(target["written"]),
            str(target["waiting"]),
            str(target["lost"]),
            str(target["problem"] or ""),
        )
        for target in targets
    ]
    print_table(("target", "program", "format", "written", "waiting", "lost", "problem"), rows)
