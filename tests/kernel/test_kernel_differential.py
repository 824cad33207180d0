"""Random programs do the same at a function of the kernel, called with chosen arguments, as in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.kernelsite import agreed, agreed_cases

if TYPE_CHECKING:
    from guests.guest import Guest


CASES = Path(__file__).parents[1] / "cases"


def test_some_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 5000, 10)
    assert count["defined"] == 10
    assert count["wild"] >= 2


PARTS = 8
"""In how many guests the cases run, for each kernel."""


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_do_the_same(guest: Guest, part: int) -> None:
    paths = sorted(str(path) for path in CASES.rglob("*.case"))[part::PARTS]
    count, differing = guest.call(agreed_cases, paths, timeout=280)
    assert differing == []
    assert count >= 25


@pytest.mark.torture
def test_many_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 6000, 300, timeout=1800)
    assert count["defined"] == 300
    assert count["wild"] >= 100
