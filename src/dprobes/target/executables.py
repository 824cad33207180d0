"""
From a command to the file that it runs, as ``execve`` and the shell find it: ``PATH``, then ``#!`` lines.

Knows nothing of what is inside a program. Rules: execve(2), "Interpreter scripts"; env(1) for ``#!/usr/bin/env NAME``.
"""

from __future__ import annotations

import os
from pathlib import Path

from dprobes.errors import TargetError
from dprobes.target.elf.contents import file_head

__all__ = ["executable_of"]

_SCRIPT_LINE = 256  # bytes: BINPRM_BUF_SIZE
_MAX_SCRIPTS = 5  # scripts that are each other's interpreters


def executable_of(command: str | os.PathLike[str]) -> Path:
    """
    Return the file that runs when ``command`` is started, with symbolic links followed.

    For a script that is its interpreter; for ``#!/usr/bin/env NAME`` it is the program that ``env`` starts.
    """
    name = os.fspath(command)
    path = _find(name)
    for _ in range(_MAX_SCRIPTS):
        interpreter = _interpreter(path)
        if interpreter is None:
            return path.resolve()
        try:
            path = _find(interpreter)
        except TargetError as e:
            raise TargetError(f"the interpreter of '{path}' cannot be run: {e.message}", hint=e.hint) from e
    raise TargetError(f"'{name}' cannot be run: its interpreters are scripts, more than {_MAX_SCRIPTS} deep")


def _find(name: str) -> Path:
    if not name or "\0" in name:
        raise TargetError(f"command {name!r} is not a file name")
    if "/" not in name:
        import shutil

        found = shutil.which(name)
        if found is None:
            raise TargetError(f"command '{name}' is not found", hint="write its path, or add its directory to PATH")
        return Path(found)
    path = Path(name)
    try:
        if path.is_dir():
            raise TargetError(f"'{name}' is a directory, expected a program")
        if not path.exists():
            raise TargetError(f"'{name}' does not exist")
    except PermissionError as e:
        raise TargetError(f"'{name}' cannot be run: permission denied") from e
    if not os.access(path, os.X_OK):
        raise TargetError(f"'{name}' is not executable", hint=f"allow it with chmod +x {name}")
    return path


def _interpreter(path: Path) -> str | None:
    """Return what the ``#!`` line of a script starts, or None for a file that is no script."""
    try:
        head = file_head(path, _SCRIPT_LINE)
    except TargetError:
        return None  # a program may be executable without being readable
    if not head.startswith(b"#!"):
        return None
    words = os.fsdecode(head[2:].partition(b"\n")[0]).strip(" \t").split(None, 1)
    if not words:
        raise TargetError(f"'{path}' names no interpreter after '#!'")
    if os.path.basename(words[0]) != "env" or len(words) == 1:  # noqa: PTH119 - text, not a path to look at
        return words[0]
    return _started_by_env(words[1]) or words[0]


def _started_by_env(arguments: str) -> str | None:
    """Return the program in the argument of ``env``; the kernel passes all of it as one word, ``-S`` splits it."""
    words = arguments.split()
    if words[0].startswith(("-S", "--split-string")):
        words[0] = words[0].removeprefix("-S").removeprefix("--split-string").removeprefix("=")
        return next((word for word in words if word and not word.startswith("-") and "=" not in word), None)
    return arguments.strip()
