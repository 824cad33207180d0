"""The scope and the engine of a run: their options, and messages about them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.option_values import usage_error
from dprobes.cli.shared_options import PROCESS_ID, with_options
from dprobes.engines.engine_choice import scope_problem
from dprobes.engines.engine_interface import Scope, ScopeKind
from dprobes.engines.engine_registry import AUTO, engine_row, named_engine, names, rows
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

    from dprobes.engines.engine_interface import EngineOptions

__all__ = [
    "EngineName",
    "check_scope",
    "command_option",
    "engine_option",
    "follow_option",
    "note_engine",
    "note_process",
    "note_running_cpus",
    "note_uprobe_holders",
    "process_option",
    "scope_of",
    "scope_options",
    "stop_cpus_option",
    "verbose_option",
    "words_of",
]

# The scope of a run from the options.


def scope_of(
    command_line: str | None,
    arguments: Sequence[str],
    pid: int | None,
    cgroup: str | None,
    user: str | None,
    *,
    follow: bool,
) -> Scope:
    """
    Return the processes that the options select, by default all.

    ``command_line`` is the value of ``-c``, ``arguments`` has the words after ``--``, and ``user`` is the value of
    ``--uid``. With ``follow``, child processes are probed, too. Raise a usage error for an invalid combination.
    """
    command = _command(command_line, tuple(arguments))
    if sum((bool(command), pid is not None, cgroup is not None, user is not None)) > 1:
        raise usage_error(
            "give only one of -c COMMAND, -p PID, --cgroup PATH and --uid USER; without them all processes are probed"
        )
    if not follow and not command and pid is None:
        raise usage_error("--no-follow needs a command (-c COMMAND) or a process (-p PID)")
    return Scope(
        pid,
        command,
        None if cgroup is None else _cgroup(cgroup),
        None if user is None else _user_id(user),
        follow=follow,
    )


def words_of(command_line: str, what: str) -> tuple[str, ...]:
    """
    Return the words of a command line, split as by a shell; raise a usage error if it is malformed or empty.

    ``what`` is the name of the option in the message.
    """
    import shlex

    try:
        words = tuple(shlex.split(command_line))
    except ValueError as error:
        raise usage_error(f"the {what} is not well formed: {str(error).lower()}") from None
    if not words:
        raise usage_error(f"the {what} is empty")
    return words


def _command(command_line: str | None, arguments: tuple[str, ...]) -> tuple[str, ...]:
    if command_line is None:
        return arguments
    if arguments:
        raise usage_error(f"unexpected argument '{arguments[0]}': the command was given with -c")
    return words_of(command_line, "command")


def _cgroup(path: str) -> str:
    # Every directory of a cgroup v2 file system has this file, none of a v1 one.
    if not os.path.isdir(path):  # noqa: PTH112 - text goes in and out
        raise usage_error(f"--cgroup: there is no directory '{path}'; cgroups are below /sys/fs/cgroup")
    if not os.path.exists(os.path.join(path, "cgroup.controllers")):  # noqa: PTH110, PTH118
        raise usage_error(f"--cgroup: '{path}' is not a cgroup of version 2, which eBPF programs need")
    return os.path.realpath(path)


def _user_id(user: str) -> int:
    if user.isdecimal():
        return int(user)
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise usage_error(f"--uid: there is no user '{user}'") from None


def check_scope(text: str, scope: Scope, options: EngineOptions) -> tuple[str, Scope]:
    """
    Return the name of the requested engine, and the scope including the engine's argument.

    Raise a usage error if the engine does not support the scope or the options.
    """
    name, argument = named_engine(text)
    if argument is not None:
        row = engine_row(name)
        is_possible = (bool(scope.command) and row.starts_commands) or (scope.pid is not None and row.has_processes)
        if scope.kind is not ScopeKind.EVERYWHERE and not is_possible:
            possible = {"-c": row.starts_commands, "-p": row.has_processes, "--cgroup": False}
            left_out = ", ".join(option for option, is_there in possible.items() if not is_there)
            raise usage_error(f"--engine {text} names the target: leave out {left_out} and --uid")
        scope = replace(scope, endpoint=argument)
    if (problem := scope_problem(name, scope, options)) is not None:
        raise usage_error(problem)
    return name, scope


def note_engine(name: str, reason: str | None, *, verbose: bool) -> None:
    """Print the reason for the choice of an engine if the output is ``verbose``; nothing if ``reason`` is None."""
    if reason is not None and verbose:
        console.note(f"engine {name}: {reason}")


def note_process(asked: Scope, scope: Scope) -> None:
    """
    Print a note with the probed process if the user gave the id of a thread that is not the main thread.

    ``asked`` is the scope of the command line, ``scope`` that with the id of the process.
    """
    if asked.pid != scope.pid:
        console.note(f"{asked.pid} is a thread of process {scope.pid}, which is probed as a whole")


def note_uprobe_holders() -> None:
    """Print the dprobes processes that hold uprobes: a probepoint in the state CONFLICT may conflict with theirs."""
    from dprobes.engines.refusals import uprobe_holders

    for pid in uprobe_holders():
        console.note(f"process {pid} is a dprobes with uprobes: the breakpoint may be one of them")


def note_running_cpus(name: str) -> None:
    """Print that the CPUs are not stopped, unless the engine is one that does so."""
    if name == AUTO or not engine_row(name).stops_all:
        console.note("--stop-cpus has no effect: probepoints are inserted without stopping the processors")


# The options for the processes of a run.


def command_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``-c`` with the help ``text``."""
    return click.option("-c", "--command", "command_line", metavar="COMMAND", help=text)


def process_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``-p`` with the help ``text``."""
    return click.option("-p", "--pid", type=PROCESS_ID, help=text)


def follow_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the options ``--follow`` and ``--no-follow`` with the help ``text``."""
    return click.option("--follow/--no-follow", default=True, show_default=True, help=text)


scope_options = with_options(
    command_option("Start this command, without a shell, and insert the program into it."),
    process_option("Insert the program into this running process."),
    click.option("--cgroup", metavar="PATH", help="Probe only processes in this cgroup and those below it (ebpf)."),
    click.option("--uid", "user", metavar="USER", help="Probe only processes of this user, a name or number (ebpf)."),
    follow_option("With -c and -p: also insert it into child processes."),
)
"""Options of the scope. ``scope_and_engine.scope_of`` evaluates them."""


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
        """Return the placeholder of the value in the help text."""
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
