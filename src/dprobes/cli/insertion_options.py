"""The options of a run about its scope and engine; ``scope_and_engine`` evaluates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.cli.shared_options import PROCESS_ID, with_options
from dprobes.engines.engine_registry import AUTO, named_engine, names, rows
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

__all__ = ["EngineName", "engine_option", "scope_options", "stop_cpus_option", "verbose_option"]

# The options for the processes of a run.


scope_options = with_options(
    click.option(
        "-c", "--command", "command_line", metavar="COMMAND",
        help="Start this command, without a shell, and insert the program into it.",
    ),
    click.option("-p", "--pid", type=PROCESS_ID, help="Insert the program into this running process."),
    click.option("--cgroup", metavar="PATH", help="Probe only processes in this cgroup and those below it (ebpf)."),
    click.option("--uid", "user", metavar="USER", help="Probe only processes of this user, a name or number (ebpf)."),
    click.option(
        "--follow/--no-follow", default=True, show_default=True,
        help="With -c and -p: also insert it into child processes.",
    ),
)  # fmt: skip
"""The options of the scope; ``scope_and_engine.scope_of`` evaluates them."""


class EngineName(click.ParamType[str]):
    """The name of an engine, or NAME=ARGUMENT; ``choices`` are the names that are shown."""

    name = "engine"

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text if the engine exists; otherwise raise a usage error."""
        try:
            named_engine(value)
        except EngineError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        return value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return the text for the help."""
        return f"[{'|'.join(self.choices)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Return the names that begin with ``incomplete``."""
        from click.shell_completion import CompletionItem

        starts = (each.partition("=") for each in self.choices)
        return [CompletionItem(name + equals) for name, equals, _ in starts if name.startswith(incomplete)]


def engine_option(
    text: str, *, with_arguments: bool = False, managed: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return the option ``--engine``; its help describes the available engines that take an argument.

    If the program is ``managed``, engines that the manager cannot use are omitted.
    """
    left_out = {row.usage for row in rows() if managed and not row.is_managed}
    shown = [name for name in names() if (with_arguments or "=" not in name) and name not in left_out]
    text += "".join(f" {row.usage} {row.summary}." for row in rows() if row.summary and row.usage in shown)
    return click.option("--engine", "engine_name", type=EngineName(shown), default=AUTO, help=text)


def stop_cpus_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``--stop-cpus``, which the original has, to a command."""
    able = ", ".join(row.name for row in rows() if row.stops_all)
    help_ = f"Stop all processors at each hit ({able}, which does so anyway)."
    return click.option("--stop-cpus", is_flag=True, help=help_)(function)


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``-v`` to a command."""
    return click.option("-v", "--verbose", is_flag=True, help="Report which engine was chosen, and why.")(function)
