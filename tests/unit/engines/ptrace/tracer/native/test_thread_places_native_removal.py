"""Whether memory names an address of ours, and whether a thread may come back to one."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.thread_places import is_outside, names_address
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register

START, END = 0x7F12_3456_F000, 0x7F12_3457_2000


@pytest.mark.parametrize("offset", [0, 3, 8, 100])
@pytest.mark.parametrize("address", [START, START + 1, 0x7F12_3457_0000, END - 1])
def test_an_address_is_found_wherever_it_is(address: int, offset: int) -> None:
    data = b"\x56" * offset + struct.pack("<Q", address) + b"\x56" * 9
    assert names_address(data, START, END)


@pytest.mark.parametrize("address", [START - 1, END, END + 0x10000, 0])
def test_another_is_not(address: int) -> None:
    assert not names_address(struct.pack("<Q", address) * 3, START, END)


def test_a_part_of_one_is_not() -> None:
    whole = struct.pack("<Q", START)
    assert not names_address(whole[2:], START, END)
    assert not names_address(whole[:7], START, END)
    assert not names_address(b"", START, END)


def with_code() -> AddressSpace:
    space = AddressSpace.closed(8)
    space.patches.code[0] = [(START, END)]
    return space


def test_a_thread_that_has_ended_does_not_come_back_though_it_is_in_the_table_still() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_outside(with_code(), Thread(process.pid, process.pid, with_code(), ThreadState.RUNNING))
    assert is_outside(with_code(), Thread(process.pid, process.pid, with_code(), ThreadState.RUNNING))


def test_a_thread_that_cannot_be_looked_at_may_come_back() -> None:
    assert not is_outside(with_code(), Thread(os.getpid(), os.getpid(), with_code(), ThreadState.RUNNING))


@pytest.mark.parametrize("is_inside", [True, False])
def test_what_a_signal_has_interrupted_on_another_stack_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    stack, other = (mmap.mmap(-1, 1 << 20) for _ in range(2))
    pointers = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (stack, other)]
    stack[800:832] = struct.pack("<QQQHHHH", pointers[1], 0x1234, 0x246, 0x33, 0, 0, 0x2B)
    other[256:264] = struct.pack("<Q", START if is_inside else END)

    def get_registers(_: int, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        registers[Register.RIP], registers[Register.RSP] = 0x1000, pointers[0]

    monkeypatch.setattr(ptrace_calls, "get_registers", get_registers)
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        space = with_code()
        space.memory = memory.fileno()
        thread = Thread(os.getpid(), os.getpid(), space, ThreadState.STOPPED)
        assert is_outside(space, thread) is not is_inside
        assert is_outside(space, thread, [(END + 1, END + 4096)])
