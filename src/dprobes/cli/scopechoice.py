"""The scope of a run, as the command line asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.cli.usageerror import usage_error
from dprobes.engines.interface import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["scope_of", "words_of"]


def scope_of(
    command_line: str | None,
    arguments: Sequence[str],
    pid: int | None,
    cgroup: str | None,
    user: str | None,
    *,
    follow: bool,
) -> Scope:
    """Return the scope that the options and the words behind ``--`` mean; all processes if they say nothing."""
    command = _command(command_line, tuple(arguments))
    if sum((bool(command), pid is not None, cgroup is not None, user is not None)) > 1:
        raise usage_error(
            "give one of a command (-c COMMAND), a process (-p PID), --cgroup PATH, and --uid USER; "
            "without any the program is inserted into all processes"
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
    """Return the words of a command line as a shell would split it."""
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
        raise usage_error(f"--cgroup: '{path}' is not a cgroup of version 2, which BPF programs know")
    return os.path.realpath(path)


def _user_id(user: str) -> int:
    if user.isdecimal():
        return int(user)
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise usage_error(f"--uid: there is no user '{user}'") from None
