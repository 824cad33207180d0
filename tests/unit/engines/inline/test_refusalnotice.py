"""What is said of probepoints that have had no jumps."""

from __future__ import annotations

import pytest

from dprobes.engines.inline.refusalnotice import refusal_notice


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["a"], "a probepoint has had a breakpoint instead of a jump: a"),
        (["a", "b", "a"], "3 probepoints have had breakpoints instead of jumps: a (2); b (1)"),
        (["a", "b", "c", "d", "e", "e"],
         "6 probepoints have had breakpoints instead of jumps: e (2); a (1); b (1); c (1); ..."),
    ],
)  # fmt: skip
def test_reasons_are_counted(reasons: list[str], said: str) -> None:
    notice = refusal_notice(reasons)
    assert notice.message == said
    assert not notice.is_warning
