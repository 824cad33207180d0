"""Objects of live patches whose segments or symbols are unusual."""

from __future__ import annotations

import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.patch_object import PatchObject
from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")

SOURCE = """
extern char fixed;
char *place_of_fixed = &fixed;
int replacement(void) { return 1; }
"""
_HEADERS, _PT_LOAD = 64, 1
_SIZES = struct.Struct("<QQ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "fix.c").write_text(SOURCE)
    command = "gcc -O1 -shared -fPIC -nostartfiles -Wl,--defsym,fixed=0x1234 fix.c -o fix.so"
    subprocess.run(command.split(), cwd=tmp_path, check=True)
    return tmp_path / "fix.so"


def with_sizes(path: Path, change: Callable[[int, int], tuple[int, int]]) -> None:
    """Change the sizes of all loaded segments, in the file and in memory."""
    data = bytearray(path.read_bytes())
    (count,) = struct.unpack_from("<H", data, 56)
    for at in range(_HEADERS, _HEADERS + 56 * count, 56):
        if int.from_bytes(data[at : at + 4], "little") == _PT_LOAD:
            _SIZES.pack_into(data, at + 32, *change(*_SIZES.unpack_from(data, at + 32)))
    path.write_bytes(data)


def test_an_object_without_memory_is_refused(path: Path) -> None:
    with_sizes(path, lambda in_file, _: (in_file, 0))
    with pytest.raises(TargetError) as caught:
        PatchObject.read(path)
    assert caught.value.message == f"'{path}' has no memory: all its segments are empty"


def test_an_object_with_more_bytes_than_memory_is_refused(path: Path) -> None:
    with_sizes(path, lambda in_file, _: (in_file, 16))
    with pytest.raises(TargetError) as caught:
        PatchObject.read(path)
    first = ElfFile.open(path).load_segments[0].filesz
    assert caught.value.message == (
        f"'{path}' is a malformed ELF file: a segment has {first} bytes in the file and only 16 in memory"
    )


def test_an_absolute_symbol_is_not_moved(path: Path) -> None:
    image = PatchObject.read(path).image(0x7F0000000000, lambda _: 0)
    assert (0x1234).to_bytes(8, "little") in image
    assert (0x7F0000001234).to_bytes(8, "little") not in image
