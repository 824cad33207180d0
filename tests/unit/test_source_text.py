"""Spans of a source text."""

from __future__ import annotations

import pytest

from dprobes.source_text import SourceFile, Span

FILE = SourceFile("a.rpn", "push 1\nexit\n")
OTHER = SourceFile("b.rpn", "push 1\nexit\n")
FIRST = Span(FILE, 0, 4)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Span(FILE, 5, 6), Span(FILE, 0, 6)),
        (Span(FILE, 2, 3), Span(FILE, 0, 3)),
        (Span(OTHER, 5, 6), FIRST),
    ],
)
def test_a_span_goes_on_to_the_end_of_another_one_of_its_file(other: Span, expected: Span) -> None:
    assert FIRST.to(other) == expected


def test_a_span_does_not_go_back() -> None:
    later = Span(FILE, 7, 11)
    assert later.to(FIRST) == later
