"""Memory that is there is copied exactly, and nothing else is touched; what is not there is an error."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import TYPE_CHECKING

import pytest

from dprobes.native.runtime_routines import write_read, write_read_string, write_write
from dprobes.native.x86.x86_assembler import Gpr
from dprobes.native.x86.x86_operations import X86Operations
from support.machine_code import Pages, function_at, handle_faults, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.native.generated_code import Fixup

PAGE = mmap.PAGESIZE
FAULT = (1 << 64) - errno.EFAULT
SIZES = [*range(71), 127, 128, 1000]
GUARD = 0xA5


class Routine:
    """A routine for this process, in which it may fault."""

    def __init__(self, write: Callable[[X86Operations], list[Fixup]]) -> None:
        room = PAGE
        address = reserve(room)
        asm = X86Operations(address)
        fixups = write(asm)
        place(address, asm.assemble(), room)
        self._function = function_at(address, 3)
        self._faults = handle_faults(fixups)

    def __call__(self, first: int, second: int, third: int) -> int:
        with self._faults:
            return self._function(first, second, third)


@pytest.fixture(scope="module")
def read() -> Routine:
    return Routine(write_read)


@pytest.fixture(scope="module")
def write() -> Routine:
    return Routine(write_write)


@pytest.fixture(scope="module")
def read_string() -> Routine:
    return Routine(write_read_string)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages(2)
    yield made
    made.close()


class Target:
    """Memory of ours with guards around it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._buffer = ctypes.create_string_buffer(bytes((GUARD,)) * (size + 32), size + 32)
        self.address = ctypes.addressof(self._buffer) + 16

    def data(self) -> bytes:
        """Return what it holds, after a look at the guards."""
        raw = self._buffer.raw
        assert set(raw[:16] + raw[16 + self.size :]) == {GUARD}
        return raw[16 : 16 + self.size]


def pattern(size: int) -> bytes:
    return bytes(n % 251 + 1 for n in range(size))


