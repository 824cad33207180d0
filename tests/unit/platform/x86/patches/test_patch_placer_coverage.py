"""How many of the instructions of real modules can be probed, and whether all jumps of a module get on together."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from iced_x86 import Decoder

from dprobes.platform.x86.patches.displaced_code import displaced
from dprobes.platform.x86.patches.patch_placer import Placement, Placer, Shared, leads_to
from support.patched_modules import MODULES, address_space, code_of, entries, instructions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.platform.x86.patches.branch_targets import ModuleCode

ROOM = 96
SAMPLE = 4000
PLENTY = 1 << 30  # regions: placements come and go here, and blocks stay

INSTRUCTIONS = {"libc.so.6": 0.99, "libcrypto.so.3": 0.99, "libsqlite3.so.0": 0.99, "python3": 0.985}
ENTRIES = {"libc.so.6": 0.999, "libcrypto.so.3": 0.999, "libsqlite3.so.0": 0.999, "python3": 0.98}
"""Of a program for fixed addresses half of the punned jumps would lead below it, and others to where its heap grows."""


def check(code: ModuleCode, placed: Placement) -> None:
    """Assert that the bytes around a site are a jump to a trampoline that has a copy of what is displaced."""
    plan = placed.plan
    around = code.around(plan.start)
    assert around is not None
    assert leads_to(around, plan.start) == placed.trampoline
    first, end = plan.start - around.start, placed.relied_on - around.start
    whole = bytes(around.current[first:end])
    jump = Decoder(64, whole, ip=plan.start).decode()
    assert jump.len == len(whole)
    assert jump.near_branch_target == (placed.trampoline if plan.padding is None else plan.padding)
    assert plan.raw == around.original[first : first + len(plan.raw)]
    lengths = [instruction.len for instruction in Decoder(64, plan.raw, ip=plan.start)]
    assert (tuple(lengths), sum(lengths)) == (plan.sizes, len(plan.raw))
    assert displaced(plan.raw, plan.start, placed.trampoline) is not None


def share_placed(name: str, sites: Iterable[int], *, windows_first: bool) -> float:
    """Return the share of sites that can be placed, each without the others; check each."""
    code = code_of(name)
    placer = Placer(code, address_space(name, regions_max=PLENTY), ROOM)
    results = Counter[bool]()
    for site in sites:
        (found,) = placer.place([site], windows_first=windows_first)
        results[isinstance(found, Placement)] += 1
        if isinstance(found, Placement):
            check(code, found)
            assert placer.remove(found)
    assert all(around.current == around.original for around in code.ranges)
    return results[True] / results.total()


def check_together(name: str, sites: list[int], share: float, *, regions_max: int = 30_000) -> None:
    """Place all sites at once, and check each when all are written."""
    code, space = code_of(name), address_space(name, regions_max=regions_max)
    results = list(Placer(code, space, ROOM).place(sites))
    placed = [found for found in results if isinstance(found, Placement)]
    shared = [found for found in results if isinstance(found, Shared)]
    assert len(placed) + len(shared) >= share * len(sites)
    by_trampoline = {one.trampoline: one for one in placed}
    for other in shared:
        assert by_trampoline[other.placement.trampoline] is other.placement
        assert other.site in (*other.placement.plan.boundaries, other.placement.plan.site)
    for one in placed:
        check(code, one)
    trampolines = sorted(one.trampoline for one in placed)
    assert all(second - first >= ROOM for first, second in pairwise(trampolines))
    written = {write.address + n for one in placed for write in one.writes for n in range(len(write.data))}
    assert sum(len(write.data) for one in placed for write in one.writes) == len(written)
    for around in code.ranges:
        changed = {
            around.start + n
            for n, (new, old) in enumerate(zip(around.current, around.original, strict=True))
            if new != old
        }
        assert changed <= written
    regions = space.regions()
    assert all(
        any(start <= at and at + ROOM <= end for start, end in regions) for at in trampolines[:: len(placed) // 50]
    )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("windows_first", [False, True], ids=["puns", "windows"])
def test_a_sample_of_instructions(name: str, *, windows_first: bool) -> None:
    addresses = sorted(instruction.ip for instruction in instructions(name))
    sample = Random(name).sample(addresses, SAMPLE)
    assert share_placed(name, sample, windows_first=windows_first) >= INSTRUCTIONS[name]


def test_every_function_of_a_library_at_once() -> None:
    check_together("libsqlite3.so.0", entries("libsqlite3.so.0"), ENTRIES["libsqlite3.so.0"])


def test_neighbouring_instructions_at_once() -> None:
    addresses = [instruction.ip for instruction in instructions("libsqlite3.so.0")]
    check_together("libsqlite3.so.0", addresses[20000:21500], 0.95)


@pytest.mark.torture
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("windows_first", [False, True], ids=["puns", "windows"])
def test_all_instructions(name: str, *, windows_first: bool) -> None:
    addresses = [instruction.ip for instruction in instructions(name)]
    assert share_placed(name, addresses, windows_first=windows_first) >= INSTRUCTIONS[name]


@pytest.mark.torture
@pytest.mark.parametrize("name", MODULES)
def test_all_functions(name: str) -> None:
    assert share_placed(name, entries(name), windows_first=False) >= ENTRIES[name]
    check_together(name, entries(name), ENTRIES[name] - 0.002)


@pytest.mark.torture
@pytest.mark.parametrize("name", MODULES)
def test_all_instructions_at_once(name: str) -> None:
    check_together(name, [instruction.ip for instruction in instructions(name)], 0.95, regions_max=PLENTY)
