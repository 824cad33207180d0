"""
ptrace(2) through ctypes, and the kinds of stops. No other file makes this system call.

x86-64 Linux only; constants are from ``include/uapi/linux/ptrace.h`` and ``arch/x86/include/asm/user_64.h``. A 64-bit
tracer sees the registers of 32-bit threads in the same structure. Functions raise OSError with the kernel's errno. It
is ``ProcessLookupError`` (ESRCH) if the thread is not stopped, is not traced, or has ended.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import os
import signal
from typing import Literal, NoReturn

from dprobes.errors import system_error

__all__ = [
    "ALIGNMENT_FLAG",
    "BUS_ADRALN",
    "NEW_TASK_EVENTS",
    "NO_SYSTEM_CALL",
    "RESTARTS",
    "RESUME_FLAG",
    "SI_KERNEL",
    "TRAP_FLAG",
    "TRAP_HWBKPT",
    "TRAP_TRACE",
    "USER_CS_32",
    "WALL",
    "Event",
    "Register",
    "RegisterSet",
    "RegisterWords",
    "Registers",
    "SegmentDescriptor",
    "SignalInfo",
    "StopKind",
    "classify_stop",
    "detach",
    "event_message",
    "floating_point_state",
    "get_debug_register",
    "get_register_set",
    "get_registers",
    "get_signal_info",
    "get_signal_mask",
    "get_thread_area",
    "has_stopped",
    "interrupt",
    "listen",
    "resume",
    "resume_to_syscall",
    "rseq_area",
    "runs_as",
    "seize",
    "seize_for_exit",
    "set_debug_register",
    "set_registers",
    "set_signal_info",
    "set_signal_mask",
    "single_step",
    "word_size",
]

_libc = ctypes.CDLL(None, use_errno=True)

_ptrace = _libc.ptrace
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_ptrace.restype = ctypes.c_long

_PEEKUSER = 3
_POKEUSER = 6
_CONT = 7
_SINGLESTEP = 9
_GETREGS = 12
_SETREGS = 13
_GETFPREGS = 14
_DETACH = 17
_SYSCALL = 24
_GET_THREAD_AREA = 25
_GETEVENTMSG = 0x4201
_GETSIGINFO = 0x4202
_SETSIGINFO = 0x4203
_GETREGSET = 0x4204
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_LISTEN = 0x4208
_GETSIGMASK = 0x420A
_SETSIGMASK = 0x420B
_GET_RSEQ_CONFIGURATION = 0x420F

_O_TRACESYSGOOD = 0x01
_O_TRACEFORK = 0x02
_O_TRACEVFORK = 0x04
_O_TRACECLONE = 0x08
_O_TRACEEXEC = 0x10
_O_TRACEVFORKDONE = 0x20
_O_TRACEEXIT = 0x40
_OPTIONS = _O_TRACESYSGOOD | _O_TRACEFORK | _O_TRACEVFORK | _O_TRACECLONE | _O_TRACEEXEC | _O_TRACEVFORKDONE

WALL = 0x40000000
SI_KERNEL = 0x80
TRAP_TRACE = 2
BUS_ADRALN = 1
TRAP_HWBKPT = 4


class Register(enum.IntEnum):
    """Indices of the words of ``struct user_regs_struct``."""

    R15 = 0
    R14 = 1
    R13 = 2
    R12 = 3
    RBP = 4
    RBX = 5
    R11 = 6
    R10 = 7
    R9 = 8
    R8 = 9
    RAX = 10
    RCX = 11
    RDX = 12
    RSI = 13
    RDI = 14
    ORIG_RAX = 15
    RIP = 16
    CS = 17
    EFLAGS = 18
    RSP = 19
    SS = 20
    FS_BASE = 21
    GS_BASE = 22
    DS = 23
    ES = 24
    FS = 25
    GS = 26


Registers = ctypes.c_ulong * 27
"""The integer registers of a thread, indexed by ``Register``."""
RegisterWords = ctypes.Array[ctypes.c_ulong]
"""The type of ``Registers`` objects."""

NO_SYSTEM_CALL = 1 << 63
"""Minimum of ``orig_rax`` in a thread that has not stopped in a system call (-1)."""

RESTARTS = frozenset((1 << 64) - number for number in (512, 513, 514, 516))
"""Results (-ERESTART*) of system calls that the kernel is to restart."""

TRAP_FLAG = 0x100
"""
The bit of EFLAGS (TF) that makes a thread trap after each instruction.

