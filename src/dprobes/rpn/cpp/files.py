"""Reading source files; nothing else in the package opens a file."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostic, Note, Severity
from dprobes.errors import SourceError
from dprobes.source import SourceFile

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE_LIMIT", "read_source"]

FILE_LIMIT = 16 << 20
"""The size in bytes beyond which a file is refused."""


def read_source(path: Path, *, allow_pipe: bool = True) -> SourceFile:
    """
    Return the file as text; raise ``SourceError`` if it cannot be read, is not UTF-8, or is too large.

    A pipe is read if ``allow_pipe`` is set, for the shell's ``<(...)``; devices, which may never end, are not.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not (allow_pipe and stat.S_ISFIFO(mode)):
            raise _unreadable(f"'{path}' is not a regular file")
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unreadable(f"cannot read '{path}': {reason[:1].lower()}{reason[1:]}") from error
    if len(data) > FILE_LIMIT:
        raise _unreadable(f"'{path}' is larger than {FILE_LIMIT >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(f"'{path}' is not a text file", f"invalid UTF-8 at byte {error.start}") from error
    if (nul := data.find(b"\0")) >= 0:
        raise _unreadable(f"'{path}' is not a text file", f"NUL at byte {nul}")
    return SourceFile(str(path), text)


def _unreadable(message: str, note: str | None = None) -> SourceError:
    notes = (Note(note),) if note is not None else ()
    return SourceError([Diagnostic(Severity.ERROR, message, None, notes)])
