"""The table of where functions start, by an image made up for it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.target.elf import elf_file
from dprobes.target.elf.elf_file import FrameTable
from dprobes.target.unwind import exception_frames

if TYPE_CHECKING:
    from dprobes.target.elf.elf_file import Image

ADDRESS = 0x2000
ROWS = ((-0x800, 0x100), (-0x1000, 0x80))


class Table:
    """An image of ``.eh_frame_hdr`` alone, as LSB 5.0 (10.6.2) draws it: a search table of starts and descriptions."""

    word_size = 8
    byte_order = "little"

    def __init__(self) -> None:
        numbers = [number for row in ROWS for number in row]
        self.data = struct.pack("<4BiI4i", 1, 0x1B, 0x03, 0x3B, 0, len(ROWS), *numbers)

    def read(self, link_address: int, n: int) -> bytes:
        return self.data[link_address - ADDRESS :][:n]


@pytest.mark.parametrize(("rows_max", "starts", "descriptions"), [(2, (0x1000, 0x1800), (0x2080, 0x2100)), (1, (), ())])
def test_a_table_with_more_rows_than_there_can_be_is_none(
    monkeypatch: pytest.MonkeyPatch, rows_max: int, starts: tuple[int, ...], descriptions: tuple[int, ...]
) -> None:
    monkeypatch.setattr(exception_frames, "_TABLE_MAX", rows_max)
    table = Table()
    found = FrameTable.of(cast("Image", table), (ADDRESS, len(table.data)))
    assert (found.starts, found.descriptions) == (starts, descriptions)


@pytest.mark.parametrize(
    ("augmentation", "data", "encoding"),
    [
        (b"zR", b"\x1b", 0x1B),
        (b"zPLR", b"\x1b" + bytes(4) + b"\x1b\x0c", 0x0C),
        (b"zPR", b"\x00" + bytes(8) + b"\x1b", 0x1B),
        (b"zS", b"", 0),
        (b"eh", b"\x1b", None),
    ],
)
def test_the_encoding_of_addresses_is_behind_those_of_what_comes_before(
    augmentation: bytes, data: bytes, encoding: int | None
) -> None:
    # Version, augmentation, code and data alignment (two bytes: ULEB128 goes on), return column, length, data.
    entry = b"\x01" + augmentation + b"\0" + b"\x01" + b"\xf8\x7f" + b"\x10" + bytes([len(data)]) + data
    assert elf_file._pointer_encoding(entry.ljust(40, b"\0"), cast("Image", Table())) == encoding
