"""The stacks of copies: of processes that live, and of those that have ended."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

from dprobes.engines.copied_stacks import CopiedStacks
from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import executable_mappings, read_maps

if TYPE_CHECKING:
    import pytest

NOBODY = (1 << 22) - 1
"""No process has this number: kernel.pid_max is lower, or it is taken for the last one only."""
SP, PC = 7, 16


def registers(ip: int, sp: int = 0) -> dict[int, int]:
    return {**dict.fromkeys(range(17), 0), PC: ip, SP: sp}


def a_function() -> int:
    address = ctypes.cast(ctypes.CDLL(None).qsort, ctypes.c_void_p).value
    assert address is not None
    return address


def test_the_stack_of_a_process_that_is_gone_is_the_place_and_says_so() -> None:
    assert CopiedStacks().follow(NOBODY, 8, registers(0x401000), b"") == (0x401000, StackEnd.GONE)


def test_what_was_not_copied_is_not_guessed() -> None:
    stacks, address = CopiedStacks(), a_function()
    copy = struct.pack("=Q", 0x1234)
    assert stacks.follow(os.getpid(), 8, registers(address, 0x5000), copy) == (address, 0x1234, StackEnd.NO_TABLE)
    assert stacks.follow(os.getpid(), 8, registers(address, 0x5000), copy[:4]) == (address, StackEnd.UNREADABLE)
    assert stacks.follow(os.getpid(), 8, registers(address, 0x5000), copy, 1) == (address,)
    stacks.close()


def test_the_stack_of_a_process_that_has_ended_is_found_by_what_it_had_mapped() -> None:
    images, told = ProcessImages(), []

    def look() -> None:
        told.append(NOBODY)
        images.began(NOBODY, 0, executable_mappings(read_maps(os.getpid())))

    stacks, address = CopiedStacks(images, look), a_function()
    found = stacks.follow(NOBODY, 8, registers(address, 0x5000), struct.pack("=Q", 0x1234))
    assert found == (address, 0x1234, StackEnd.NO_TABLE)
    assert told == [NOBODY]
    assert stacks.follow(NOBODY, 8, registers(address, 0x5000), b"") == (address, StackEnd.UNREADABLE)


def test_so_is_that_of_one_whose_parent_has_not_asked_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is gone, though older kernels let it be opened: here a process that lives stands for it."""

    def nothing(pid: int) -> bytes:
        raise TargetError(f"process {pid} has no memory")

    images, own = ProcessImages(), os.getpid()
    images.began(own, 0, executable_mappings(read_maps(own)))
    monkeypatch.setattr("dprobes.engines.copied_stacks.mappings_of", nothing)
    address = a_function()
    found = CopiedStacks(images).follow(own, 8, registers(address), struct.pack("=Q", 0x1234))
    assert found == (address, 0x1234, StackEnd.NO_TABLE)
