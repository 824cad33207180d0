"""
Answers of engines about a resolved module, which are kept with it from one run to the next.

An answer follows from the module and its question alone. So a question is all else that the answer depends on, and is
compared with those of earlier runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KnownAnswers", "answered"]

T = TypeVar("T")


class KnownAnswers:
    """The answers that there are; there are few of them."""

    def __init__(self) -> None:
        self._known: list[tuple[object, object]] = []

    def __len__(self) -> int:
        return len(self._known)

    def find(self, question: object) -> Any | None:
        """Return the answer to a question, None if it is not known."""
        return next((answer for asked, answer in self._known if asked == question), None)

    def add(self, question: object, answer: object) -> None:
        """Keep the answer to a question."""
        self._known.append((question, answer))


def answered(known: KnownAnswers | None, question: object, work: Callable[[], T]) -> T:
    """Return the answer to a question; work it out, and keep it, where it is not known."""
    if known is None:
        return work()
    found: T | None = known.find(question)
    if found is None:
        found = work()
        known.add(question, found)
    return found
