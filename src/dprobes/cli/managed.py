"""The options and the connection of the verbs that talk to the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.escapes import json_text
from dprobes.formatters.json import exact
from dprobes.manager.client import ManagerClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.interface import Notice

__all__ = ["client", "name_option", "one_of", "print_json"]


def client(*, starts: bool = False, patience: float | None = None) -> ManagerClient:
    """Return the client, which prints notices on standard error."""
    return ManagerClient(starts=starts, notify=_print, patience=patience)


def _print(notice: Notice) -> None:
    (console.warning if notice.is_warning else console.note)(notice.message, notice.hint, notice.details)


def name_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--name`` and ``--all`` to a command."""
    for option in (
        click.option("-a", "--all", "everything", is_flag=True, help="All programs."),
        click.option(
            "--name", metavar="NAME", help="Only the program of this name: its module's name, or that given by --as."
        ),
    ):
        function = option(function)
    return function


def one_of(name: str | None, *, everything: bool) -> None:
    """Raise a usage error if both are given."""
    if name is not None and everything:
        raise click.UsageError("give one of --name NAME and --all")


def print_json(value: object) -> None:
    """Print a result as JSON."""
    click.echo(json_text(exact(value), indent=2))
