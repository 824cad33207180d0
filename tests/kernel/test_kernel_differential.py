"""Random programs do the same at a function of the kernel, called with chosen arguments, as in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.kernel_site import agreed, agreed_cases, covering_cases, possible_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from guests.guest import Guest


pytestmark = pytest.mark.shared_guest

CASES = Path(__file__).parents[1] / "cases"


def test_some_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 5000, 10)
    assert count["defined"] == 10
    assert count["wild"] >= 2


@pytest.fixture(scope="module")
def possible() -> list[str]:
    """Return what can be run there: to find that out in the guest takes as long as to run it."""
    return possible_cases(sorted(str(path) for path in CASES.rglob("*.case")))


def check(guest: Guest, cases: Sequence[str]) -> None:
    count, differing = guest.call(agreed_cases, cases, timeout=280)
    assert differing == []
    assert count >= 25


@pytest.mark.parametrize("part", range(2))
def test_cases_of_all_instructions_do_the_same(guest: Guest, possible: list[str], part: int) -> None:
    check(guest, covering_cases(possible)[part::2])


@pytest.mark.torture
@pytest.mark.parametrize("part", range(8))
def test_all_cases_do_the_same(guest: Guest, possible: list[str], part: int) -> None:
    check(guest, possible[part::8])


@pytest.mark.torture
def test_many_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 6000, 300, timeout=1800)
    assert count["defined"] == 300
    assert count["wild"] >= 100
