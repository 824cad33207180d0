"""How the kernel comes to kprobes is what is said of it beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.kprobe_way_calls import differing_ways

if TYPE_CHECKING:
    from guests.guest import Guest


def test_what_is_said_of_random_instructions_is_what_the_kernel_does(guest: Guest) -> None:
    counts, differing, _ = guest.call(differing_ways, 1, 80, timeout=280)
    assert differing == []
    assert min(counts[way] for way in ("FTRACE", "OPTIMIZED", "")) >= 8, counts


def test_where_the_kernel_is_told_to_make_no_jumps_none_are_said(guest: Guest) -> None:
    counts, differing, _ = guest.call(differing_ways, 2, 40, 0, timeout=250)
    assert differing == []
    assert counts["FTRACE"] >= 5
    assert "OPTIMIZED" not in counts


@pytest.mark.torture
def test_what_is_said_of_thousands_of_instructions_is_what_the_kernel_does(guest: Guest) -> None:
    counts, differing, _ = guest.call(differing_ways, 3, 3000, timeout=3600)
    assert differing == []
    assert min(counts[way] for way in ("FTRACE", "OPTIMIZED", "")) >= 200, counts
