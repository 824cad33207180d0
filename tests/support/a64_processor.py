"""
An emulated AArch64 processor (Unicorn) that shares memory with this process, for functions of generated code.

Shared memory has the same addresses in both. A fault of the code continues at its fix-up. This process executes the
system calls that handlers make, under their numbers of AArch64.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import unicorn
from unicorn import arm64_const as arm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.native.generated_code import Fixup

__all__ = ["CPU", "GENERAL", "A64Processor", "CrashError"]

PAGE = 0x1000
GENERAL = (
    *(getattr(arm, f"UC_ARM64_REG_X{number}") for number in range(31)),
    arm.UC_ARM64_REG_SP,
)
"""X0 to X30, and the stack pointer."""

_ARGUMENTS = GENERAL[:8]
_RETURN = 30
_STACK_SIZE = 1 << 16
_SVC = 2
"""The emulator's number of the exception that SVC raises (EXCP_SWI)."""
_FAULTS = (unicorn.UC_ERR_READ_UNMAPPED, unicorn.UC_ERR_WRITE_UNMAPPED, unicorn.UC_ERR_READ_PROT,
           unicorn.UC_ERR_WRITE_PROT)  # fmt: skip
_INSTRUCTIONS_MAX = 50_000_000

CPU = 5
"""The number of the CPU that getcpu(2) reports to the code."""

_GETPID, _GETTID, _GETUID, _GETGID, _GETCPU, _PRCTL, _CLOCK_GETTIME, _TGKILL = 172, 178, 174, 176, 168, 167, 113, 131


class CrashError(Exception):
    """The code has faulted at an instruction without a fix-up, or has not reached its end."""


class A64Processor:
    """An emulated processor; ``memory`` are start address and size of the ranges that it shares with this process."""

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        self._uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._kept: list[object] = []
        for start, size in memory:
            self.share(start, size)
        stack = ctypes.create_string_buffer(_STACK_SIZE + 2 * PAGE)
        self._kept.append(stack)
        self._stack = ctypes.addressof(stack) + PAGE & -PAGE
        self.share(self._stack, _STACK_SIZE)
        self._end = self._stack  # no code is there: a return to it ends a run
        self._targets: dict[int, int] = {}
        self.calls: list[int] = []
        """The numbers of the executed system calls, in order."""
        self.signals: list[int] = []
        """The signals that code has sent."""
        self._uc.hook_add(unicorn.UC_HOOK_INTR, self._at_interrupt)

    def share(self, start: int, size: int) -> None:
        """Map memory of this process at the same address in the emulated processor."""
        self._uc.mem_map_ptr(start, size, unicorn.UC_PROT_ALL, start)

    def map(self, start: int, size: int) -> None:
        """Map zeroed memory that only the emulated processor has."""
        self._uc.mem_map(start, size)

    def unmap(self, start: int, size: int) -> None:
        """Unmap memory of the emulated processor."""
        self._uc.mem_unmap(start, size)

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of the emulated processor's memory."""
        return bytes(self._uc.mem_read(address, size))

    def write(self, address: int, data: bytes) -> None:
        """Write ``data`` to the emulated processor's memory."""
        self._uc.mem_write(address, data)

    def protect(self, address: int, size: int, protection: int) -> None:
        """Change the protection of memory; ``protection`` is a combination of Unicorn's ``UC_PROT`` constants."""
        self._uc.mem_protect(address, size, protection)

    def catch(self, fixups: Sequence[Fixup]) -> None:
        """Let faults at the instructions of ``fixups`` continue at the addresses that are paired with them."""
        self._targets |= dict(fixups)

    def put(self, address: int, code: bytes) -> None:
        """Map memory that only the emulated processor has, and write code to it."""
        start = address & -PAGE
        self.map(start, (address + len(code) - start + PAGE - 1) & -PAGE)
        self.write(address, code)

    @property
    def thread_pointer(self) -> int:
        """The value of TPIDR_EL0."""
        value: int = self._uc.reg_read(arm.UC_ARM64_REG_TPIDR_EL0)
        return value

    @thread_pointer.setter
    def thread_pointer(self, value: int) -> None:
        self._uc.reg_write(arm.UC_ARM64_REG_TPIDR_EL0, value)

    @property
    def flags(self) -> int:
        """The flags NZCV, in bits 31 to 28."""
        value: int = self._uc.reg_read(arm.UC_ARM64_REG_NZCV)
        return value & 0xF000_0000

    @flags.setter
    def flags(self, value: int) -> None:
        self._uc.reg_write(arm.UC_ARM64_REG_NZCV, value)

    def registers(self) -> list[int]:
        """Return X0 to X30, and the stack pointer as the last element."""
        return [self._uc.reg_read(register) for register in GENERAL]

    def set_registers(self, values: Mapping[int, int]) -> None:
        """Set registers by number: 0 to 30, and 31 for the stack pointer."""
        for number, value in values.items():
            self._uc.reg_write(GENERAL[number], value)

    def call(self, address: int, *arguments: int) -> None:
        """Call the function at an address, with ``arguments`` in X0 and the following registers, until it returns."""
        self.set_registers(dict(enumerate(arguments)) | {_RETURN: self._end, 31: self._stack + _STACK_SIZE // 2})
        self.run(address, self._end)

    def run(self, start: int, end: int) -> None:
        """Execute code from ``start`` to ``end``, outside of the code; raise ``CrashError`` if it ends elsewhere."""
        while True:
            try:
                self._uc.emu_start(start, end, count=_INSTRUCTIONS_MAX)
            except unicorn.UcError as error:
                pc = self._uc.reg_read(arm.UC_ARM64_REG_PC)
                start = self._targets.get(pc, 0)
                if error.errno not in _FAULTS or not start:
                    raise CrashError(f"{error} at {pc:#x}") from None
                continue
            pc = self._uc.reg_read(arm.UC_ARM64_REG_PC)
            if pc != end:
                raise CrashError(f"stopped at {pc:#x}, not at {end:#x}")
            return

    def _at_interrupt(self, uc: unicorn.Uc, number: int, _data: object) -> None:
        if number != _SVC:
            uc.emu_stop()
            return
        call, first, second, third = (uc.reg_read(GENERAL[n]) for n in (8, 0, 1, 2))
        self.calls.append(call)
        uc.reg_write(GENERAL[0], self._system_call(call, first, second, third) & (1 << 64) - 1)

    def _system_call(self, number: int, first: int, second: int, third: int) -> int:
        if number in (_GETPID, _GETTID, _GETUID, _GETGID):
            return {_GETPID: os.getpid, _GETTID: threading.get_native_id, _GETUID: os.getuid, _GETGID: os.getgid}[
                number
            ]()
        if number == _PRCTL:
            assert first == 16  # PR_GET_NAME
            name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_bytes()
            self.write(second, name.rstrip(b"\n").ljust(16, b"\0"))
        elif number == _CLOCK_GETTIME:
            self.write(second, struct.pack("<QQ", *divmod(time.clock_gettime_ns(first), 1_000_000_000)))
        elif number == _GETCPU:
            self.write(first, struct.pack("<I", CPU))
        else:
            assert (number, first, second) == (_TGKILL, os.getpid(), threading.get_native_id())
            self.signals.append(third)
        return 0
