"""Numbers with nouns."""

from __future__ import annotations

from dprobes.cli.output.counted_nouns import counted


def test_only_one_thing_is_in_the_singular() -> None:
    assert [counted(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
