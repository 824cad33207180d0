"""What is said of probepoints that have had no jumps."""

from __future__ import annotations

import pytest

from dprobes.engines.inline.handler_hits import Damage, damage_notice, refusal_notice


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["a"], "a probepoint used a breakpoint instead of a jump: a"),
        (["a", "b", "a"], "3 probepoints used breakpoints instead of jumps: a (2); b (1)"),
        (["a", "b", "c", "d", "e", "e"],
         "6 probepoints used breakpoints instead of jumps: e (2); a (1); b (1); c (1); ..."),
    ],
)  # fmt: skip
def test_reasons_are_counted(reasons: list[str], said: str) -> None:
    notice = refusal_notice(reasons)
    assert notice.message == said
    assert not notice.is_warning


def test_what_was_written_over_is_said() -> None:
    notice = damage_notice(Damage(entries=1, counts=2))
    assert notice.message == (
        "a probed process has written over the memory of its handlers: 1 record that no handler makes was dropped, "
        "2 probepoints have no counts of hits"
    )
    assert notice.is_warning
    assert "3 times all records of a CPU were given up" in damage_notice(Damage(rings=3)).message
    assert "1 key of a table without a count was left out" in damage_notice(Damage(keys=1)).message
