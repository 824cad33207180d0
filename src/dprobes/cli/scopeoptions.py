"""The options that say which processes a run is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.cli.options import PROCESS_ID

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["scope_options"]


def scope_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the scope to a command; ``scopechoice.scope_of`` reads them."""
    for option in reversed(
        (
            click.option(
                "-c", "--command", "command_line", metavar="COMMAND",
                help="Start this command, without a shell, and insert the program into it.",
            ),
            click.option("-p", "--pid", type=PROCESS_ID, help="Insert the program into this running process."),
            click.option("--cgroup", metavar="PATH", help="Only processes in this cgroup and those below it (ebpf)."),
            click.option("--uid", "user", metavar="USER", help="Only processes of this user, a name or number (ebpf)."),
            click.option(
                "--follow/--no-follow", default=True, show_default=True,
                help="With -c and -p: also insert it into child processes.",
            ),
        )
    ):  # fmt: skip
        function = option(function)
    return function
