"""Run the preprocessor on a text and look at what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.preprocessor import ExternalPreprocessor, Preprocessed, preprocess
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["chain", "messages", "origin", "output", "run"]


def run(
    text: str,
    *,
    name: str = "t.rpn",
    defines: Sequence[tuple[str, str]] = (),
    include_dirs: Sequence[Path] = (),
    external: ExternalPreprocessor | None = None,
) -> tuple[Preprocessed, str]:
    diagnostics = Diagnostics()
    source = SourceFile(name, text)
    result = preprocess(source, diagnostics, defines=defines, include_dirs=include_dirs, external=external)
    return result, diagnostics.render()


def output(text: str, **options: object) -> str:
    result, messages = run(text, **options)  # type: ignore[arg-type]
    assert messages == ""
    return result.text


def messages(text: str, **options: object) -> str:
    return run(text, **options)[1]  # type: ignore[arg-type]


def origin(result: Preprocessed, word: str) -> Span:
    start = result.text.index(word)
    return result.span(start, start + len(word))


def chain(span: Span) -> list[tuple[str, str, str]]:
    """Return place, text, and macro name of a span and of the definitions behind it."""
    links = [(str(span), span.text, "")]
    while span.expansion is not None:
        assert span.expansion.body is not None
        name, span = span.expansion.name, span.expansion.body
        links.append((str(span), span.text, name))
    return links
