"""Random programs do the same at a function of the kernel, called with chosen arguments, as in the interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.kernelsite import agreed

if TYPE_CHECKING:
    from guests.guest import Guest


def test_some_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 5000, 10)
    assert count["defined"] == 10
    assert count["wild"] >= 2


@pytest.mark.torture
def test_many_programs_do_the_same(guest: Guest) -> None:
    count = guest.call(agreed, 6000, 300, timeout=1800)
    assert count["defined"] == 300
    assert count["wild"] >= 100
