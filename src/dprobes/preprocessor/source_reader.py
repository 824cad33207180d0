"""The reader of source files; no other module of the package opens files."""

from __future__ import annotations

import re
import stat
import sys
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostic, Note, Severity
from dprobes.errors import SourceError, reason_of
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["FILE_LIMIT", "STANDARD_INPUT", "read_source"]

FILE_LIMIT = 16 << 20
"""Maximum accepted size of a file in bytes."""

STANDARD_INPUT = "-"
"""The path that means standard input."""

_PLACE = re.compile(r"[\w./+-]+:[\w.*+]+")
"""Pattern of a module and a place in it, which a user may have given instead of a file."""
_PIECE = 1 << 16
_SHOWN = 60
"""Maximum number of characters that are shown of a path that cannot be read."""


def read_source(path: Path, *, allow_pipe: bool = True) -> SourceFile:
    """
    Return the file as text; raise ``SourceError`` if it cannot be read, is not UTF-8, or is too large.

    A pipe is read if ``allow_pipe`` is set, for the shell's ``<(...)``; devices, which may never end, are not. The path
    ``-`` is standard input, of any kind.
    """
    try:
        if str(path) == STANDARD_INPUT:
            if sys.stdin is None:
                raise _unreadable("standard input is closed")
            return _source("<standard input>", _read(sys.stdin.buffer))
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not (allow_pipe and stat.S_ISFIFO(mode)):
            raise _unreadable(f"'{path}' is not a regular file")
        with path.open("rb") as file:
            data = _read(file)
    except (OSError, ValueError) as error:
        shown = str(path) if len(str(path)) <= _SHOWN else f"{str(path)[:_SHOWN]}…"
        hint = "the text of a program is given with -e: dprobes run -e 'TEXT'" if "{" in str(path) else None
        if hint is None and _PLACE.fullmatch(str(path)) is not None:
            hint = f"a place is not a program: write dprobes run -e '{path} {{ @ = count() }}'"
        raise _unreadable(f"cannot read '{shown}': {reason_of(error)}", hint=hint) from error
    return _source(str(path), data)


def _source(name: str, data: bytes) -> SourceFile:
    if len(data) > FILE_LIMIT:
        raise _unreadable(f"'{name}' is larger than {FILE_LIMIT >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(f"'{name}' is not a text file", f"invalid UTF-8 at byte {error.start}") from error
    if (nul := data.find(b"\0")) >= 0:
        raise _unreadable(f"'{name}' is not a text file", f"NUL at byte {nul}")
    return SourceFile(name, text)


def _read(file: BinaryIO) -> bytes:
    """Return the bytes of a file; reading stops soon after FILE_LIMIT bytes, which bounds the memory used."""
    parts, size = [], 0
    while size <= FILE_LIMIT and (part := file.read(_PIECE)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _unreadable(message: str, note: str | None = None, hint: str | None = None) -> SourceError:
    notes = (Note(note),) if note is not None else ()
    return SourceError([Diagnostic(Severity.ERROR, message, None, notes, hint)])
