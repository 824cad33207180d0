"""
``#include`` (C11 6.10.2): where files are looked for, which are read once only, and how deep they may nest.

What is done with the text of a file is not known here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.errors import SourceError
from dprobes.preprocessor.problems import DirectiveError, StopError
from dprobes.preprocessor.sourcefiles import read_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.preprocessor.tokens import Token
    from dprobes.source import SourceFile, Span

__all__ = ["Includes"]

_DEPTH = 64


class Includes:
    """Find include files in ``directories`` and hold those that are open."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = [str(directory) for directory in directories]
        self._open: list[tuple[str, Span]] = []  # names of the including files, and the directives there
        self._once: set[str] = set()

    @property
    def place(self) -> Span | None:
        """The directive that included the current file."""
        return self._open[-1][1] if self._open else None

    def find(self, arguments: list[Token], current: SourceFile) -> SourceFile | None:
        """
        Return the file that the expanded tokens after ``#include`` name, or None if it is not read again.

        Raise ``DirectiveError`` if there is no such file or it cannot be read.
        """
        strings = [token.text for token in arguments]
        directories = self._directories
        name = ""
        if strings and arguments[0].kind == "string":
            name = strings[0].strip('"')
            directories = [str(Path(current.name).parent), *directories]
        elif strings and strings[0] == "<" and ">" in strings:
            name = "".join(strings[1 : strings.index(">")])
        if not name:
            raise DirectiveError("malformed #include directive", hint="write '#include \"FILE\"'")
        path = next((p for d in directories if _is_file(p := Path(d, name))), None)
        if path is None:
            shown = ", ".join(f"'{directory}'" for directory in dict.fromkeys(directories))
            note = Note(f"searched in {shown}" if shown else "there are no include directories")
            hint = "name its directory with '-I DIR'"
            raise DirectiveError(f"cannot find include file '{name}'", notes=(note,), hint=hint)
        if os.path.realpath(path) in self._once:
            return None
        try:
            return read_source(path, allow_pipe=False)
        except SourceError as error:
            first = error.diagnostics[0]
            raise DirectiveError(first.message, notes=first.notes, hint=first.hint) from error

    def read_once(self, file: SourceFile) -> None:
        """Remember ``#pragma once`` in a file."""
        self._once.add(os.path.realpath(file.name))

    @contextmanager
    def entered(self, source: SourceFile, current: SourceFile, place: Span) -> Iterator[None]:
        """Count ``source`` as open; raise ``StopError`` if too many files are."""
        self._open.append((current.name, place))
        if len(self._open) > _DEPTH:
            names = [name for name, _ in self._open]
            first = max((i for i, name in enumerate(names) if name == source.name), default=len(names) - 1)
            notes = tuple(Note(f"included from '{n}'", p) for n, p in reversed(self._open[first:-1]))
            raise StopError(f"'{source.name}' is included more than {_DEPTH} files deep", place, notes=notes)
        yield
        self._open.pop()


def _is_file(path: Path) -> bool:
    """Return whether there is something to read, such as a file or a pipe."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # such as a directory that may not be searched
        return False
