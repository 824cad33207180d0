"""How a diagnostic is shown."""

from __future__ import annotations

from dprobes.diagnostics import Diagnostic, Diagnostics, Note, Severity, did_you_mean
from dprobes.source_text import SourceFile, Span


def _at(text: str, start: int, end: int) -> str:
    return Diagnostic(Severity.ERROR, "wrong", Span(SourceFile("f", text), start, end)).render()


def test_a_line_is_shown_with_a_caret_below_the_place() -> None:
    assert _at("ab\n\tcd ef\n", 7, 9) == "f:2:5: error: wrong\n    \tcd ef\n    \t   ^~"


def test_a_line_of_160_characters_is_shown_whole() -> None:
    text = "x" * 159 + "y"
    assert _at(text, 159, 160) == f"f:1:160: error: wrong\n    {text}\n    {' ' * 159}^"


def test_of_a_long_line_the_part_around_the_caret_is_shown() -> None:
    text = "a" * 1000 + "here" + "b" * 1000
    shown = "..." + "a" * 60 + "here" + "b" * 96 + "..."
    assert _at(text, 1000, 1004) == f"f:1:1001: error: wrong\n    {shown}\n    {' ' * 63}^~~~"


def test_the_start_of_a_long_line_is_shown_without_dots_before_it() -> None:
    text = "here" + "b" * 1000
    assert _at(text, 0, 4) == f"f:1:1: error: wrong\n    here{'b' * 156}...\n    ^~~~"


def test_the_end_of_a_long_line_is_shown_without_dots_behind_it() -> None:
    text = "a" * 1000 + "end"
    assert _at(text, 1000, 1003) == f"f:1:1001: error: wrong\n    ...{'a' * 60}end\n    {' ' * 63}^~~"


def test_an_underline_ends_with_what_is_shown() -> None:
    text = "a" * 10_000_000
    first, line, caret = _at(text, 0, len(text)).split("\n")
    assert (first, line, caret) == ("f:1:1: error: wrong", "    " + "a" * 160 + "...", "    ^" + "~" * 159)


def test_a_place_at_the_end_of_an_empty_file_is_shown() -> None:
    assert _at("", 0, 0) == "f:1:1: error: wrong\n    \n    ^"


def test_control_characters_are_not_passed_on() -> None:
    rendered = Diagnostic(
        Severity.ERROR, "no '\x1b[31m'", Span(SourceFile("f", "\x1b[31m"), 0, 1), hint="\x07"
    ).render()
    assert rendered == "f:1:1: error: no '\\x1b[31m'\n    \ufffd[31m\n    ^\nhint: \\x07"


def test_a_long_message_is_clipped_in_its_middle() -> None:
    rendered = Diagnostic(Severity.ERROR, "a" * 5000 + "end").render()
    assert rendered == "error: " + "a" * 300 + "..." + "a" * 147 + "end"


def test_notes_and_hint_follow() -> None:
    file = SourceFile("f", "one\ntwo\n")
    diagnostic = Diagnostic(Severity.WARNING, "m", Span(file, 4, 7), (Note("n", Span(file, 0, 3)), Note("o")), "h")
    assert diagnostic.render() == (
        "f:2:1: warning: m\n    two\n    ^~~\nf:1:1: note: n\n    one\n    ^~~\nnote: o\nhint: h"
    )


def test_only_fifty_of_each_severity_are_kept() -> None:
    diagnostics = Diagnostics()
    for n in range(3000):
        diagnostics.note(None, f"note {n}")
    diagnostics.error(None, "the error")
    assert [d.message for d in diagnostics][-3:] == [
        "note 49",
        "there are more than 50 notes; the rest is not shown",
        "the error",
    ]
    assert diagnostics.has_errors


def test_a_word_of_megabytes_is_compared_with_none() -> None:
    assert did_you_mean("pusj", ["push", "pop"]) == "did you mean 'push'?"
    assert did_you_mean("x" * 1_000_000, ["push"]) is None
