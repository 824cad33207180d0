"""Generated machine code in this process: its memory, functions in it, and faults that continue at their fix-ups."""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
from typing import TYPE_CHECKING

from dprobes.native.runtime_routines import fault_entry
from dprobes.native.x86.x86_assembler import Gpr, Memory, X86Assembler
from dprobes.native.x86.x86_operations import X86Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.native.generated_code import Fixup

__all__ = [
    "FaultHandler",
    "Pages",
    "call_stub",
    "function_at",
    "give_back",
    "handle_faults",
    "libc",
    "place",
    "reserve",
    "take_room",
]

SAVED = (Gpr.RBX, Gpr.RBP, Gpr.R12, Gpr.R13, Gpr.R14, Gpr.R15)
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_PRIVATE, _ANONYMOUS = 2, 0x20


class _SigAction(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64 * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p)]  # fmt: skip


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, with the types of mmap, mprotect, munmap and madvise."""
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def reserve(size: int) -> int:
    """Map ``size`` bytes without access, and return their address."""
    address: int = libc().mmap(None, size, 0, _PRIVATE | _ANONYMOUS, -1, 0)
    return address


@functools.cache
def _free_rooms(size: int) -> list[int]:
    return []


def take_room(size: int) -> int:
    """Return the address of ``size`` reserved bytes for code: the last returned by ``give_back``, or new ones."""
    free = _free_rooms(size)
    return free.pop() if free else reserve(size)


def give_back(address: int, size: int) -> None:
    """Release reserved bytes whose code is no longer called, for ``take_room``."""
    _free_rooms(size).append(address)


def place(address: int, code: bytes, room: int) -> None:
    """
    Write code to an address where ``room`` bytes were reserved, and make it executable.

    The memory stays mapped. It is anonymous, so that it is no file mapping of the process.
    """
    assert len(code) <= room
    assert not libc().mprotect(address, room, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memmove(address, code, len(code))
    assert not libc().mprotect(address, room, mmap.PROT_READ | mmap.PROT_EXEC)


def function_at(address: int, arguments: int = 1) -> Callable[..., int]:
    """Return the C function at an address, with ``arguments`` 64-bit arguments and a 64-bit result."""
    made: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * arguments)(address)
    return made


def call_stub(address: int, target: int) -> bytes:
    """Return code for ``address`` that calls ``target`` and preserves the callee-saved registers of the C ABI."""
    asm = X86Assembler(address)
    for register in SAVED:
        asm.push(register)
    asm.lea(Gpr.RSP, Memory(Gpr.RSP, -8))  # so that the stack is aligned
    asm.call_at(target)
    asm.lea(Gpr.RSP, Memory(Gpr.RSP, 8))
    for register in reversed(SAVED):
        asm.pop(register)
    asm.ret()
    return asm.assemble()


class FaultHandler:
    """
    A context manager in which faults of generated code continue at their fix-ups.

    ``address`` is that of the handler of SIGSEGV and SIGBUS.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self._action = _SigAction(address, flags=_SA_SIGINFO | _SA_NODEFER)
        self._old = {number: _SigAction() for number in (signal.SIGSEGV, signal.SIGBUS)}

    def __enter__(self) -> None:
        for number, old in self._old.items():
            assert not libc().sigaction(number, ctypes.byref(self._action), ctypes.byref(old))

    def __exit__(self, *exception: object) -> None:
        for number, old in self._old.items():
            assert not libc().sigaction(number, ctypes.byref(old), None)

    def close(self) -> None:
        """Release the memory of the signal handler."""
        give_back(self.address, mmap.PAGESIZE)


def handle_faults(fixups: Sequence[Fixup]) -> FaultHandler:
    """Return the handler with which faults at these instructions continue at their fix-ups; other faults abort."""
    abort = ctypes.cast(libc().abort, ctypes.c_void_p).value or 0
    address = take_room(mmap.PAGESIZE)
    place(address, fault_entry(X86Operations(address), fixups, abort), mmap.PAGESIZE)
    return FaultHandler(address)


class Pages:
    """Readable and writable pages, with an inaccessible page before and after them."""

    def __init__(self, count: int) -> None:
        whole = reserve((count + 2) * mmap.PAGESIZE)
        self.start = whole + mmap.PAGESIZE
        self.end = self.start + count * mmap.PAGESIZE
        assert not libc().mprotect(self.start, self.end - self.start, mmap.PROT_READ | mmap.PROT_WRITE)
        self._whole = whole, (count + 2) * mmap.PAGESIZE

    def protect(self, page: int, protection: int) -> None:
        """Change the protection of the page with index ``page``; ``protection`` is that of mprotect(2)."""
        assert not libc().mprotect(self.start + page * mmap.PAGESIZE, mmap.PAGESIZE, protection)

    def write(self, address: int, data: bytes) -> None:
        """Write ``data`` to an address in the pages."""
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        """Unmap the pages and their inaccessible neighbours."""
        assert not libc().munmap(*self._whole)
