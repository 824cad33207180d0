"""Folded stacks, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.sinks.stacks.profile_formats import folded_lines, parse_folded
from dprobes.sinks.stacks.stack_profile import StackProfile

NAMES = st.text(st.characters(blacklist_characters=";", blacklist_categories=("C", "Z")), min_size=1)


def test_a_line_is_a_stack_from_the_outside_and_its_weight() -> None:
    profile = StackProfile({("python3", "main", "std::map<int, int>::at(int)"): 3, ("ls",): 1})
    assert folded_lines(profile) == ["ls 1", "python3;main;std::map<int, int>::at(int) 3"]


def test_a_semicolon_or_a_line_end_in_a_name_breaks_no_line() -> None:
    assert folded_lines(StackProfile({("a;b", "c\nd"): 1})) == ["a:b;c d 1"]


@given(weights=st.dictionaries(st.lists(NAMES, min_size=1, max_size=5).map(tuple), st.integers(0, 1 << 60)))
def test_what_is_written_is_read(weights: dict[tuple[str, ...], int]) -> None:
    assert parse_folded(folded_lines(StackProfile(weights)), "x").weights == weights


def test_what_is_no_folded_stack_is_said_with_its_line() -> None:
    with pytest.raises(FormatError) as caught:
        parse_folded(["a;b 1", "", "a;b"], "old.folded")
    assert str(caught.value) == "'old.folded' holds no folded stacks: line 3 does not end with a blank and a number"