The kernel hides the bit that it sets itself for PTRACE_SINGLESTEP.
"""

RESUME_FLAG = 0x10000
"""The RF bit of EFLAGS. It suppresses an execute watchpoint for one instruction; the processor then clears it."""

ALIGNMENT_FLAG = 0x40000
"""The bit of EFLAGS (AC) with which an unaligned access raises SIGBUS."""

USER_CS_32 = 0x23
"""The code segment selector of 32-bit programs on a 64-bit kernel (``__USER32_CS``)."""


def word_size(registers: RegisterWords) -> Literal[4, 8]:
    """Return the word size in bytes of the code that a thread with these registers executes, by its CS."""
    return 4 if registers[Register.CS] == USER_CS_32 else 8


_CS, _RIP_OFFSET = int(Register.CS), 8 * Register.RIP


def runs_as(registers: RegisterWords, size: int) -> bool:
    """
    Return True if a thread with these registers executes code of a word size of 4 or 8 bytes.

    A far jump can change the word size.
    """
    return (registers[_CS] == USER_CS_32) == (size == 4)


def _check(result: int) -> int:
    if result < 0:
        _fail()
    return result


def _fail() -> NoReturn:
    raise system_error(ctypes.get_errno())


# Requests made at each hit check their results themselves: a call of ``_check`` costs as much as the rest of them.


def seize(tid: int, *, follow: bool = True) -> None:
    """Start tracing a thread without stopping it, with ``follow`` also its new threads and children (PTRACE_SEIZE)."""
    _check(_ptrace(_SEIZE, tid, None, _OPTIONS if follow else _O_TRACESYSGOOD))


def seize_for_exit(pid: int) -> None:
    """Start tracing a process only for a stop before its end (PTRACE_SEIZE, PTRACE_O_TRACEEXIT)."""
    _check(_ptrace(_SEIZE, pid, None, _O_TRACEEXIT))


def interrupt(tid: int) -> None:
    """Request a stop of a traced thread, which stops before it next executes user code (PTRACE_INTERRUPT)."""
    _check(_ptrace(_INTERRUPT, tid, None, None))


def resume(tid: int, number: int = 0) -> None:
    """Resume a stopped thread (PTRACE_CONT) and deliver the signal ``number``, 0 for none."""
    if _ptrace(_CONT, tid, None, number) < 0:
        _fail()


def listen(tid: int) -> None:
    """Leave a thread in its group stop, and report the end of that (PTRACE_LISTEN)."""
    _check(_ptrace(_LISTEN, tid, None, None))


def single_step(tid: int, number: int = 0) -> None:
    """Resume a stopped thread for one instruction (PTRACE_SINGLESTEP) and deliver the signal ``number``, 0 for none."""
    _check(_ptrace(_SINGLESTEP, tid, None, number))


def resume_to_syscall(tid: int, number: int = 0) -> None:
    """
    Resume a stopped thread until it enters or leaves a system call (PTRACE_SYSCALL).

    The signal ``number`` is delivered, 0 for none.
    """
    _check(_ptrace(_SYSCALL, tid, None, number))


def detach(tid: int, number: int = 0) -> None:
    """
    Stop tracing a stopped thread and resume it (PTRACE_DETACH).

    The signal ``number`` is delivered, unless it is 0.
    """
    _check(_ptrace(_DETACH, tid, None, number))


def get_registers(tid: int, registers: RegisterWords) -> None:
    """Read the integer registers of a stopped thread into ``registers``."""
    if _ptrace(_GETREGS, tid, None, ctypes.addressof(registers)) < 0:
        _fail()


def has_stopped(tid: int, registers: RegisterWords, attempts: int = 1) -> bool:
    """
    Read a thread's registers; return True if that succeeds, which means that the thread has stopped.

    The stop need not have been reported by waitpid(2). Make at most ``attempts`` requests without a pause.
    """
    for _ in range(attempts):  # noqa: SIM110 - a generator costs more than the loop
        if _ptrace(_GETREGS, tid, None, ctypes.addressof(registers)) >= 0:
            return True
    return False


def set_registers(tid: int, registers: RegisterWords) -> None:
    """Write the integer registers of a stopped thread."""
    if _ptrace(_SETREGS, tid, None, ctypes.addressof(registers)) < 0:
        if ctypes.get_errno() != errno.EIO:
            _fail()
        _set_changed_registers(tid, registers)


def _set_changed_registers(tid: int, registers: RegisterWords) -> None:
    """
    Write the registers that differ from their present values, one by one.

    A program may have values that PTRACE_SETREGS refuses: a null selector that is not 0, or a segment base in the
    kernel's half of the addresses (``putreg`` and ``invalid_selector`` in ``arch/x86/kernel/ptrace.c``). A register
    with such a value is not written.
    """
    present = Registers()
    get_registers(tid, present)
    for index, (value, wanted) in enumerate(zip(present, registers, strict=True)):
        if value != wanted:
            _check(_ptrace(_POKEUSER, tid, 8 * index, wanted))


def set_instruction_pointer(tid: int, address: int) -> None:
    """Set the instruction pointer of a stopped thread. This takes less time than ``set_registers``."""
    if _ptrace(_POKEUSER, tid, _RIP_OFFSET, address) < 0:
        _fail()


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class RegisterSet(enum.IntEnum):
    """Register sets that are read whole (NT_* in ``include/uapi/linux/elf.h``)."""

    GENERAL = 1
    """General registers, in the layout of the thread's own word size."""
    FLOATING_POINT = 2
    """FXSAVE image of a 64-bit thread, FSAVE image of a 32-bit one."""
    TLS_32 = 0x200
    """The thread-local descriptors of a 32-bit thread."""
    XSTATE = 0x202
    """XSAVE image in the standard format. The mask of enabled features is at byte 464."""
    FXSAVE_32 = 0x46E62B7F
    """FXSAVE image of a 32-bit thread."""


