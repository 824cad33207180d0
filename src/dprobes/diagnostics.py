"""
Errors, warnings and notes about a source text, as data.

A stage of the compiler adds to a ``Diagnostics`` and continues, so that one run reports all errors; ``raise_if_errors``
stops between stages. Rendered form, stable and asserted literally in the tests::

    open.rpn:7:5: error: unknown instruction 'pusj'
        pusj r, 1
        ^~~~
    hint: did you mean 'push'?
"""

from __future__ import annotations

from heapq import nlargest
from itertools import pairwise
from typing import TYPE_CHECKING

from dprobes.errors import SourceError
from dprobes.source_text import Diagnostic, Note, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.source_text import SourceFile, Span

__all__ = [
    "Diagnostic",
    "Diagnostics",
    "Note",
    "Severity",
    "did_you_mean",
    "either",
    "first_of",
    "near_lengths",
    "near_names",
    "nearest",
    "parts_of",
]

_KEPT = 50
_WORD_LIMIT = 100
_LONG, _SHORT = 9, 6
_COMPARED = 300
"""Maximum number of names whose similarity is computed: those that share the most groups of three letters."""


class Diagnostics:
    """
    The diagnostics of one compilation.

    Iteration is in the order of places in the source text, for all stages together; diagnostics without a place come
    last. Only the first fifty of each severity are kept, because further ones are rarely informative.
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
        """True if at least one diagnostic is an error."""
        return self._counts[Severity.ERROR] > 0

    @property
    def error_count(self) -> int:
        """Number of errors, including those that are not kept."""
        return self._counts[Severity.ERROR]

    @property
    def total(self) -> int:
        """Number of diagnostics of all severities, including those that are not kept."""
        return sum(self._counts.values())

    def since(self, count: int) -> tuple[Diagnostic, ...]:
        """Return the kept diagnostics after the first ``count``, in the order in which they were added."""
        return tuple(self._items[count:])

    def extend(self, items: Iterable[Diagnostic]) -> None:
        """Append diagnostics that another stage of compilation has reported, in their order."""
        for item in items:
            self._add(item)

    def error(self, span: Span | None, message: str, *, notes: tuple[Note, ...] = (), hint: str | None = None) -> None:
        """Append an error at ``span`` with its notes and a hint; None as ``span`` means no place in a source."""
        self._add(Diagnostic(Severity.ERROR, message, span, notes, hint))

    def warning(
        self, span: Span | None, message: str, *, notes: tuple[Note, ...] = (), hint: str | None = None
    ) -> None:
        """Append a warning at ``span`` with its notes and a hint; None as ``span`` means no place in a source."""
        self._add(Diagnostic(Severity.WARNING, message, span, notes, hint))

    def note(self, span: Span | None, message: str, *, hint: str | None = None) -> None:
        """Append information at ``span`` that belongs to no error or warning; None as ``span``: without a place."""
        self._add(Diagnostic(Severity.NOTE, message, span, (), hint))

    def _add(self, item: Diagnostic) -> None:
        self._counts[item.severity] += 1
        count = self._counts[item.severity]
        if count <= _KEPT:
            self._items.append(item.worded())
        elif count == _KEPT + 1:
            message = f"there are more than {_KEPT} {item.severity.value}s; the rest is not shown"
            self._items.append(Diagnostic(item.severity, message))

    def raise_if_errors(self) -> None:
        """Raise ``SourceError`` with all diagnostics if any of them is an error."""
        if self.has_errors:
            raise SourceError(tuple(self))

    def render(self) -> str:
        """Return all diagnostics as text, without a final line end."""
        return "\n".join(d.render() for d in self)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a hint with the known word most similar to ``word``, or None if none is similar."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near is not None else None


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names as text, followed by the number of the others: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def either(names: Sequence[str]) -> str:
    """Return at least one name as alternatives: ``'a', 'b' or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}" if len(quoted) > 1 else quoted[0]


def near_names(name: str, known: Iterable[str], count: int, cutoff: float = 0.7) -> list[str]:
    """
    Return up to ``count`` names of a long list that ``name`` may be a misspelling of, the most similar first.

    ``cutoff`` is the minimum similarity, as in ``difflib.get_close_matches``. Only names of similar length with a
    common part are compared: comparing all takes too long.
    """
    from difflib import get_close_matches  # only after a mistake: the import takes 5 ms

    parts, lengths = parts_of(name), near_lengths(len(name))
    likely = [each for each in known if len(each) in lengths and (not parts or any(part in each for part in parts))]
    if len(likely) > _COMPARED:
        threes = {name[start : start + 3] for start in range(len(name) - 2)}
        likely = nlargest(_COMPARED, likely, key=lambda each: sum(three in each for three in threes))
    return get_close_matches(name, likely, n=count, cutoff=cutoff)


def parts_of(name: str) -> tuple[str, ...]:
    """
    Return parts of a name, at least one of which a misspelling preserves: thirds, or halves of a shorter name.

    Still shorter parts would be common to many names. Return an empty tuple for a name of less than 6 letters.
    """
    count = 3 if len(name) >= _LONG else 2 if len(name) >= _SHORT else 0
    cuts = [len(name) * number // count for number in range(count + 1)] if count else []
    return tuple(name[start:end] for start, end in pairwise(cuts))


def near_lengths(length: int) -> range:
    """Return the range of the lengths of names that are similar to a name of ``length`` letters."""
    slack = max(2, length // 4)
    return range(length - slack, length + slack + 1)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to ``word``, or None if none is similar."""
    if len(word) > _WORD_LIMIT:
        return None
    from difflib import get_close_matches  # only after a mistake: the import takes 5 ms

    return next(iter(get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)), None)
