"""Whatever the text, the compiler answers with diagnostics, soon, and in few words."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.rpn import instruction_set
from dprobes.rpn.compilation_passes import check_program, parse_source
from dprobes.rpn.program_text import KEYWORDS
from dprobes.rpn.rpn_expressions import MAX_WORDS
from dprobes.source_text import SourceFile

MEGABYTES_10 = 10_000_000
HEADER = "name = a\noffset = main\n"


def _compile(text: str) -> Diagnostics:
    diagnostics = Diagnostics()
    try:
        program = parse_source(SourceFile("case.rpn", text), diagnostics)
        check_program(program, architecture("x86_64"), diagnostics)
    except SourceError:
        assert diagnostics.has_errors
    return diagnostics


_WORDS = st.sampled_from(
    [
        *{row.syntax for row in instruction_set.ROWS},
        *{alias.syntax for alias in instruction_set.ALIASES},
        *(f"{keyword.name} = " for keyword in KEYWORDS),
        *"=:,;()+-*/%&|^~<>?![]#{}@'\"\n",
        *("0x10", "08", "5", "yes", "main", "eax", "lv", "proc p", "endproc", "a:", "'x'", '"s"', "100hz", "sys_*"),
    ]
)


@given(st.lists(_WORDS, max_size=40))
def test_random_words_give_diagnostics_and_no_exception(words: list[str]) -> None:
    _compile(" ".join(words)).render()
    _compile(HEADER + "\n".join(words)).render()


@given(st.text(max_size=200))
def test_random_text_gives_diagnostics_and_no_exception(text: str) -> None:
    _compile(text).render()
    _compile(HEADER + text).render()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("asdf qwer zxcv\n" * (MEGABYTES_10 // 15), "an instruction before the first probe definition"),
        ("\x01\n" * (MEGABYTES_10 // 2), "unexpected character U+0001"),
        (HEADER + "a " * (MEGABYTES_10 // 2), f"a statement of more than {MAX_WORDS} words"),
        (HEADER + "a" * MEGABYTES_10, f"unknown instruction '{'a' * 40}'"),
        (HEADER + "push " + "1" * MEGABYTES_10, f"'{'1' * 24}' does not fit in 64 bits"),
        (HEADER + "push " + "(" * MEGABYTES_10, f"a statement of more than {MAX_WORDS} words"),
        (HEADER + "push " + "-" * 5000 + "1", "an expression nested more than 100 deep"),
        (HEADER + "push " + "," * 9000, "an operand is missing next to ','"),
    ],
    ids=["lines", "characters", "words", "word", "number", "parentheses", "signs", "commas"],
)
def test_ten_megabytes_of_garbage_are_refused_within_seconds(text: str, first: str) -> None:
    started = time.process_time()
    diagnostics = _compile(text)
    rendered = diagnostics.render()
    assert next(iter(diagnostics)).message == first
    assert time.process_time() - started < 20  # a hang, not a speed: it takes about one
    assert len(rendered) < 20_000


def test_the_error_limit_does_not_count_notes() -> None:
    diagnostics = _compile(HEADER + "push bif\n" * 50 + "pusj\nexit\n")
    assert [d.message for d in diagnostics][-1] == "unknown instruction 'pusj'"
    assert len(diagnostics) == 51


def test_the_error_limit_holds_for_the_lexer_too() -> None:
    diagnostics = _compile(HEADER + "§\n" * 50)
    assert [d.message for d in diagnostics][-2:] == [
        "unexpected character '§'",
        "too many errors; the rest is not read",
    ]
    assert len(diagnostics) == 21


@pytest.mark.parametrize("depth", [1, 99, 100])
def test_expressions_may_be_nested(depth: int) -> None:
    assert not _compile(HEADER + "push " + "(" * depth + "1" + ")" * depth + "\nlog 1\nexit").has_errors


def test_a_long_sum_is_no_deep_one() -> None:
    assert not _compile(HEADER + "push 1" + "+1" * 4000 + "\nlog 1\nexit").has_errors


def test_many_procedures_that_call_each_other_are_checked_soon() -> None:
    procedures = "".join(f"proc p{n}\npush 1\n" + f"call p{n + 1}\n" * 3 + "ret\nendproc\n" for n in range(200))
    text = HEADER + "call p0\nlog 1\nexit\n" + procedures + "proc p200\nret\nendproc\n"
    assert len(_compile(text)) == 0