_REGISTER_SET_MAX = 1 << 14


def get_register_set(tid: int, kind: RegisterSet) -> bytes:
    """Return a register set of a stopped thread, or no bytes if the set does not exist or the thread is not stopped."""
    buffer = ctypes.create_string_buffer(_REGISTER_SET_MAX)
    vector = _IoVector(ctypes.addressof(buffer), _REGISTER_SET_MAX)
    if _ptrace(_GETREGSET, tid, kind, ctypes.addressof(vector)) < 0:
        return b""
    return ctypes.string_at(buffer, vector.length)


_FXSAVE_SIZE = 512


def floating_point_state(tid: int) -> bytes:
    """
    Return the floating-point and vector registers of a stopped thread in XSAVE's standard format.

    On a processor without XSAVE, return the 512 bytes that FXSAVE stores. Both layouts are in the Intel SDM, volume 1,
    10.5 and 13.4.
    """
    if state := get_register_set(tid, RegisterSet.XSTATE):
        return state
    buffer = ctypes.create_string_buffer(_FXSAVE_SIZE)
    _check(_ptrace(_GETFPREGS, tid, None, ctypes.addressof(buffer)))
    return ctypes.string_at(buffer, _FXSAVE_SIZE)


class SegmentDescriptor(ctypes.Structure):
    """Descriptor as the fields of ``struct user_desc`` (``arch/x86/include/uapi/asm/ldt.h``)."""

    _fields_ = (
        ("entry_number", ctypes.c_uint32),
        ("base", ctypes.c_uint32),
        ("limit", ctypes.c_uint32),
        ("is_32_bit", ctypes.c_uint32, 1),
        ("contents", ctypes.c_uint32, 2),
        ("read_exec_only", ctypes.c_uint32, 1),
        ("limit_in_pages", ctypes.c_uint32, 1),
        ("not_present", ctypes.c_uint32, 1),
        ("usable", ctypes.c_uint32, 1),
        ("lm", ctypes.c_uint32, 1),
    )


def get_thread_area(tid: int, entry: int) -> SegmentDescriptor | None:
    """
    Return one of the three GDT descriptors for thread-local storage of a stopped thread, by its index in the GDT.

    Return None for other indices.
    """
    descriptor = SegmentDescriptor()
    if _ptrace(_GET_THREAD_AREA, tid, entry, ctypes.addressof(descriptor)) < 0:
        return None
    return descriptor


_DEBUG_REGISTERS = 848  # offsetof(struct user, u_debugreg), arch/x86/include/asm/user_64.h


def get_debug_register(tid: int, number: int) -> int:
    """Return a debug register (0 to 3, 6, 7) of a stopped thread."""
    ctypes.set_errno(0)
    value: int = _ptrace(_PEEKUSER, tid, _DEBUG_REGISTERS + 8 * number, None)
    if value == -1 and ctypes.get_errno():
        _fail()
    return value & (1 << 64) - 1


