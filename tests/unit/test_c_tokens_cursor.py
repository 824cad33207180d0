"""A walk through tokens: what is expected, and where it goes on after an error."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from functools import partial

import pytest

from dprobes.c_tokens import ParseError, TextTokens, TokenCursor, TokenKind
from dprobes.diagnostics import Diagnostics
from dprobes.source_text import SourceFile, Span

PATTERN = re.compile(r'(?P<name>[a-z]+)|(?P<string>"[^"]*")|(?P<punctuation>[{};])')


def cursor_of(text: str, depth_max: int = 3) -> TokenCursor[TextTokens]:
    diagnostics = Diagnostics()
    tokens = TextTokens(text, PATTERN, partial(Span, SourceFile("t", text)), diagnostics, "the end of the text")
    return TokenCursor(tokens, diagnostics, depth_max)


def errors(cursor: TokenCursor[TextTokens]) -> list[tuple[str, str]]:
    return [(each.message, each.span.text if each.span else "") for each in cursor.diagnostics]


def test_words_are_seen_as_names_and_punctuation_only() -> None:
    cursor = cursor_of('if "if" ;')
    assert cursor.sees("else", "if")
    assert not cursor.sees("if", distance=1)
    assert cursor.sees(";", distance=2)
    assert cursor.accept("else") is None
    token = cursor.accept("if")
    assert token is cursor.last is not None


def test_what_is_missing_is_an_error_that_says_what_is_there() -> None:
    cursor = cursor_of('a "b"')
    assert "a" == cursor.expect_name("a name").text
    with pytest.raises(ParseError):
        cursor.expect(";", "after 'a'")
    with pytest.raises(ParseError):
        cursor.expect_name("the name of b")
    cursor.take()
    with pytest.raises(ParseError):
        cursor.expect("}", "at last")
    assert [
        ("expected ';' after 'a', found '\"b\"'", '"b"'),
        ("expected the name of b, found '\"b\"'", '"b"'),
        ("expected '}' at last, found the end of the text", ""),
    ] == errors(cursor)


def test_spans_reach_to_what_was_taken_last() -> None:
    cursor = cursor_of("a b c d")
    first = cursor.take()
    second = cursor.take()
    cursor.take()
    assert "a b c" == cursor.span_from(first).text
    assert "b c" == cursor.span_of(cursor.tokens.span(second)).text


def test_nesting_has_an_end() -> None:
    cursor = cursor_of("a", depth_max=2)
    with cursor, cursor:
        pass
    with pytest.raises(ParseError), cursor, cursor, cursor:
        pass
    assert [("this is nested more than 2 levels deep", "a")] == errors(cursor)
    with cursor, cursor:  # those levels were left again
        pass


@pytest.mark.parametrize(
    ("text", "following"),
    [
        ("a b; c", "c"),
        ("a { b; c } d", "d"),
        ("a { { b } c; } d", "d"),
        ("a } b", "}"),
        ("a b", None),
        ('a "};" b; c', "c"),
    ],
)
def test_a_statement_in_error_is_skipped(text: str, following: str | None) -> None:
    cursor = cursor_of(text)
    cursor.skip_statement()
    token = cursor.peek()
    assert following == (None if token.kind is TokenKind.END else token.text)


def test_a_bracket_that_closes_nothing_is_skipped_as_an_item() -> None:
    cursor = cursor_of("} } a; b")
    cursor.skip_item()
    cursor.skip_item()
    assert "a" == cursor.peek().text
    cursor.skip_item()
    assert "b" == cursor.peek().text
