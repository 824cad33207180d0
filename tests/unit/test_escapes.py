import json

import pytest

from dprobes.engines.engine_interface import Notice
from dprobes.errors import InternalError, SourceError, TargetError
from dprobes.escapes import cut_text, escaped, escaped_lines, json_text, replaced


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \xe4\u4e2d\U0001f600 \\x1b", "plain \xe4\u4e2d\U0001f600 \\x1b"),
        ("\n\t\r\0", "\\n\\t\\r\\0"),
        ("\x1b[31m\x7f", "\\x1b[31m\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eabc\u2066\u2028\u200b\ufeff", "\\u202eabc\\u2066\\u2028\\u200b\\ufeff"),
        ("\U000e0001", "\\U000e0001"),
        (b"a\xff\x80".decode("utf-8", "surrogateescape"), "a\\xff\\x80"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_disturbs_lines_and_terminals_is_escaped_once(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(shown) == shown
    assert replaced(text).isprintable() or "\t" in text
    assert len(replaced(text)) == len(text)


def test_lines_of_ours_stay_lines() -> None:
    assert escaped_lines("a\n\tb\x1b\r") == "a\n\tb\\x1b\\r"
    assert escaped("a b", blanks=True) == "a\\x20b"


@pytest.mark.parametrize("text", ["abcdefgh", "aäößü", "a€b€c", "😀😀x"])
def test_a_text_is_cut_between_characters(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    for size in range(1, len(data)):
        kept = cut_text(data, size)
        assert kept.endswith("…".encode())
        beginning = kept.removesuffix("…".encode())
        assert data.startswith(beginning)
        whole = [text[:n].encode("utf-8", "surrogateescape") for n in range(len(text) + 1)]
        assert beginning == max((each for each in whole if len(each) <= size), key=len)


def test_json_says_the_same_and_prints_nothing_odd() -> None:
    value = {"a\x9b\u202e": ["\x7f\n\udcff\U000e0001", "\xe4"]}
    for text in (json_text(value), json_text(value, indent=2).replace("\n", "")):
        assert text.isprintable()
        assert json.loads(text) == value
    assert json_text("\xe4\x9b") == '"\xe4\\u009b"'


def test_messages_of_errors_and_notices_are_a_line() -> None:
    error = TargetError("there is no 'a\nb'", hint="look at 'c\x1b'")
    assert (error.message, str(error), error.hint) == (
        "there is no 'a\\nb'",
        "there is no 'a\\nb'",
        "look at 'c\\x1b'",
    )
    assert SourceError.rendered("a:1\n  \x1b").message == "a:1\n  \\x1b"
    assert InternalError("failed\nat\x1b").message == "failed\nat\\x1b"
    assert Notice("/a\nb: not all", details="x\ny\x1b").text == "/a\\nb: not all\nx\ny\\x1b"
