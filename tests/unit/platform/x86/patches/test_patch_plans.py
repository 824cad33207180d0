"""What a plan says about the bytes that it changes."""

from __future__ import annotations

import pytest

from dprobes.platform.x86.patches.patch_plans import Method, Plan, Reach

REACH = Reach(2, 0x5000, 0x50FF)


def plan_at(start: int, written: int = 5, padding: int | None = None) -> Plan:
    return Plan(Method.PUN, 0x1010, start, b"\x90" * 5, (2, 1, 2), written, (REACH,), padding)


@pytest.mark.parametrize(
    ("start", "written", "crosses"),
    [
        (0x103C, 5, False),
        (0x0FFB, 5, False),
        (0x0FFC, 5, True),
        (0x1000, 5, False),
    ],
)
def test_a_change_may_cross_pages(start: int, written: int, *, crosses: bool) -> None:
    assert plan_at(start, written).crosses_page == crosses


def test_the_jump_ends_behind_its_prefixes() -> None:
    assert plan_at(0x1010).end(REACH) == 0x1017
    assert plan_at(0x1010, 2, padding=0x1030).end(REACH) == 0x1012


def test_the_lead_is_what_comes_before_the_site() -> None:
    assert [plan_at(start).lead for start in (0x100C, 0x1010, 0x1014)] == [4, 0, 0]


def test_boundaries_are_where_displaced_instructions_begin() -> None:
    assert plan_at(0x1010).boundaries == (0x1010, 0x1012, 0x1013)
