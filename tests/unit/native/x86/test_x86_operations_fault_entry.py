"""A fault at a known instruction goes on at its fix-up; any other goes to the handler that was there."""

from __future__ import annotations

import ctypes
import os
import signal

from dprobes.native.generated_code import Fixup
from dprobes.native.runtime_routines import fault_entry
from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, X86Assembler
from dprobes.native.x86.x86_operations import X86Operations
from support.machine_code import FaultHandler, function_at, place, reserve

ROOM = 4096


def faulting(address: int, count: int) -> tuple[bytes, list[Fixup]]:
    """Return code that loads from an address at one of so many places, and its fix-ups."""
    asm = X86Assembler(address)
    fixups = []
    for number in range(count):
        other, fault = asm.label(), asm.label()
        asm.compare(Gpr.RSI, number)
        asm.jump_if(Condition.NE, other)
        at = asm.here
        asm.load(Gpr.RAX, Memory(Gpr.RDI))
        asm.ret()
        asm.place(fault)
        fixups.append(Fixup(at, asm.here))
        asm.mov_number(Gpr.RAX, 1000 + number)
        asm.ret()
        asm.place(other)
    asm.ret()
    return asm.assemble(), fixups


def handler(fixups: list[Fixup], otherwise: int) -> FaultHandler:
    address = reserve(ROOM)
    place(address, fault_entry(X86Operations(address), fixups, otherwise), ROOM)
    return FaultHandler(address)


def test_each_of_many_instructions_has_its_fixup() -> None:
    address = reserve(ROOM)
    code, fixups = faulting(address, 20)
    place(address, code, ROOM)
    function = function_at(address, 2)
    good = ctypes.c_uint64(77)
    with handler(fixups, 0):
        for number in range(20):
            assert function(8, number) == 1000 + number
            assert function(ctypes.addressof(good), number) == 77
            assert function(1 << 63, number) == 1000 + number


def skipping(address: int, size: int) -> bytes:
    """Return a handler of another kind: it lets the thread go on behind the instruction, with 55 in rax."""
    asm = X86Assembler(address)
    asm.load(Gpr.RCX, Memory(Gpr.RDX, 168))  # rip
    asm.lea(Gpr.RCX, Memory(Gpr.RCX, size))
    asm.store(Memory(Gpr.RDX, 168), Gpr.RCX)
    asm.store_number(Memory(Gpr.RDX, 144), 55)  # rax
    asm.ret()
    return asm.assemble()


def test_other_faults_are_the_other_handlers() -> None:
    address, other = reserve(ROOM), reserve(ROOM)
    code, fixups = faulting(address, 3)
    place(address, code, ROOM)
    place(other, skipping(other, 3), ROOM)
    function = function_at(address, 2)
    for known in (fixups[:0], fixups[:1], fixups[1:]):
        with handler(known, other):
            for number, fixup in enumerate(fixups):
                assert function(8, number) == (1000 + number if fixup in known else 55)


def test_a_signal_that_is_no_fault_of_ours_is_seen() -> None:
    """Who sends SIGSEGV gets what the other handler does: here the end of the process."""
    child = os.fork()
    if not child:
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value or 0
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        with handler([Fixup(8, 16)], abort):
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGABRT
