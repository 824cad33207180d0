"""
The C preprocessor of probe programs, which keeps the origin of every character of the result.

Text without directives takes a fast path: ``clean`` removes comments and joins continued lines, and no other module is
imported. A directive, a definition or a name like ``__LINE__`` requires ``directives`` and its dependencies. The
package implements the rules of C11 5.1.1.2 and 6.10, and depends on no language of the result. It starts no process:
another preprocessor is a callable that the caller passes.

DProbes has its own preprocessor because the library that it used first evaluates ``#if`` in floating point, expands
macros recursively without limit, loses columns, and ends in an IndexError on a malformed directive. ``--cpp "gcc -E"``
uses that of the C compiler.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SourceError
from dprobes.preprocessor.mapped_text import Piece, Preprocessed, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor.external_preprocessor import ExternalPreprocessor, ExternalRequest, ExternalResult
    from dprobes.preprocessor.source_reader import FILE_LIMIT, read_source
    from dprobes.source_text import SourceFile

__all__ = [
    "FILE_LIMIT",
    "ExternalPreprocessor",
    "ExternalRequest",
    "ExternalResult",
    "Piece",
    "Preprocessed",
    "preprocess",
    "read_source",
]

_LATE = {
    "external_preprocessor": ("ExternalPreprocessor", "ExternalRequest", "ExternalResult"),
    "source_reader": ("FILE_LIMIT", "read_source"),
}
"""Names that are imported from these modules on first access: a program on the command line needs none."""


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


_NEEDS_MACROS = re.compile(r"^[ \t\f\v]*#|\b__[A-Za-z_]", re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def preprocess(
    source: SourceFile,
    diagnostics: Diagnostics,
    *,
    defines: Sequence[tuple[str, str]] = (),
    include_dirs: Sequence[Path] = (),
    external: ExternalPreprocessor | None = None,
) -> Preprocessed:
    """
    Return the text of ``source`` after C preprocessing, incomplete if errors were reported to ``diagnostics``.

    Every newline of the result ends a statement. A continued line becomes one line, followed by the newlines taken out
    of it. A block comment outside of directives becomes a space and its newlines. ``external`` is another preprocessor,
    such as ``gcc -E``, to call instead of the built-in one.
    """
    valid = [(name, value) for name, value in defines if _IDENTIFIER.fullmatch(name)]
    for name, _ in defines:
        if not _IDENTIFIER.fullmatch(name):
            hint = "write it as '-D NAME=VALUE'"
            diagnostics.error(None, f"'{name}' cannot be the name of a macro", hint=hint)
    if external is not None:
        return _call_external(external, source, diagnostics, valid, include_dirs)
    cleaned = clean(source)
    if valid or _NEEDS_MACROS.search(cleaned.text.text):
        from dprobes.preprocessor.directives import run_directives

        return run_directives(cleaned, diagnostics, valid, include_dirs)
    for problem in cleaned.problems:
        diagnostics.error(problem.span, problem.message)
    return cleaned.text


def _call_external(
    external: ExternalPreprocessor,
    source: SourceFile,
    diagnostics: Diagnostics,
    defines: Sequence[tuple[str, str]],
    include_dirs: Sequence[Path],
) -> Preprocessed:
    from dprobes.preprocessor.external_preprocessor import ExternalRequest, read_result

    request = ExternalRequest(source.text, tuple(defines), (Path(source.name).parent, *include_dirs))
    try:
        result = external(request)
    except SourceError as error:
        diagnostics.extend(error.diagnostics)
        return Preprocessed.copy_of(source, end=0)
    return read_result(result, source, diagnostics)
