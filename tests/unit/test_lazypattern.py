"""Regular expressions that are compiled late do what compiled ones do."""

from __future__ import annotations

import re

import pytest

from dprobes.lazypattern import lazy_pattern


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets what is compiled."""
    seen: list[object] = []
    original = re.compile

    def note(text: str, flags: int = 0) -> re.Pattern[str]:
        seen.append(text)
        return original(text, flags)

    monkeypatch.setattr(re, "compile", note)
    return seen
    return seen


def test_an_expression_is_compiled_when_it_is_used(compiled: list[object]) -> None:
    number = lazy_pattern(r"[0-9]+")
    assert compiled == []
    assert number.fullmatch("12") is not None
    assert number.fullmatch("x") is None
    assert compiled == ["[0-9]+"]


def test_methods_and_attributes_are_those_of_the_pattern() -> None:
    name = lazy_pattern(r"(?P<first>[a-z])(.)", re.IGNORECASE)
    assert name.findall("A1 b2") == [("A", "1"), ("b", "2")]
    assert [m["first"] for m in name.finditer("A1 b2")] == ["A", "b"]
    assert name.sub("-", "A1 b2") == "- -"
    assert name.groupindex == {"first": 1}
    assert name.pattern == r"(?P<first>[a-z])(.)"
    assert name.flags & re.IGNORECASE
    assert lazy_pattern(rb"\x00+").split(b"a\x00\x00b") == [b"a", b"b"]


def test_a_wrong_expression_is_an_error_at_its_first_use() -> None:
    wrong = lazy_pattern("(")
    with pytest.raises(re.error, match=r"missing \), unterminated subpattern at position 0"):
        wrong.match("")


def test_what_a_pattern_does_not_have_it_does_not_get() -> None:
    with pytest.raises(AttributeError, match=r"'re\.Pattern' object has no attribute 'matches'"):
        lazy_pattern("a").matches("a")  # type: ignore[attr-defined]
