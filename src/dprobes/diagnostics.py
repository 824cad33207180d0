"""
Errors, warnings and notes about a source text, as data.

A stage of the compiler adds to a ``Diagnostics`` and goes on, so that one run shows everything that is wrong; between
stages ``raise_if_errors`` stops. Rendered form, stable and asserted literally in the tests::

    open.rpn:7:5: error: unknown instruction 'pusj'
        pusj r, 1
        ^~~~
    hint: did you mean 'push'?
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import SourceError
from dprobes.escapes import escaped, replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.source import SourceFile, Span

__all__ = ["Diagnostic", "Diagnostics", "Note", "Severity", "did_you_mean", "nearest"]


_LINE_LIMIT = 160
_BEFORE_CARET = 60
"""A longer source line is shown in part: so many characters, of which so many are before the caret."""

_KEPT = 50
_MESSAGE_LIMIT = 600
_WORD_LIMIT = 100


class Severity(enum.Enum):
    """Rank a diagnostic; only an error stops the program from being inserted."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Note:
    """Add a fact to a diagnostic, with the place it speaks of if there is one."""

    message: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Say what is wrong (``message``), where (``span``), why (``notes``) and what to do (``hint``)."""

    severity: Severity
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    hint: str | None = None

    def render(self) -> str:
        """Return the text for people, without a final line end."""
        parts = [_render_place(self.severity.value, self.message, self.span)]
        expansion = self.span.expansion if self.span is not None else None
        while expansion is not None:
            parts.append(_render_place("note", f"in the expansion of macro '{expansion.name}'", expansion.body))
            expansion = expansion.body.expansion if expansion.body is not None else None
        parts += [_render_place("note", note.message, note.span) for note in self.notes]
        if self.hint is not None:
            parts.append(f"hint: {_clip(self.hint)}")
        return "\n".join(parts)


class Diagnostics:
    """
    Collect the diagnostics of one compilation.

    Iteration gives them in the order of their places in the text, whatever stage found them; those without a place come
    last. Only the first fifty of each severity are kept: more say nothing new about a file.
    """

    def __init__(self) -> None:
        self._items: list[Diagnostic] = []
        self._counts = dict.fromkeys(Severity, 0)

    def __iter__(self) -> Iterator[Diagnostic]:
        files: dict[SourceFile, int] = {}
        for item in self._items:
            if item.span is not None:
                files.setdefault(item.span.file, len(files))

        def place(item: Diagnostic) -> tuple[int, int]:
            return (len(files), 0) if item.span is None else (files[item.span.file], item.span.start)

        return iter(sorted(self._items, key=place))

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_errors(self) -> bool:
        """Whether at least one diagnostic is an error."""
        return self._counts[Severity.ERROR] > 0

    @property
    def error_count(self) -> int:
        """How many errors were found, also those that are not kept."""
        return self._counts[Severity.ERROR]

    def since(self, count: int) -> tuple[Diagnostic, ...]:
        """Return those that were added after the first ``count``, in the order in which they were added."""
        return tuple(self._items[count:])

    def extend(self, items: Iterable[Diagnostic]) -> None:
        """Add diagnostics that another stage collected."""
        for item in items:
            self._add(item)

    def error(self, span: Span | None, message: str, *, notes: tuple[Note, ...] = (), hint: str | None = None) -> None:
        """Add an error."""
        self._add(Diagnostic(Severity.ERROR, message, span, notes, hint))

    def warning(
        self, span: Span | None, message: str, *, notes: tuple[Note, ...] = (), hint: str | None = None
    ) -> None:
        """Add a warning."""
        self._add(Diagnostic(Severity.WARNING, message, span, notes, hint))

    def note(self, span: Span | None, message: str, *, hint: str | None = None) -> None:
        """Add a note that stands alone."""
        self._add(Diagnostic(Severity.NOTE, message, span, (), hint))

    def _add(self, item: Diagnostic) -> None:
        self._counts[item.severity] += 1
        count = self._counts[item.severity]
        if count <= _KEPT:
            self._items.append(item)
        elif count == _KEPT + 1:
            message = f"there are more than {_KEPT} {item.severity.value}s; the rest is not shown"
            self._items.append(Diagnostic(item.severity, message))

    def raise_if_errors(self) -> None:
        """Raise ``SourceError`` with everything collected so far if any of it is an error."""
        if self.has_errors:
            raise SourceError(tuple(self))

    def render(self) -> str:
        """Return all diagnostics as text, without a final line end."""
        return "\n".join(d.render() for d in self)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a hint with the known word nearest to ``word``, or None if none is near."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near is not None else None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to ``word``, or None if none is near."""
    if len(word) > _WORD_LIMIT:
        return None
    from difflib import get_close_matches  # only after a mistake: the module takes 5 ms to import

    return next(iter(get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)), None)


def _render_place(label: str, message: str, span: Span | None) -> str:
    message = _clip(message)
    if span is None:
        return f"{label}: {message}"
    line, column = span.file.line_and_column(span.start)
    text = span.file.line_text(line)
    first = max(0, column - 1 - _BEFORE_CARET) if len(text) > _LINE_LIMIT else 0
    shown = replaced(text[first : first + _LINE_LIMIT])
    caret = column - 1 - first
    length = max(1, min(span.end - span.start, len(shown) - caret))
    if first + _LINE_LIMIT < len(text):
        shown += _ELLIPSIS
    if first:
        shown, caret = _ELLIPSIS + shown, caret + len(_ELLIPSIS)
    # The caret line repeats the tabs of the source line, so that it stands right whatever the tab width is.
    padding = "".join("\t" if c == "\t" else " " for c in shown[:caret])
    return f"{escaped(str(span))}: {label}: {message}\n    {shown}\n    {padding}^{'~' * (length - 1)}"


_ELLIPSIS = "..."


def _clip(message: str) -> str:
    # A message quotes the user's words, which may be of any length and hold anything.
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT // 2] + _ELLIPSIS + message[-_MESSAGE_LIMIT // 4 :]
    return escaped(message)
