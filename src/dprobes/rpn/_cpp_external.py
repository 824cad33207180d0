"""
Preprocessing by another program, such as ``gcc -E``, and the way back from its line markers to the source.

It must not know about RPN, nor which preprocessor runs: only ``-D``, ``-I``, standard input and ``# 12 "file"``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.errors import SourceError
from dprobes.rpn.preprocess import Preprocessed, Run, read_source
from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics

__all__ = ["run_external"]

_TIMEOUT = 60
_MARKER = re.compile(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"[ \d]*')
_MESSAGE = re.compile(r"(.+?):(\d+):(?:(\d+):)? (?:fatal )?(error|warning): (.*)")


def run_external(
    command: str,
    source: SourceFile,
    diagnostics: Diagnostics,
    defines: Sequence[tuple[str, str]],
    include_dirs: Sequence[Path],
) -> Preprocessed:
    """Return what ``command`` makes of the source; its complaints go to ``diagnostics``."""
    nothing = Preprocessed("", [Run(0, source, 0, None)])
    try:
        words = shlex.split(command)
    except ValueError as error:
        diagnostics.error(None, f"malformed preprocessor command '{command}': {str(error).lower()}")
        return nothing
    if not words:
        diagnostics.error(None, "the preprocessor command is empty", hint="give one like '--cpp \"gcc -E\"'")
        return nothing
    # The text goes to standard input, because compilers take a file with an unknown suffix for an object file.
    words += [f"-D{name}={value}" for name, value in defines]
    words += [f"-I{directory}" for directory in (Path(source.name).parent, *include_dirs)] + ["-"]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, input=source.text.encode(), capture_output=True, timeout=_TIMEOUT, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        diagnostics.error(None, f"'{command}' did not end within {_TIMEOUT} seconds")
        return nothing
    except OSError as error:
        diagnostics.error(None, f"cannot run '{words[0]}': {(error.strerror or str(error)).lower()}")
        return nothing
    files = _Files(source)
    reported = _report(done.stderr.decode("utf-8", "replace"), files, diagnostics)
    if done.returncode != 0 and not reported:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        message = f"'{command}' failed with exit status {done.returncode}"
        diagnostics.error(None, message, notes=tuple(Note(line) for line in lines if line.strip()))
    return _map(done.stdout.decode("utf-8", "replace"), files)


class _Files:
    """Find the source file that a name in the preprocessor's output means."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._known = {"<stdin>": source, "-": source, "": source, source.name: source}

    def __getitem__(self, name: str) -> SourceFile:
        if name not in self._known:
            shown = name.removeprefix("./")
            try:
                self._known[name] = SourceFile(shown, read_source(Path(name)).text)
            except SourceError:
                self._known[name] = SourceFile(shown, "")
        return self._known[name]


def _report(output: str, files: _Files, diagnostics: Diagnostics) -> bool:
    """Turn the messages into diagnostics and return whether one is an error."""
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
    parts: list[str] = []
    runs: list[Run] = []
    size = 0
    for line in output.split("\n"):
        marker = _MARKER.fullmatch(line)
        if marker is not None:
            file, number = files[re.sub(r"\\(.)", r"\1", marker.group(2))], int(marker.group(1))
            continue
        span = _line_span(file, number)
        runs.append(Run(size, file, span.start, None if span.text == line else span))
        parts.append(line)
        size += len(line) + 1
        number += 1
    return Preprocessed("\n".join(parts), runs)
