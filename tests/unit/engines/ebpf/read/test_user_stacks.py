"""Stacks of snapshots in the records that they belong to; the walk itself is tested elsewhere."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import SNAPSHOT, SNAPSHOT_REGISTERS
from dprobes.engines.ebpf.read.user_stacks import UserStacks
from dprobes.errors import TargetError
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.rpn.instruction_set import StackEnd, Token
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import executable_mappings, read_maps

if TYPE_CHECKING:
    import pytest

NOBODY = (1 << 22) - 1
"""No process has this number: kernel.pid_max is lower, or it is taken for the last one only."""


def snapshot(pid: int, number: int, position: int, ip: int) -> bytes:
    words = [0] * SNAPSHOT_REGISTERS
    words[16] = ip
    return SNAPSHOT.pack(pid, number, position, 8) + struct.pack(f"={SNAPSHOT_REGISTERS}Q", *words)


def item(words: list[int]) -> bytes:
    return bytes([Token.USER_STACK]) + struct.pack(f"=H{len(words)}Q", len(words), *words)


def record(data: bytes) -> bytes:
    return encode_record(LogRecord(major=1, minor=2, process_name="x", tid=5, data=data))


def test_the_stack_of_a_process_that_is_gone_is_the_place_and_says_so() -> None:
    stacks = UserStacks()
    entry = snapshot(NOBODY, 3, 0, 0x401000)
    stacks.take(entry, 0, len(entry))
    completed = stacks.completed(record(item([3, 0, 0, 0])))
    assert decode_record(completed).data == item([0x401000, StackEnd.GONE])
    assert not stacks


def test_stacks_that_are_given_up_say_that_there_is_no_copy() -> None:
    stacks = UserStacks()
    stacks.give_up()
    entry = snapshot(os.getpid(), 3, 0, 0x401000)
    stacks.take(entry, 0, len(entry))
    completed = stacks.completed(record(item([3, 0, 0, 0])))
    assert decode_record(completed).data == item([StackEnd.NO_COPY])


def test_the_stack_of_a_process_that_has_ended_is_found_by_what_it_had_mapped() -> None:
    images = ProcessImages()
    code = executable_mappings(read_maps(os.getpid()))

    def look() -> None:
        images.began(NOBODY, 0, code)

    stacks = UserStacks(images, look)
    address = ctypes.cast(ctypes.CDLL(None).qsort, ctypes.c_void_p).value
    assert address is not None
    # At its first instruction the return address is on top of the stack, of which nothing else was copied.
    entry = snapshot(NOBODY, 3, 0, address) + struct.pack("=Q", 0x1234)
    stacks.take(entry, 0, len(entry))
    completed = stacks.completed(record(item([3, 0, 0, 0])))
    assert decode_record(completed).data == item([address, 0x1234, StackEnd.NO_TABLE])


def test_so_is_that_of_one_whose_parent_has_not_asked_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is gone, though older kernels let it be opened: here a process that lives stands for it."""

    def nothing(pid: int) -> bytes:
        raise TargetError(f"process {pid} has no memory")

    images, own = ProcessImages(), os.getpid()
    images.began(own, 0, executable_mappings(read_maps(own)))
    monkeypatch.setattr("dprobes.engines.copied_stacks.mappings_of", nothing)
    address = ctypes.cast(ctypes.CDLL(None).qsort, ctypes.c_void_p).value
    assert address is not None
    stacks = UserStacks(images, lambda: None)
    entry = snapshot(own, 3, 0, address) + struct.pack("=Q", 0x1234)
    stacks.take(entry, 0, len(entry))
    completed = stacks.completed(record(item([3, 0, 0, 0])))
    assert decode_record(completed).data == item([address, 0x1234, StackEnd.NO_TABLE])


def test_each_stack_comes_to_its_place_and_what_is_around_stays() -> None:
    stacks = UserStacks()
    for number, position, ip in ((4, 0, 0x1000), (3, 2, 0x2000), (3, 2 + 19, 0x3000)):
        entry = snapshot(NOBODY, number, position, ip)
        stacks.take(b"xx" + entry, 2, 2 + len(entry))
    data = b"ab" + item([3, 0]) + item([3, 0, 0]) + b"end"
    expected = b"ab" + item([0x2000, StackEnd.GONE]) + item([0x3000, StackEnd.GONE]) + b"end"
    assert decode_record(stacks.completed(record(data))).data == expected
    assert decode_record(stacks.completed(record(item([4])))).data == item([0x1000])


def test_a_snapshot_of_a_hit_without_a_record_is_given_up_for_the_next_one() -> None:
    stacks = UserStacks()
    for ip in (0x1000, 0x2000):
        entry = snapshot(NOBODY, 3, 0, ip)
        stacks.take(entry, 0, len(entry))
    assert decode_record(stacks.completed(record(item([3])))).data == item([0x2000])


def test_a_record_without_a_stack_stays_as_it_is() -> None:
    stacks = UserStacks()
    entry = snapshot(os.getpid(), 3, 0, 0x1000)
    stacks.take(entry, 0, len(entry))
    assert stacks.completed(record(b"\x0a\x01\x00" + bytes(8))) == record(b"\x0a\x01\x00" + bytes(8))
    assert stacks
    stacks.close()
