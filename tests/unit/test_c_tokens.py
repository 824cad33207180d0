"""Texts become tokens by the expression of a language, and words of another kind where a parser asks for them."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from functools import partial

import pytest

from dprobes.c_tokens import TextTokens, Token, TokenKind
from dprobes.diagnostics import Diagnostics
from dprobes.source_text import SourceFile, Span

PATTERN = re.compile(r'(?P<name>[a-z]+)|(?P<number>\d+)|(?P<string>"[^"\n]*")|(?P<punctuation>[{};])')


def tokens_of(text: str) -> tuple[TextTokens, Diagnostics]:
    diagnostics = Diagnostics()
    span_of = partial(Span, SourceFile("t", text))
    return TextTokens(text, PATTERN, span_of, diagnostics, "the end of the text"), diagnostics


def taken(text: str) -> tuple[list[tuple[TokenKind, str]], list[str]]:
    tokens, diagnostics = tokens_of(text)
    found: list[tuple[TokenKind, str]] = []
    while (token := tokens.take()).kind is not TokenKind.END:
        found.append((token.kind, token.text))
    return found, [f"{each.span.text if each.span else ''}: {each.message}" for each in diagnostics]


def test_tokens_have_the_kinds_of_their_groups() -> None:
    expected = [
        (TokenKind.NAME, "abc"),
        (TokenKind.NUMBER, "12"),
        (TokenKind.STRING, '"x y"'),
        (TokenKind.PUNCTUATION, "{"),
    ]
    assert (expected, []) == taken('  abc 12\n"x y"{ ')
    assert ([], []) == taken(" \n ")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a § b", ["a", "b"], "§: unexpected character '§'"),
        ("a \x07 b", ["a", "b"], "\x07: unexpected character U+0007"),
        ('a "open b\nc', ["a", "c"], '": a " without a second one on the same line'),
        ("a 'open", ["a"], "': a ' without a second one on the same line"),
    ],
)
def test_what_begins_no_token_is_left_out(text: str, words: list[str], message: str) -> None:
    found, said = taken(text)
    assert (words, [message]) == ([word for _, word in found], said)


def test_the_end_can_be_taken_again_and_again() -> None:
    tokens, _ = tokens_of("a")
    tokens.take()
    end = Token(TokenKind.END, "the end of the text", 1, 1)
    assert [end, end, end] == [tokens.peek(3), tokens.take(), tokens.take()]
    assert "the end of the text" == end.described
    assert "'a'" == Token(TokenKind.NAME, "a", 0, 1).described


def test_a_word_of_another_kind_is_taken_from_where_the_next_token_begins() -> None:
    tokens, diagnostics = tokens_of("a  lib.so:f-1 b; c")
    assert "a" == tokens.take().text
    assert ["lib", "b"] == [tokens.peek().text, tokens.peek(4).text]  # looking ahead does not matter but for errors
    word = tokens.take_match(re.compile(r"[^ ;]+"))
    assert Token(TokenKind.PLACE, "lib.so:f-1", 3, 13) == word
    assert "lib.so:f-1 b" == tokens.span(word, tokens.take()).text
    assert tokens.take_match(re.compile("x")) is None
    assert Token(TokenKind.PLACE, "; c", 15, 18) == tokens.take_to(18)
    assert TokenKind.END is tokens.take().kind
    assert 3 == len(diagnostics)
