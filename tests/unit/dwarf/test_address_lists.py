from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.address_lists import ListedBounds, bounds_at, old_bounds_at
from unit.dwarf.conftest import read

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Unit

BASE = 0x1000


@pytest.fixture
def unit(program: Path) -> Unit:
    return next(read(program).units())


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (4, b"\x10\x80\x01", ListedBounds(0x1010, 0x1080, BASE, 3)),
        (5, struct.pack("<Q", 0x5000), ListedBounds(None, 0, 0x5000, 8)),
        (6, struct.pack("<QQ", 0x5000, 0x5008), ListedBounds(0x5000, 0x5008, BASE, 16)),
        (7, struct.pack("<Q", 0x5000) + b"\x81\x01", ListedBounds(0x5000, 0x5081, BASE, 10)),
    ],
)
def test_entries_of_dwarf_5(unit: Unit, kind: int, data: bytes, expected: ListedBounds) -> None:
    assert bounds_at(unit, data, 0, kind, BASE) == expected


def test_entries_of_another_kind_are_refused(unit: Unit) -> None:
    for kind in (0, 8, 200):
        with pytest.raises(ValueError, match=f"an entry of kind {kind}"):
            bounds_at(unit, bytes(32), 0, kind, BASE)


def test_entries_of_dwarf_4(unit: Unit) -> None:
    data = struct.pack("<6Q", 0x10, 0x20, (1 << 64) - 1, 0x8000, 0, 0)
    assert old_bounds_at(unit, data, 0, BASE) == ListedBounds(0x1010, 0x1020, BASE, 16)
    assert old_bounds_at(unit, data, 16, BASE) == ListedBounds(None, 0, 0x8000, 32)
    assert old_bounds_at(unit, data, 32, BASE) is None
