"""What is said of a probepoint whose instructions have jumps by several methods, or not all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.inline import handler_trials
from dprobes.platform.x86.patches.patch_plans import Method

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([Method.JUMP], "by a jump"),
        ([Method.DEAD, Method.DEAD], "by a jump into dead bytes after it"),
        ([Method.WINDOW, Method.JUMP], "by a jump over several instructions and a jump"),
        ([Method.PUN], "by a punned jump, if the addresses that it leads to are free"),
        ([Method.JUMP, "it is a software interrupt", Method.PUN], "by a breakpoint: it is a software interrupt"),
    ],
)
def test_all_places_are_spoken_of_together(found: Sequence[Method | str], said: str) -> None:
    assert handler_trials.note_of(found) == said
