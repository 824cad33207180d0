"""
The output of another preprocessor, mapped back to the source by its line markers (``# 12 "file"``).

The module must not depend on which preprocessor it was, or how it was run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dprobes.diagnostics import Note
from dprobes.errors import SourceError
from dprobes.preprocessor.mapped_text import Preprocessed, TextBuilder
from dprobes.preprocessor.source_reader import read_source
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics

__all__ = ["ExternalPreprocessor", "ExternalRequest", "ExternalResult", "read_result"]


@dataclass(frozen=True, slots=True)
class ExternalRequest:
    """A request to preprocess ``text`` with these definitions (name, value) and directories for ``#include``."""

    text: str
    defines: tuple[tuple[str, str], ...]
    include_dirs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ExternalResult:
    """The output and exit status of the preprocessor; ``command`` is the command's name in messages."""

    command: str
    exit_status: int
    stdout: str
    stderr: str


ExternalPreprocessor: TypeAlias = Callable[[ExternalRequest], ExternalResult]
"""Callable that runs another preprocessor, and raises ``SourceError`` if that fails."""

_MARKER = re.compile(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"[ \d]*')
# Directives that a preprocessor passes on to the compiler; here there is none.
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(?:pragma|ident|sccs)\b.*")
_MESSAGE = re.compile(r"(.+?):(\d+):(?:(\d+):)? (?:fatal )?(error|warning): (.*)")


def read_result(result: ExternalResult, source: SourceFile, diagnostics: Diagnostics) -> Preprocessed:
    """
    Return the output of another preprocessor for ``source`` as preprocessed text.

    Its messages are added to ``diagnostics``.
    """
    files = _Files(source)
    reported = _report(result.stderr, files, diagnostics)
    if result.exit_status != 0 and not reported:
        notes = tuple(Note(line) for line in result.stderr.splitlines() if line.strip())
        diagnostics.error(None, f"'{result.command}' failed with exit status {result.exit_status}", notes=notes)
    return _map(result.stdout, files)


class _Files:
    """The source files that line markers in the preprocessor's output name."""

    def __init__(self, source: SourceFile) -> None:
        self._known = {"<stdin>": source, "-": source, "": source, source.name: source}

    def has(self, name: str) -> bool:
        """Return whether the text of the file with this name is known."""
        return bool(self[name].text) or name in ("", "-", "<stdin>")

    def __getitem__(self, name: str) -> SourceFile:
        if name not in self._known:
            try:
                text = read_source(Path(name)).text
            except SourceError:
                text = ""
            self._known[name] = SourceFile(name.removeprefix("./"), text)
        return self._known[name]


def _report(output: str, files: _Files, diagnostics: Diagnostics) -> bool:
    """Add the messages in the preprocessor's output to ``diagnostics``; return whether one is an error."""
    found = False
    for line in output.splitlines():
        matched = _MESSAGE.fullmatch(line)
        if matched is None:
            continue
        name, number, column, severity, message = matched.groups()
        span = _line_span(files[name], int(number), int(column or 1))
        if severity == "error":
            diagnostics.error(span, message)
            found = True
        else:
            diagnostics.warning(span, message)
    return found


def _line_span(file: SourceFile, number: int, column: int = 1) -> Span:
    start = file.line_start(max(1, number))
    end = start + len(file.line_text(number)) if start < len(file.text) else start
    return Span(file, min(start + column - 1, end), end)


def _map(output: str, files: _Files) -> Preprocessed:
    file, number = files[""], 1
    out = TextBuilder(file)
    written = SourceFile("", output)
    lines = output.split("\n")
    last = len(lines) - 1
    position = 0
    for index, line in enumerate(lines):
        start, position = position, position + len(line) + 1
        marker = _MARKER.fullmatch(line)
        if marker is not None:
            name, number = re.sub(r"\\(.)", r"\1", marker.group(2)), int(marker.group(1))
            # The text of a missing file (#line may name any) consists of the lines that the preprocessor wrote.
            file = files[name] if files.has(name) else written.renamed(name.removeprefix("./"), position, number)
            continue
        span = _line_span(file, number) if file.text is not output else Span(file, start, start + len(line))
        if not _DIRECTIVE.fullmatch(line):
            out.put(line, span)
        if index < last:
            out.put("\n", Span(file, span.end, min(span.end + 1, len(file.text))))
        number += 1
    return out.build()
