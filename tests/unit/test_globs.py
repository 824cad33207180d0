"""Shell patterns mean what they mean to fnmatch, and none takes longer than its length."""

from __future__ import annotations

import fnmatch
import random
import time

import pytest

from dprobes.globs import compile_glob


def test_patterns_match_as_those_of_fnmatch() -> None:
    chance = random.Random(1)
    letters = "[]!ab*?-\\^"
    for _ in range(30_000):
        pattern = "".join(chance.choices(letters, k=chance.randrange(9)))
        text = "".join(chance.choices(letters, k=chance.randrange(5)))
        assert (compile_glob(pattern).match(text) is not None) == fnmatch.fnmatchcase(text, pattern), (pattern, text)


@pytest.mark.parametrize("pattern", ["[", "[!", "[a-", "[]", "a[", "*[", "[]["])
def test_a_long_pattern_takes_no_longer_than_its_length(pattern: str) -> None:
    """Without the end of a bracket fnmatch's own translation takes 46 s."""
    began = time.process_time()
    assert compile_glob(pattern * (36_000 // len(pattern))).match("name") is None
    assert time.process_time() - began < 15
