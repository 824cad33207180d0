"""The walk up a stack ends, whatever is in memory, and says why."""

from __future__ import annotations

import os
import sys

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.process_maps import parse_maps, read_maps
from dprobes.target.unwind.stack_memory import ProcessSpace
from dprobes.target.unwind.stack_walk import COLUMNS, walk

COLUMNS_64 = COLUMNS["x86_64"]


def own_space(stack: dict[int, int]) -> ProcessSpace:
    """Return this process's memory, with words of another stack."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)

    def read(address: int, size: int) -> bytes:
        if address in stack:
            return stack[address].to_bytes(8, sys.byteorder)[:size]
        try:
            data = os.pread(memory, size, address)
        except (OSError, OverflowError) as error:
            raise TargetError("no memory") from error
        return data

    return ProcessSpace(8, read, lambda: parse_maps(read_maps(os.getpid())))


def at_entry_of(symbol: str, stack_pointer: int = 0x1000) -> dict[int, int]:
    import ctypes

    address = ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p).value
    assert address is not None
    return dict.fromkeys(range(16), 0) | {COLUMNS_64.pc: address, COLUMNS_64.sp: stack_pointer}


def test_a_return_address_without_a_table_ends_the_stack() -> None:
    registers = at_entry_of("qsort")
    found = walk(own_space({0x1000: 0x1234}), COLUMNS_64, registers, 100)
    assert found == ((registers[COLUMNS_64.pc], 0x1234), StackEnd.NO_TABLE)


def test_a_return_address_of_zero_is_the_outermost_frame() -> None:
    registers = at_entry_of("qsort")
    assert walk(own_space({0x1000: 0}), COLUMNS_64, registers, 100).end is StackEnd.OUTERMOST


def test_a_stack_that_cannot_be_read_is_said() -> None:
    registers = at_entry_of("qsort")
    assert walk(own_space({}), COLUMNS_64, registers, 100) == ((registers[COLUMNS_64.pc],), StackEnd.UNREADABLE)


def test_a_stack_of_one_function_that_returns_to_itself_ends_at_the_limit() -> None:
    registers = at_entry_of("qsort")
    place = registers[COLUMNS_64.pc] + 1
    stack = {0x1000 + 8 * n: place for n in range(1000)}
    assert walk(own_space(stack), COLUMNS_64, registers, 100).end is StackEnd.LIMIT


def test_a_frame_below_the_one_that_it_called_ends_the_stack() -> None:
    registers = at_entry_of("qsort", (1 << 64) - 8)
    found = walk(own_space({(1 << 64) - 8: registers[COLUMNS_64.pc]}), COLUMNS_64, registers, 100)
    assert found.end is StackEnd.NOT_RISING