@pytest.mark.parametrize("alignment", range(8))
def test_reads(read: Routine, pages: Pages, alignment: int) -> None:
    pages.write(pages.start, pattern(2 * PAGE))
    for size in SIZES:
        for start in (pages.start + alignment, pages.start + PAGE - size // 2 - alignment, pages.end - size):
            target = Target(size)
            assert read(target.address, size, start) == 0
            assert target.data() == pattern(2 * PAGE)[start - pages.start :][:size]


def test_a_read_that_does_not_succeed_clears_all(read: Routine, pages: Pages) -> None:
    pages.write(pages.start, pattern(2 * PAGE))
    for size in SIZES[1:]:
        for missing in {1, min(7, size), min(8, size), size}:
            target = Target(size)
            assert read(target.address, size, pages.end - size + missing) == FAULT
            assert target.data() == bytes(size)
        assert read(Target(size).address, size, pages.start - 1) == FAULT


@pytest.mark.parametrize("address", [0, 1, 0xFFFF_FFFF_FFFF_FFFF, 0x8000_0000_0000_0000, 0xFFFF_8000_0000_0000])
def test_no_address_is_harmful(read: Routine, write: Routine, read_string: Routine, address: int) -> None:
    for size in (1, 8, 15):
        target = Target(size)
        assert read(target.address, size, address) == FAULT
        assert target.data() == bytes(size)
        target = Target(size + 1)
        assert read_string(target.address, size + 1, address) == FAULT
        assert target.data() == bytes(size + 1)
        source = ctypes.create_string_buffer(16)
        assert write(address, ctypes.addressof(source), size) == FAULT


@pytest.mark.parametrize("alignment", range(8))
def test_writes(write: Routine, pages: Pages, alignment: int) -> None:
    for size in SIZES:
        source = ctypes.create_string_buffer(pattern(size), size + 1)
        for start in (pages.start + alignment, pages.start + PAGE - size // 2 - alignment, pages.end - size):
            pages.write(pages.start, bytes((GUARD,)) * 2 * PAGE)
            assert write(start, ctypes.addressof(source), size) == 0
            at = start - pages.start
            expected = bytes((GUARD,)) * at + pattern(size) + bytes((GUARD,)) * (2 * PAGE - at - size)
            assert ctypes.string_at(pages.start, 2 * PAGE) == expected


def test_memory_that_may_not_be_written_keeps_what_it_has(write: Routine, pages: Pages) -> None:
    pages.write(pages.start, pattern(2 * PAGE))
    pages.protect(1, mmap.PROT_READ)
    source = ctypes.create_string_buffer(bytes(100))
    for size in (1, 8, 70):
        assert write(pages.end - size, ctypes.addressof(source), size) == FAULT
        assert write(pages.start + PAGE - 1, ctypes.addressof(source), size) == (FAULT if size > 1 else 0)
    assert ctypes.string_at(pages.start + PAGE, PAGE) == pattern(2 * PAGE)[PAGE:]


def test_strings(read_string: Routine, pages: Pages) -> None:
    """Each length with each room, at the end of what is mapped, or over the border of pages, or before more of it."""
    for length in (*range(40), 63, 64, 65):
        string = pattern(length).replace(b"\0", b"x") + b"\0"
        for size in {1, 2, 7, 8, 9, 10, 16, 17, length, length + 1, length + 2, 100} - {0}:
            for start in (pages.end - len(string), pages.start + PAGE - length // 2, pages.start + 3):
                pages.write(pages.start, b"\xff" * 2 * PAGE)
                pages.write(start, string)
                target = Target(size)
                taken = min(length + 1, size)
                assert read_string(target.address, size, start) == taken
                assert target.data()[:taken] == string[: taken - 1] + b"\0"


def test_a_string_without_an_end_is_an_error(read_string: Routine, pages: Pages) -> None:
    pages.write(pages.start, b"x" * 2 * PAGE)
    for length in range(40):
        size = length + 5
        target = Target(size)
        assert read_string(target.address, size, pages.end - length) == FAULT
        assert target.data() == bytes(size)
        target = Target(length + 1)
        assert read_string(target.address, length + 1, pages.end - length) == length + 1, "only its end is missing"
        assert target.data() == b"x" * length + b"\0"


def test_bytes_with_a_high_bit_are_no_end(read_string: Routine, pages: Pages) -> None:
    string = bytes((0x80, 0x01, 0x81, 0xFF, 0x7F, 0x80, 0x80, 0x01, 0x02, 0x80, 0xFF, 0xFF)) * 5 + b"\0"
    for cut in range(len(string)):
        pages.write(pages.end - len(string), string)
        target = Target(80)
        assert read_string(target.address, 80, pages.end - len(string) + cut) == len(string) - cut
        assert target.data()[: len(string) - cut] == string[cut:]


def test_no_room_takes_nothing(read_string: Routine, read: Routine) -> None:
    target = Target(0)
    assert read_string(target.address, 0, 0) == 0
    assert read(target.address, 0, 0) == 0
    target.data()


def test_other_registers_stay() -> None:
    """A routine keeps what calls of eBPF keep, and the direction flag does not matter."""
    for write_routine in (write_read, write_read_string, write_write):
        address = reserve(PAGE)
        asm = X86Operations(address)
        inner = asm.label()
        kept = (Gpr.RBX, Gpr.RBP, Gpr.R9, Gpr.R12, Gpr.R13, Gpr.R14, Gpr.R15)
        for register in kept:
            asm.push(register)
        for number, register in enumerate(kept):
            asm.mov_number(register, 0x1111 * (number + 1))
        asm.raw(b"\xfd")  # std
        asm.call(inner)
        asm.raw(b"\xfc")  # cld
        asm.mov_number(Gpr.RAX, 0)
        for number, register in enumerate(kept):
            asm.mov_number(Gpr.R10, 0x1111 * (number + 1))
            asm.compare(register, Gpr.R10)
            asm.raw(b"\x0f\x94\xc1")  # sete cl
            asm.raw(b"\x0f\xb6\xc9\x01\xc8")  # movzx ecx, cl; add eax, ecx
        for register in reversed(kept):
            asm.pop(register)
        asm.ret()
        asm.place(inner)
        write_routine(asm)
        place(address, asm.assemble(), PAGE)
        source = ctypes.create_string_buffer(b"a string of some length", 100)
        first, second, third = ctypes.create_string_buffer(100), 24, ctypes.addressof(source)
        if write_routine is write_write:
            second, third = third, second
        assert function_at(address, 3)(ctypes.addressof(first), second, third) == len(kept)
        assert first.value == b"a string of some length"
