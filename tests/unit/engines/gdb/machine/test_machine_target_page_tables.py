"""Walks through page tables, by tables that are written down here."""

from __future__ import annotations

import pytest

from dprobes.engines.gdb.machine.machine_target import Paging, Region, Translation, paging_of, regions, translate

PRESENT, WRITABLE, USER, LARGE, NO_EXECUTE = 1, 2, 4, 128, 1 << 63
ALL = PRESENT | WRITABLE | USER
ROOT, UPPER, MIDDLE, LAST = 0x1000, 0x2000, 0x3000, 0x4000
KERNEL = 0xFFFFFFFF81200000

TABLES = {
    ROOT + 8 * 511: UPPER | ALL,
    UPPER + 8 * 510: MIDDLE | ALL,
    MIDDLE + 8 * 9: 0x40000000 | LARGE | PRESENT,
    MIDDLE + 8 * 10: LAST | ALL,
    MIDDLE + 8 * 11: 0x60000000 | LARGE | ALL | NO_EXECUTE,
    LAST + 8 * 0: 0x7000 | PRESENT | NO_EXECUTE,
    LAST + 8 * 2: 0x9000 | PRESENT | USER,
    UPPER + 8 * 511: 0x80000000 | LARGE | ALL,
}


def entry_at(place: int) -> int:
    return TABLES.get(place, 0)


def walk(address: int, paging: Paging = Paging.FOUR_LEVELS) -> Translation | None:
    return translate(entry_at, ROOT, paging, address)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (KERNEL + 0x345, Translation(0x40000345, 0x1FFCBB, False, False, True)),
        (KERNEL + 0x200008, Translation(0x7008, 0xFF8, False, False, False)),
        (KERNEL + 0x202000, Translation(0x9000, 0x1000, False, True, True)),
        (KERNEL + 0x400000, Translation(0x60000000, 0x200000, True, True, False)),
        (0xFFFFFFFFC0000010, Translation(0x80000010, 0x3FFFFFF0, True, True, True)),
    ],
)
def test_pages_of_each_size(address: int, expected: Translation) -> None:
    assert walk(address) == expected


@pytest.mark.parametrize("address", [KERNEL + 0x201000, 0xFFFFFFFF80000000, 0, 0x8000_0000_0000_0000])
def test_what_is_not_mapped_or_no_address_is_nowhere(address: int) -> None:
    assert walk(address) is None


def test_what_cannot_be_read_leads_nowhere() -> None:
    assert translate(lambda _: None, ROOT, Paging.FOUR_LEVELS, KERNEL) is None


def test_five_levels() -> None:
    tables = {**TABLES, 0x5000 + 8 * 511: ROOT | ALL}
    found = translate(lambda place: tables.get(place, 0), 0x5000, Paging.FIVE_LEVELS, KERNEL)
    assert found == Translation(0x40000000, 0x200000, False, False, True)


def test_without_paging_addresses_are_physical() -> None:
    assert walk(0xF0123, Paging.OFF) == Translation(0xF0123, 0xEDD, True, True, True)


@pytest.mark.parametrize(
    ("registers", "expected"),
    [
        ((0x10, 0, 0), Paging.OFF),
        ((0x80000011, 0x20, 0), Paging.OTHER),
        ((0x80050033, 0x6F0, 0xD01), Paging.FOUR_LEVELS),
        ((0x80050033, 0x16F0, 0xD01), Paging.FIVE_LEVELS),
    ],
)
def test_the_form_of_paging(registers: tuple[int, int, int], expected: Paging) -> None:
    assert paging_of(*registers) is expected


def test_regions_are_what_the_same_may_be_done_with() -> None:
    start, end = KERNEL - (1 << 21), KERNEL + (1 << 23)
    assert list(regions(entry_at, ROOT, Paging.FOUR_LEVELS, start, end, 4096)) == [
        Region(KERNEL, KERNEL + 0x200000, is_writable=False, is_executable=True),
        Region(KERNEL + 0x200000, KERNEL + 0x201000, is_writable=False, is_executable=False),
        Region(KERNEL + 0x202000, KERNEL + 0x203000, is_writable=False, is_executable=True),
        Region(KERNEL + 0x400000, KERNEL + 0x600000, is_writable=True, is_executable=False),
    ]
