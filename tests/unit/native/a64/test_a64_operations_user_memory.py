"""Memory that is there is copied exactly, and nothing else is touched; what is not there is an error."""

from __future__ import annotations

import errno
from random import Random
from typing import TYPE_CHECKING

import pytest
import unicorn

from dprobes.native.a64.a64_operations import A64Operations, gpr
from dprobes.native.runtime_routines import write_read, write_read_string, write_write
from support.a64_processor import PAGE, A64Processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.native.generated_code import Fixup

CODE, THEIRS, OURS = 0x40_0000, 0x50_0000, 0x60_0000
THEIR_SIZE, OUR_SIZE = 2 * PAGE, 4 * PAGE
END = THEIRS + THEIR_SIZE
FAULT = (1 << 64) - errno.EFAULT
GUARD = b"\xa5"


class Routine:
    """A routine, with two pages of the program, and memory of ours."""

    def __init__(self, write: Callable[[A64Operations], list[Fixup]]) -> None:
        asm = A64Operations(CODE)
        fixups = write(asm)
        self.processor = A64Processor([])
        self.processor.put(CODE, asm.assemble())
        self.processor.catch(fixups)
        self.processor.map(THEIRS, THEIR_SIZE)
        self.processor.map(OURS, OUR_SIZE)

    def __call__(self, *arguments: int) -> int:
        self.processor.call(CODE, *arguments)
        return self.processor.registers()[gpr(0)]


def places(random: Random, size: int) -> list[int]:
    """Return addresses in the program's memory, some of which leave less than ``size`` bytes."""
    return [
        THEIRS,
        THEIRS + random.randrange(PAGE),
        THEIRS + PAGE - random.randrange(1, 9),
        END - size,
        END - size + random.randrange(1, size + 1),
        END,
        THEIRS - 1,
        0,
        1 << 63,
        (1 << 64) - 1,
    ]


def is_there(address: int, size: int) -> bool:
    return address >= THEIRS and address + size <= END


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 63, 64, 65, 1000])
def test_reads(size: int) -> None:
    random, routine = Random(size), Routine(write_read)
    data = random.randbytes(THEIR_SIZE)
    routine.processor.write(THEIRS, data)
    for source in places(random, size):
        target = OURS + PAGE + random.randrange(64)
        routine.processor.write(target - 16, GUARD * (size + 32))
        result = routine(target, size, source)
        there = is_there(source, size)
        assert result == (0 if there else FAULT)
        expected = data[source - THEIRS :][:size] if there else bytes(size)
        assert routine.processor.read(target - 16, size + 32) == GUARD * 16 + expected + GUARD * 16


def test_nothing_is_read_of_size_0() -> None:
    assert Routine(write_read)(OURS, 0, 0) == 0
    assert Routine(write_read_string)(OURS, 0, 0) == 0


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000])
def test_writes(size: int) -> None:
    random, routine = Random(size), Routine(write_write)
    data = random.randbytes(size)
    for target in places(random, size):
        source = OURS + random.randrange(64)
        routine.processor.write(source, data)
        routine.processor.write(THEIRS, GUARD * THEIR_SIZE)
        result = routine(target, source, size)
        if is_there(target, size):
            assert result == 0
            at = target - THEIRS
            expected = GUARD * at + data + GUARD * (THEIR_SIZE - at - size)
            assert routine.processor.read(THEIRS, THEIR_SIZE) == expected
        else:
            assert result == FAULT


def test_nothing_is_written_to_what_is_read_only() -> None:
    routine = Routine(write_write)
    routine.processor.protect(THEIRS, PAGE, unicorn.UC_PROT_READ)
    assert routine(THEIRS + 8, OURS, 8) == FAULT
    assert routine.processor.read(THEIRS, PAGE) == bytes(PAGE)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 100, 200])
@pytest.mark.parametrize("room", [1, 2, 8, 9, 16, 17, 128])
def test_strings(length: int, room: int) -> None:
    random, routine = Random(length << 8 | room), Routine(write_read_string)
    text = bytes(random.randrange(1, 256) for _ in range(length))
    for source in (THEIRS + random.randrange(64), THEIRS + PAGE - length // 2, END - length - 1):
        routine.processor.write(source, text + b"\0")
        target = OURS + PAGE + random.randrange(8)
        routine.processor.write(target - 16, GUARD * (room + 32))
        copied = text[: room - 1]
        assert routine(target, room, source) == len(copied) + 1
        found = routine.processor.read(target - 16, room + 32)
        assert found[:16] == found[16 + room :] == GUARD * 16
        assert found[16 : 16 + len(copied) + 1] == copied + b"\0"


def test_a_string_that_runs_out_of_memory() -> None:
    routine = Routine(write_read_string)
    routine.processor.write(END - 5, b"abcde")
    assert routine(OURS, 32, END - 5) == FAULT
    assert routine.processor.read(OURS, 32) == bytes(32)
    assert routine(OURS, 5, END - 5) == 5
    assert routine.processor.read(OURS, 5) == b"abcd\0"
