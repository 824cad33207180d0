"""Errors on their way to the diagnostics; what they are about is not known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics, Note
    from dprobes.source import Span

__all__ = ["DirectiveError", "PreprocessError", "Problem", "StopError"]


class Problem(NamedTuple):
    """Hold an error of ``clean`` until it is known that its line is not skipped by an ``#if``."""

    offset: int
    span: Span
    message: str


class PreprocessError(Exception):
    """Carry the parts of a diagnostic to where it is reported."""

    def __init__(
        self, message: str, span: Span | None = None, *, notes: tuple[Note, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.span = span
        self.notes = notes
        self.hint = hint

    def report(self, diagnostics: Diagnostics, otherwise: Span | None = None) -> None:
        """Add the error to ``diagnostics``, at ``otherwise`` if it has no place of its own."""
        diagnostics.error(self.span or otherwise, str(self), notes=self.notes, hint=self.hint)


class DirectiveError(PreprocessError):
    """Say what is wrong with a directive; the lines after it are still read."""


class StopError(PreprocessError):
    """Say why preprocessing ends here."""
