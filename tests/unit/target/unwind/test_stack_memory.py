"""A process that has ended is unwound by its files: as it was by its memory, and not by files that are other ones."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.process_images import ProcessImage
from dprobes.target.process_maps import executable_mappings, parse_maps, read_maps
from dprobes.target.unwind.stack_memory import FileSpace, MappedFiles, ProcessSpace
from dprobes.target.unwind.stack_walk import COLUMNS, walk

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS_64 = COLUMNS["x86_64"]
STACK = 0x1000


def own_image() -> ProcessImage:
    return ProcessImage(os.getpid(), 0, executable_mappings(read_maps(os.getpid())))


def own_memory() -> ProcessSpace:
    memory = os.open("/proc/self/mem", os.O_RDONLY)

    def read(address: int, size: int) -> bytes:
        if address in range(STACK, STACK + len(WORDS)):
            return WORDS[address - STACK : address - STACK + size]
        return os.pread(memory, size, address)

    return ProcessSpace(8, read, lambda: parse_maps(read_maps(os.getpid())))


def address_of(function: str) -> int:
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    assert address is not None
    return address


WORDS = b"".join((address_of("qsort") + 1).to_bytes(8, sys.byteorder) for _ in range(40)) + bytes(64)


def read_stack(address: int, size: int) -> bytes:
    if not STACK <= address <= STACK + len(WORDS) - size:
        raise TargetError("no memory")
    return WORDS[address - STACK : address - STACK + size]


@pytest.mark.parametrize("function", ["qsort", "printf", "malloc", "PyObject_Malloc"])
def test_a_stack_is_the_one_that_memory_gives(function: str) -> None:
    if not hasattr(ctypes.CDLL(None), function):
        function = "fopen"
    space = FileSpace(8, own_image(), MappedFiles())
    space.read_stack = read_stack
    registers = dict.fromkeys(range(16), 0) | {COLUMNS_64.pc: address_of(function), COLUMNS_64.sp: STACK}
    found = walk(space, COLUMNS_64, registers, 100)
    assert found == walk(own_memory(), COLUMNS_64, registers, 100)
    assert len(found.addresses) > 20


def test_without_a_stack_it_ends_at_once() -> None:
    space = FileSpace(8, own_image(), MappedFiles())
    registers = dict.fromkeys(range(16), 0) | {COLUMNS_64.pc: address_of("qsort"), COLUMNS_64.sp: STACK}
    assert walk(space, COLUMNS_64, registers, 9).end is StackEnd.UNREADABLE
    assert space.table_at(0x1234) is None


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    shutil.copy(os.path.realpath("/bin/true"), path)
    mapping = next(iter(own_image().mappings))
    status = path.stat()
    mapping = mapping._replace(path=str(path), inode=status.st_ino, device=status.st_dev)
    assert MappedFiles().of(mapping) is not None
    assert MappedFiles().of(mapping._replace(inode=status.st_ino + 1)) is None
    path.write_bytes(b"no module")
    assert MappedFiles().of(mapping) is None
    path.unlink()
    assert MappedFiles().of(mapping) is None
