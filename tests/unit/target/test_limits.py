"""What a file claims is measured against what it holds, and against what real files have."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf import file_contents as contents_module
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.file_contents import KnownBytes, file_contents
from dprobes.target.elf.symbol_sources import find_debug_file
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.other_users import Allowance, foreign_owner
from dprobes.target.process_maps import parse_maps, read_maps
from support.foreign_files import DYNSYM, SYMTAB, claim

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from unit.target.conftest import Toolbox

SEGMENT_SIZE = 56
LOAD, DYNAMIC, INTERP, NOTE = 1, 2, 3, 4


@pytest.mark.parametrize("kind", [SYMTAB, DYNSYM])
def test_a_file_that_is_mostly_a_hole_is_not_read(pie: Path, tmp_path: Path, kind: int) -> None:
    path = tmp_path / "hole"
    claim(pie, path, kind, 20 << 30)
    with pytest.raises(
        TargetError, match=rf"^'{path}' is a hole for the most part: \d+ of its 21\d+ bytes are on disk"
    ):
        ElfFile.open(path)
    with path.open("r+b") as file:
        file.truncate(contents_module.READ_LIMIT + 1)
        os.posix_fallocate(file.fileno(), 0, contents_module.READ_LIMIT + 1)
    assert len(file_contents(path, "a file")) == contents_module.READ_LIMIT + 1


@pytest.mark.parametrize(("mode", "is_mapped"), [(0o644, True), (0o622, False)])
def test_only_a_file_that_nobody_else_can_truncate_is_mapped(
    pie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, *, is_mapped: bool
) -> None:
    monkeypatch.setattr(contents_module, "READ_LIMIT", 0)
    path = tmp_path / "large"
    path.write_bytes(pie.read_bytes())
    path.chmod(mode)
    data = file_contents(path, "a file")
    assert isinstance(data, bytes) is not is_mapped
    assert data[:] == pie.read_bytes()


def test_a_file_without_any_data_is_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(TargetError, match="is a hole for the most part: 0 of its"):
        file_contents(path, "a file")


def changed(pie: Path, tmp_path: Path, change: Callable[[bytearray], None]) -> ElfFile:
    data = bytearray(pie.read_bytes())
    change(data)
    path = tmp_path / "changed"
    path.write_bytes(data)
    return ElfFile.open(path)


def segment(data: bytearray, kind: int) -> int:
    """Return the place of the first program header of a type."""
    (first,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    places = [int(first) + SEGMENT_SIZE * number for number in range(count)]
    return next(place for place in places if struct.unpack_from("<I", data, place)[0] == kind)


def test_segments_cannot_hold_much_more_than_the_file(pie: Path, tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        # A table of program headers behind everything, of which each loads the whole file.
        size, count = len(data), 1000
        header = struct.pack("<IIQQQQQQ", LOAD, 5, 0, 0, 0, 1 << 20, 1 << 20, 4096)
        struct.pack_into("<Q", data, 32, size)
        struct.pack_into("<H", data, 56, count)
        data += header * count + bytes(1 << 20)

    with pytest.raises(TargetError, match="is a malformed ELF file: its segments hold more than the file"):
        changed(pie, tmp_path, change)


def test_program_headers_are_limited(pie: Path, tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        struct.pack_into("<Q", data, 32, len(data))
        struct.pack_into("<H", data, 56, 2000)
        data += bytes(2000 * SEGMENT_SIZE)

    with pytest.raises(TargetError, match="is a malformed ELF file: 2000 program headers are more than are read"):
        changed(pie, tmp_path, change)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        (INTERP, 1 << 20, "the interpreter's name has 1048576 bytes, more than the 4096 that a path can have"),
        (DYNAMIC, 2 << 20, "the dynamic section has 2097152 bytes, more than the 1048576 that are read"),
    ],
)
def test_parts_are_limited(pie: Path, tmp_path: Path, kind: int, size: int, message: str) -> None:
    def change(data: bytearray) -> None:
        struct.pack_into("<Q", data, segment(data, kind) + 32, size)
        data += bytes(2 * size)

    with pytest.raises(TargetError, match=message):
        changed(pie, tmp_path, change)


def test_a_table_of_too_many_symbols_is_not_read(pie: Path, tmp_path: Path) -> None:
    path = tmp_path / "symbols"
    size = 24 * ((1 << 23) + 1)
    claim(pie, path, SYMTAB, size)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with pytest.raises(TargetError, match="a table of 8388609 symbols is larger than the 8388608 that are read"):
        elf_symbols(ElfFile.open(path))


def test_a_debug_link_that_leads_in_a_circle_is_passed_over(tools: Toolbox) -> None:
    """Any user can make such a link beside a file of theirs."""
    path = tools.build("circle", {"circle.c": "int main(void) { return 0; }"})
    circle = tools.directory / "circle.debug"
    circle.write_bytes(b"debug")
    tools.run("objcopy", "--add-gnu-debuglink=circle.debug", path)
    circle.unlink()
    circle.symlink_to("circle.debug")
    assert find_debug_file(ElfFile.open(path)) is None


def test_known_bytes_are_those_of_the_pieces() -> None:
    data = KnownBytes(100, {10: b"abc", 99: b"x"})
    assert len(data) == 100
    assert data[10] == ord("a")
    assert (data[10:12], data[10:50], data[11:12], data[99:120]) == (b"ab", b"abc", b"", b"x")
    assert data.find(b"abc") == -1


def test_an_allowance_comes_back_with_time() -> None:
    allowance = Allowance(2, 0.5)
    assert allowance.has(2, 100.0)
    allowance.use(2)
    assert not allowance.has(1, 101.9)
    assert allowance.has(1, 102.0)
    allowance.use(3)
    assert not allowance.has(1, 105.0)
    assert allowance.has(1, 108.0)
    assert not allowance.has(2.5, 100_000.0)


def status(mode: int, user: int, group: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, user, group, 0, 0, 0, 0))


def test_a_file_is_foreign_that_another_user_can_change() -> None:
    own, group = os.geteuid(), os.getegid()
    assert foreign_owner(status(0o755, 0, 0)) is None
    assert foreign_owner(status(0o775, own, group)) is None
    assert foreign_owner(status(0o755, 54321, 0)) == "user 54321"
    assert foreign_owner(status(0o757, 0, 0)) == "everybody"
    assert foreign_owner(status(0o775, 0, 54321)) == "group 54321"
    assert foreign_owner(status(0o755, 0, 54321)) is None


def test_a_part_of_what_a_process_maps_ends_with_a_line() -> None:
    whole = read_maps(os.getpid())
    assert read_maps(os.getpid(), 1 << 30) == whole
    part = read_maps(os.getpid(), 1)
    assert part.endswith("\n")
    assert whole.startswith(part[:1000])
    assert parse_maps(part)