def set_debug_register(tid: int, number: int, value: int) -> None:
    """Write a debug register of a stopped thread; raise OSError if the kernel refuses the value."""
    _check(_ptrace(_POKEUSER, tid, _DEBUG_REGISTERS + 8 * number, value))


def event_message(tid: int) -> int:
    """
    Return the message of a thread's event stop (PTRACE_GETEVENTMSG).

    It is the id of the new thread after a clone or fork, the former id after an exec.
    """
    value = ctypes.c_ulong()
    _check(_ptrace(_GETEVENTMSG, tid, None, ctypes.addressof(value)))
    return value.value


SignalInfo = ctypes.c_int32 * 32
"""``siginfo_t``. Word 0 is ``si_signo``, word 2 is ``si_code``."""


def get_signal_info(tid: int, info: ctypes.Array[ctypes.c_int32]) -> int:
    """Read the ``siginfo_t`` of the signal at which a thread has stopped into ``info``; return its ``si_code``."""
    if _ptrace(_GETSIGINFO, tid, None, ctypes.addressof(info)) < 0:
        _fail()
    code: int = info[2]
    return code


def set_signal_info(tid: int, info: ctypes.Array[ctypes.c_int32]) -> None:
    """Replace the ``siginfo_t`` of the signal that a stopped thread is about to receive (PTRACE_SETSIGINFO)."""
    _check(_ptrace(_SETSIGINFO, tid, None, ctypes.addressof(info)))


def get_signal_mask(tid: int) -> int:
    """Return the blocked signals of a stopped thread: bit n - 1 for signal n."""
    mask = ctypes.c_uint64()
    _check(_ptrace(_GETSIGMASK, tid, 8, ctypes.addressof(mask)))
    return mask.value


def set_signal_mask(tid: int, mask: int) -> None:
    """Set the blocked signals of a stopped thread: bit n - 1 for signal n."""
    value = ctypes.c_uint64(mask)
    _check(_ptrace(_SETSIGMASK, tid, 8, ctypes.addressof(value)))


class _RseqConfiguration(ctypes.Structure):
    _fields_ = (
        ("rseq_abi_pointer", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("rseq_abi_size", "signature", "flags", "pad")),
    )


def rseq_area(tid: int) -> int:
    """
    Return the address of a stopped thread's ``struct rseq``, or 0 if it has none.

    Since Linux kernel commit 90f093fa8ea4 ("rseq, ptrace: Add PTRACE_GET_RSEQ_CONFIGURATION request") (in v5.13).
    """
    configuration = _RseqConfiguration()
    size = ctypes.sizeof(configuration)
    if _ptrace(_GET_RSEQ_CONFIGURATION, tid, size, ctypes.addressof(configuration)) < 0:
        return 0
    return int(configuration.rseq_abi_pointer)


_SYSCALL_STOP_SIGNAL = signal.SIGTRAP | 0x80
"""SIGTRAP as PTRACE_O_TRACESYSGOOD changes it where a thread enters or leaves a system call."""


class Event(enum.IntEnum):
    """Events of ptrace (PTRACE_EVENT_*)."""

    FORK = 1
    VFORK = 2
    CLONE = 3
    EXEC = 4
    VFORK_DONE = 5
    EXIT = 6
    STOP = 128


NEW_TASK_EVENTS = (Event.FORK, Event.VFORK, Event.CLONE)


class StopKind(enum.Enum):
    """Kinds of the states of a traced thread that ``waitpid`` reports."""

    EXITED = "exited"
    SIGNAL = "about to receive a signal"
    EVENT = "ptrace event"
    GROUP_STOP = "stopped together with its process"
    SYSCALL = "entering or leaving a system call"


@functools.lru_cache(maxsize=256)
def classify_stop(status: int) -> tuple[StopKind, int]:
    """
    Return the kind of stop that a wait status reports, and a number.

    The number is the signal's, the event's (``Event``), or for EXITED the status itself.
    """
    if not os.WIFSTOPPED(status):
        return StopKind.EXITED, status
    number = os.WSTOPSIG(status)
    event = status >> 16
    if event == Event.STOP:
        # ptrace(2), "Group-stop": with PTRACE_SEIZE the stop signal distinguishes a group stop from an interrupt.
        return (StopKind.EVENT, Event.STOP) if number == signal.SIGTRAP else (StopKind.GROUP_STOP, number)
    if event:
        return StopKind.EVENT, event
    if number == _SYSCALL_STOP_SIGNAL:
        return StopKind.SYSCALL, number
    return StopKind.SIGNAL, number
