"""The fast path: comments, strings and lines; and that the other path agrees with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .support import messages, output, run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("push 1 // one\npop\n", "push 1 \npop\n"),
        ("push /* a */ 1\n", "push   1\n"),
        ("a/* b */c\n", "a c\n"),
        ("a /* b\nc */ d\ne\n", "a  \n d\ne\n"),
        ('name = "http://x/*y*/" // z\n', 'name = "http://x/*y*/" \n'),
        ('"a\\"//b" // c', '"a\\"//b" '),
        ("'\"' // c\n", "'\"' \n"),
        ("push \\\n 1\npop\n", "push  1\n\npop\n"),
        ("pu\\  \nsh 1\npop\n", "push 1\n\npop\n"),
        ("// a \\\n b\npop\n", "\n\npop\n"),
        ('"ab\\\ncd" e\nf', '"abcd" e\n\nf'),
        ("push 1\r\npop // x\r\nend\r\n", "push 1\npop \nend\n"),
        ("a\rb", "a b"),
        ("\ufeffpush 1\n", "push 1\n"),
        ("don't // x\nit's\n", "don't \nit's\n"),
        ("a ??= b\n", "a ??= b\n"),
        ('"a\rb"', '"a b"'),
        ('"a\\\\\nb"', '"a\\b"'),
    ],
)
def test_comments_and_continuations_go_and_lines_keep_their_numbers(text: str, expected: str) -> None:
    assert expected == output(text)
    assert expected == output(text, defines=[("UNUSED", "1")])


def test_an_unterminated_comment_or_string_is_an_error_at_its_start() -> None:
    expected = """\
t.rpn:1:8: error: unterminated string
    name = "abc // x
           ^
t.rpn:2:5: error: unterminated comment
    pop /* abc
        ^~"""
    assert expected == messages('name = "abc // x\npop /* abc\n\n')


FRAGMENTS = [
    '"',
    "'",
    "/",
    "*",
    "//",
    "/*",
    "*/",
    "\\",
    "\n",
    "\r\n",
    "\r",
    " ",
    "\t",
    "a",
    "b9",
    "é",
    "\f",
    "\\\n",
    ";",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_both_paths_agree_on_text_without_directives(text: str) -> None:
    fast, fast_messages = run(text)
    slow, slow_messages = run(text, defines=[("UNUSED", "1")])
    assert (fast.text, fast_messages) == (slow.text, slow_messages)
    places = range(len(fast.text) + 1)
    key = [(s.start, s.end) for i in places for s in [fast.span(i, i + 1 if i < len(fast.text) else i)]]
    assert key == [(s.start, s.end) for i in places for s in [slow.span(i, i + 1 if i < len(fast.text) else i)]]


@given(
    st.lists(st.sampled_from([*FRAGMENTS, "#", "#define a b", "#if", "#else", "#endif", "a(", ")", ","]), max_size=40)
)
def test_no_text_makes_the_preprocessor_fail_and_pieces_cover_the_result(fragments: list[str]) -> None:
    result, _ = run("".join(fragments))
    position = 0
    for _, start, end in result.pieces(0, len(result.text)):
        assert start == position
        assert end > start
        position = end
    assert position == len(result.text)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_a_character_that_is_copied_has_its_own_place(text: str) -> None:
    result, _ = run(text)
    for piece, start, end in result.pieces(0, len(result.text)):
        if piece.span is None:
            assert result.text[start:end] == text[piece.source : piece.source + end - start]


def test_ten_megabytes_without_directives_take_seconds_at_most() -> None:
    text = 'push r, eax // comment "x"\nname = "a b"\n' * 250_000
    start = time.process_time()
    output(text)
    assert time.process_time() - start < 10  # 2 s on an idle machine


def test_the_macro_machinery_is_not_imported_for_text_without_directives() -> None:
    code = (
        "import sys; from dprobes.preprocessor import preprocess; from dprobes.source_text import SourceFile;"
        "from dprobes.diagnostics import Diagnostics; preprocess(SourceFile('x', 'push 1 // y'), Diagnostics());"
        "print(*sorted(name for name in sys.modules if name.startswith('dprobes.preprocessor.')))"
    )
    source_root = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source_root}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["dprobes.preprocessor.mapped_text"]
