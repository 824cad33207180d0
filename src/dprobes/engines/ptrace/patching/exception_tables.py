"""
The exception tables of a patch: their registration with the unwinder of the process.

Exceptions that pass through the code of a patch need its call frame information, which the unwinder finds only if
``__register_frame`` of libgcc was called with it. That function takes a lock and allocates memory, so dprobes does not
have a stopped thread call it. The first thread that calls the patch does, in code before the patch::

    entry      compare the state with 1; if it is equal, jump to the patch
    slow       save the registers that may carry arguments
               exchange the state 0 with the thread pointer; if it was 0: call __register_frame, and set the state to 1
               else wait until the state is 1, unless this thread registers; after too long a time, exchange the state
               of the other thread with the thread pointer, and register
               restore the registers, and jump to the patch

A signal handler may call the patch while its thread registers: it does not wait. A process may fork while another
thread registers: the child has no such thread, so the first call in it registers. Two registrations do no harm.
The tables are linked from Linux Standard Base Core, "Exception Frames": ``u32 length, entry``; the length 0 is the end.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, Operation, X86Assembler

if TYPE_CHECKING:
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["REGISTER_FRAME", "TABLES", "has_end", "registration_code"]

REGISTER_FRAME = "__register_frame"
TABLES = ".eh_frame"

_LENGTH = struct.Struct("<I")
_REGISTERED = 1
_SCHED_YIELD = 24
_ROUNDS = 100_000
"""Number of times that a thread lets others run while it waits for the registration."""

_KEPT = (Gpr.RAX, Gpr.RCX, Gpr.RDX, Gpr.RSI, Gpr.RDI, Gpr.R8, Gpr.R9, Gpr.R10, Gpr.R11, Gpr.R12)
"""Registers that may carry arguments, and r12, in which a waiting thread counts."""

# The area of XSAVE in its standard format (Intel SDM volume 1, chapter 13): legacy 512, header 64, AVX 256 at 576,
# opmask 64 at 1088, ZMM_Hi256 512 at 1152, Hi16_ZMM 1024 at 1664. The processor leaves out what it does not have.
_HEADER, _HEADER_SIZE, _AREA = 512, 64, 2752
_COMPONENTS = 0xE7
_XSAVE, _XRSTOR = b"\x48\x0f\xae\x24\x24", b"\x48\x0f\xae\x2c\x24"  # of 64 bytes aligned memory at rsp
_PAUSE = b"\xf3\x90"


def has_end(elf: ElfFile) -> bool:
    """Return whether the call frame information of a file ends with an entry of length 0, as crtendS.o provides it."""
    section = elf.section(TABLES)
    if section is None:
        return False
    data = elf.bytes_at(section.offset, section.size, TABLES)
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        if not length:
            return True
        at += _LENGTH.size + length
    return False


def registration_code(address: int, tables: int, register: int, state: int, target: int) -> bytes:
    """
    Return code for ``address`` that registers the ``tables`` at its first execution and jumps to ``target``.

    ``register`` is the address of ``__register_frame``, ``state`` that of a word of writable memory, which is 0.
    """
    asm = X86Assembler(address)
    slow, registering, taking, waiting, done = (asm.label() for _ in range(5))
    # cmp qword [rip + state], 1
    asm.raw(b"\x48\x83\x3d" + (state - address - 8).to_bytes(4, "little", signed=True) + bytes((_REGISTERED,)))
    asm.jump_if(Condition.NE, slow)
    asm.jump_to(target)

    asm.place(slow)
    asm.push(Gpr.RBP)
    asm.mov(Gpr.RBP, Gpr.RSP)
    for register_kept in _KEPT:
        asm.push(register_kept)
    asm.mov_number(Gpr.RDX, state)
    asm.load(Gpr.RCX, Memory(None, 0, of_thread=True))
    asm.mov_number(Gpr.RAX, 0)
    asm.compare_exchange(Memory(Gpr.RDX), Gpr.RCX)
    asm.mov_number(Gpr.R12, _ROUNDS)
    asm.jump_if(Condition.NE, waiting)

    asm.place(registering)
    asm.calculate(Operation.SUB, Gpr.RSP, _AREA)
    asm.calculate(Operation.AND, Gpr.RSP, -64)
    for offset in range(_HEADER, _HEADER + _HEADER_SIZE, 8):
        asm.store_number(Memory(Gpr.RSP, offset), 0)
    asm.mov_number(Gpr.RAX, _COMPONENTS)
    asm.mov_number(Gpr.RDX, 0)
    asm.raw(_XSAVE)
    asm.mov_number(Gpr.RDI, tables)
    asm.mov_number(Gpr.RAX, register)
    asm.raw(b"\xff\xd0")  # call rax
    asm.mov_number(Gpr.RAX, _COMPONENTS)
    asm.mov_number(Gpr.RDX, 0)
    asm.raw(_XRSTOR)
    asm.mov_number(Gpr.RDX, state)
    asm.store_number(Memory(Gpr.RDX), _REGISTERED)
    asm.jump(done)

    asm.place(waiting)  # rax is the state, r12 the number of rounds that are left
    asm.compare(Gpr.RAX, _REGISTERED)
    asm.jump_if(Condition.E, done)
    asm.load(Gpr.RCX, Memory(None, 0, of_thread=True))
    asm.compare(Gpr.RAX, Gpr.RCX)
    asm.jump_if(Condition.E, done)
    asm.calculate(Operation.SUB, Gpr.R12, 1)
    asm.jump_if(Condition.E, taking)
    asm.raw(_PAUSE)
    asm.mov_number(Gpr.RAX, _SCHED_YIELD)
    asm.syscall()
    asm.mov_number(Gpr.RDX, state)
    asm.load(Gpr.RAX, Memory(Gpr.RDX))
    asm.jump(waiting)

    asm.place(taking)  # rax is the state, the pointer of a thread that may be gone, rcx that of this thread
    asm.mov_number(Gpr.RDX, state)
    asm.compare_exchange(Memory(Gpr.RDX), Gpr.RCX)
    asm.jump_if(Condition.E, registering)
    asm.mov_number(Gpr.R12, _ROUNDS)
    asm.jump(waiting)

    asm.place(done)
    asm.lea(Gpr.RSP, Memory(Gpr.RBP, -8 * len(_KEPT)))
    for register_kept in reversed(_KEPT):
        asm.pop(register_kept)
    asm.pop(Gpr.RBP)
    asm.jump_to(target)
    return asm.assemble()
