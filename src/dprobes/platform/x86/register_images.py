"""
Images of registers: signal frames, from which a thread returns with all of its registers, and XSAVE images.

A frame has the format that the kernel writes for a signal handler (``arch/x86/include/asm/sigframe.h``,
``asm/fpu/signal.h``, ``include/uapi/asm/sigcontext.h``). It begins at the new stack pointer. In a 32-bit process it
begins after 12 bytes, which the three pops of ``int $0x80; pop; pop; pop; ret`` remove::

    rsp ─► return address ─► rt_sigreturn gadget
           ucontext: flags, link, stack (24), sigcontext (256), signal mask
           ... up to a multiple of 64: XSAVE image, FP_XSTATE_MAGIC2

    esp ─► 12 bytes, return address ─► __kernel_rt_sigreturn
           number, &siginfo, &ucontext, siginfo (128), ucontext
           ... FSAVE image (112), at a multiple of 64: XSAVE image, FP_XSTATE_MAGIC2
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.linux.call_proxy import map_code
from dprobes.platform.linux.ptrace_calls import NO_SYSTEM_CALL, RESTARTS, Register

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TILE_DATA", "FloatingPoint", "SignalFrame", "cpuid", "cpuid_of_leaf", "frame_32", "frame_64", "restorable"]

# The ``cpuid`` instruction, executed by this process.
#
# The result is the same for every program of a machine, except where CPUs differ (the number of the CPU in leaf 1, core
# types). There the result is that of the CPU on which this process runs.


# void code(uint32_t leaf, uint32_t subleaf, uint32_t result[4]) in the System V AMD64 ABI:
_CODE = bytes.fromhex(
    "53"  # push %rbx
    "89f8"  # mov %edi, %eax
    "89f1"  # mov %esi, %ecx
    "4989d0"  # mov %rdx, %r8
    "0fa2"  # cpuid
    "418900"  # mov %eax, (%r8)
    "41895804"  # mov %ebx, 4(%r8)
    "41894808"  # mov %ecx, 8(%r8)
    "4189500c"  # mov %edx, 12(%r8)
    "5b"  # pop %rbx
    "c3"  # ret
)

_Result = ctypes.c_uint32 * 4

# Leaves are numbered in ranges; the first leaf of each returns the number of the last (Intel SDM, volume 2, CPUID).
_RANGE = 0xC0000000
_HYPERVISOR_RANGE = 0x40000000
_HYPERVISOR_PRESENT = 1 << 31


def cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """Execute the CPUID instruction and return (eax, ebx, ecx, edx); raise OSError if this process may not map code."""
    result = _Result()
    _code()(leaf, subleaf, result)
    eax, ebx, ecx, edx = result
    return eax, ebx, ecx, edx


def cpuid_of_leaf(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """Return (eax, ebx, ecx, edx) of a CPUID leaf, or zeros if the processor does not have the leaf."""
    first = leaf & _RANGE
    if first == _HYPERVISOR_RANGE and not cpuid(1)[2] & _HYPERVISOR_PRESENT:
        return 0, 0, 0, 0
    last = cpuid(first)[0]
    return cpuid(leaf, subleaf) if first <= leaf <= last else (0, 0, 0, 0)


@cache
def _code() -> ctypes._CFunctionType:
    return ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, _Result)(map_code(_CODE))


# The floating-point and vector registers of a thread, read from its XSAVE image.
#
# The standard format (Intel SDM, volume 1, 10.5.1 and 13.4)::
#
#       0  fcw | 2  fsw | 4  abridged ftw | 8  fip (64 bits) | 16  fdp (64 bits) | 24  mxcsr
#      32  st0 ... st7, 16 bytes each, 10 of them used
#     160  xmm0 ... xmm15, 16 bytes each
#     512  the components that are not in their initial state: bit 0 x87, bit 1 SSE, bit 2 AVX
#       ?  the upper halves of ymm0 ... ymm15, at an offset from CPUID
#
# A component in its initial state is not read: the bytes in its place are meaningless. FXSAVE writes the first 512
# bytes only.


_X87, _SSE, _AVX = 1, 2, 4
_HEADER = 512
_STATE_LEAF, _AVX_SUBLEAF = 0xD, 2
_USUAL_AVX_OFFSET = 576

_INITIAL_FCW = 0x37F
_INITIAL_MXCSR = 0x1F80

# Indices in appendix A.
_FR, _FCW, _FSW, _FTW, _FIP, _FDP = range(0x3E, 0x46), 0x46, 0x47, 0x48, 0x49, 0x4B
_XMM, _MXCSR, _XMM_HIGH, _YMM = range(0x4D, 0x55), 0x55, range(0x68, 0x70), range(0x70, 0x80)

# Offset and size. A 64-bit kernel saves the whole of both addresses and so no fcs and fds, which read as 0.
_PLACES = {_FCW: (0, 2), _FSW: (2, 2), _FIP: (8, 8), _FDP: (16, 8)}

_EMPTY, _VALID, _ZERO, _SPECIAL = 3, 0, 1, 2


class FloatingPoint:
    """Floating-point and vector registers in an XSAVE or FXSAVE image."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._components = self._number(_HEADER, 8) if len(image) > _HEADER else _X87 | _SSE

    def register(self, index: int) -> int:
        """Return the register with an index of appendix A, or 0 if there is no such register."""
        if index in _YMM:
            number = index - _YMM.start
            return self._xmm(number) | self._upper_half(number) << 128
        if index in _XMM:
            return self._xmm(index - _XMM.start)
        if index in _XMM_HIGH:
            return self._xmm(index - _XMM_HIGH.start + 8)
        if index == _MXCSR:
            return self._number(24, 4) if self._components & (_SSE | _AVX) else _INITIAL_MXCSR
        return self._x87(index)

    def _x87(self, index: int) -> int:
        if not self._components & _X87:
            return {_FCW: _INITIAL_FCW, _FTW: 0xFFFF}.get(index, 0)
        if index in _FR:
            return self._number(32 + 16 * (index - _FR.start), 10)
        if index == _FTW:
            return self._tags()
        offset, size = _PLACES.get(index, (0, 0))
        return self._number(offset, size)

    def _tags(self) -> int:
        """Return the tag word as FSTENV stores it: two bits for each physical register (volume 1, 8.1.7)."""
        top = self._number(2, 2) >> 11 & 7
        used = self._number(4, 1)
        tags = 0
        for physical in range(8):
            tag = self._tag(physical - top & 7) if used >> physical & 1 else _EMPTY
            tags |= tag << 2 * physical
        return tags

    def _tag(self, number: int) -> int:
        value = self._number(32 + 16 * number, 10)
        exponent, fraction = value >> 64 & 0x7FFF, value & (1 << 64) - 1
        if exponent == 0:
            return _SPECIAL if fraction else _ZERO
        return _VALID if exponent != 0x7FFF and fraction >> 63 else _SPECIAL

    def _xmm(self, number: int) -> int:
        return self._number(160 + 16 * number, 16) if self._components & _SSE else 0

    def _upper_half(self, number: int) -> int:
        return self._number(_avx_offset() + 16 * number, 16) if self._components & _AVX else 0

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self._image[offset : offset + size], "little")


@cache
def _avx_offset() -> int:
    """Return the offset of the upper halves of the ymm registers in images of this processor."""
    try:
        return cpuid(_STATE_LEAF, _AVX_SUBLEAF)[1]
    except OSError:
        return _USUAL_AVX_OFFSET


_MAGIC1 = 0x46505853  # FP_XSTATE_MAGIC1
_MAGIC2 = struct.pack("<I", 0x46505845)
_SW_RESERVED = 464  # struct _fpx_sw_bytes in the legacy area of an XSAVE image
_STATE_BV = 512  # XSTATE_BV in the XSAVE header: which components are not in their initial state
_FSAVE_SIZE = 112

TILE_DATA = 18
"""Number of the XSAVE component of AMX tiles. A thread must request this component before it can use it."""
_RED_ZONE = 128

# UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS. A stack size of 1 makes the kernel's do_sigaltstack fail with
# ENOMEM, which rt_sigreturn ignores: so the thread keeps its alternate stack.
_UC_FLAGS = 7
_STACK_SIZE = 1

_ORDER_64 = tuple(
    int(r)
    for r in (
        Register.R8, Register.R9, Register.R10, Register.R11, Register.R12, Register.R13, Register.R14, Register.R15,
        Register.RDI, Register.RSI, Register.RBP, Register.RBX, Register.RDX, Register.RAX, Register.RCX, Register.RSP,
        Register.RIP, Register.EFLAGS,
    )
)  # fmt: skip


class SignalFrame(NamedTuple):
    """
    Signal frame on a thread's stack.

    ``stack_pointer`` is the stack pointer with which code returns into the frame.
    """

    address: int
    data: bytes
    stack_pointer: int


def frame_64(registers: Sequence[int], mask: int, xstate: bytes, return_to: int) -> SignalFrame:
    """
    Return a signal frame, to be written below the red zone of the stack, that resumes a 64-bit thread by rt_sigreturn.

    ``registers`` are the thread's general registers, indexed by ``Register``. ``mask`` has its blocked signals, bit n -
    1 for signal n. ``xstate`` is its XSAVE image. ``return_to`` is the address of a gadget that calls rt_sigreturn.
    """
    r = _restarting(registers)
    fpu_size = len(xstate) + len(_MAGIC2)
    fpu = registers[Register.RSP] - _RED_ZONE - fpu_size & ~63
    context = struct.pack("<QQQiiQ", _UC_FLAGS, 0, 0, 0, 0, _STACK_SIZE)
    context += struct.pack("<18Q", *(r[n] for n in _ORDER_64))
    context += struct.pack("<4H", r[Register.CS], 0, 0, r[Register.SS])
    context += struct.pack("<4QQ64x", 0, 0, 0, 0, fpu)
    context += struct.pack("<Q", mask)
    frame = struct.pack("<Q", return_to) + context
    # A handler's frame is 16-byte aligned, return address excluded.
    address = (fpu - len(frame) & ~15) - 8
    data = frame.ljust(fpu - address, b"\0") + _fpu_image(xstate, fpu_size)
    return SignalFrame(address, data, address)


def frame_32(registers: Sequence[int], mask: int, xstate: bytes, fsave: bytes, return_to: int) -> SignalFrame:
    """
    Return a signal frame, to be written below the stack pointer, that resumes a 32-bit thread by rt_sigreturn.

    ``registers`` are the thread's general registers, indexed by ``Register``. ``mask`` has its blocked signals, bit n -
    1 for signal n. ``xstate`` is its XSAVE image, and ``fsave`` its x87 state as ptrace returns it for NT_PRFPREG.
    ``return_to`` is the address of a gadget that calls rt_sigreturn.
    """
    r = _restarting(registers)
    fpu_size = _FSAVE_SIZE + len(xstate) + len(_MAGIC2)
    fx = (registers[Register.RSP] & 0xFFFFFFFF) - len(xstate) - len(_MAGIC2) - 16 & ~63
    fpu = fx - _FSAVE_SIZE
    context = struct.pack("<IIIiI", _UC_FLAGS, 0, 0, 0, _STACK_SIZE)
    context += struct.pack("<8H", r[Register.GS], 0, r[Register.FS], 0, r[Register.ES], 0, r[Register.DS], 0)
    context += struct.pack(
        "<11I",
        *(
            r[n] & 0xFFFFFFFF
            for n in (
                Register.RDI, Register.RSI, Register.RBP, Register.RSP, Register.RBX, Register.RDX, Register.RCX,
                Register.RAX,
            )
        ),
        0, 0, r[Register.RIP] & 0xFFFFFFFF,
    )  # fmt: skip
    context += struct.pack("<HHIIHHIII", r[Register.CS], 0, r[Register.EFLAGS] & 0xFFFFFFFF,
                           r[Register.RSP] & 0xFFFFFFFF, r[Register.SS], 0, fpu, mask & 0xFFFFFFFF, 0)  # fmt: skip
    context += struct.pack("<Q", mask)
    size = 12 + 4 + 12 + 128 + len(context)
    address = fpu - size & ~15
    information = address + 12 + 4 + 12
    data = bytes(12) + struct.pack("<IiII", return_to, 0, information, information + 128) + bytes(128) + context
    # The magic number in the last word (0) marks an FXSAVE image after it.
    legacy = fsave[: _FSAVE_SIZE - 4].ljust(_FSAVE_SIZE - 4, b"\0") + fsave[4:6] + b"\0\0"
    data = data.ljust(fpu - address, b"\0") + legacy + _fpu_image(xstate, fpu_size)
    return SignalFrame(address, data, address)


def restorable(xstate: bytes, tiles: int) -> bytes:
    """
    Return the part of an XSAVE image from ptrace that a signal frame may contain.

    ``tiles`` is the offset of the AMX tiles in the image, or 0 without AMX. ptrace returns tiles for every thread, but
    the kernel accepts a frame with tiles only from a thread that uses them. For any other thread it restores the x87
    unit and SSE, and clears the rest (``check_xstate_in_sigframe``).
    """
    bit = 1 << TILE_DATA
    if not tiles or int.from_bytes(xstate[_STATE_BV : _STATE_BV + 8], "little") & bit:
        return xstate
    features = int.from_bytes(xstate[_SW_RESERVED : _SW_RESERVED + 8], "little") & ~bit
    return xstate[:_SW_RESERVED] + features.to_bytes(8, "little") + xstate[_SW_RESERVED + 8 : tiles]


def _restarting(registers: Sequence[int]) -> list[int]:
    """
    Return the general registers with which the kernel would restart the system call that a signal interrupted.

    Return ``registers`` if the thread is not in a system call, or if the call is not restarted.
    """
    values = list(registers)
    if values[Register.ORIG_RAX] < NO_SYSTEM_CALL and values[Register.RAX] in RESTARTS:
        values[Register.RAX] = values[Register.ORIG_RAX]
        values[Register.RIP] = values[Register.RIP] - 2 & (1 << 64) - 1
    return values


def _fpu_image(xstate: bytes, extended_size: int) -> bytes:
    """
    Return an XSAVE image in the format of a signal frame, ``extended_size`` bytes with the magic number at the end.

    ptrace leaves the mask of enabled features in the bytes that software may use.
    """
    features = int.from_bytes(xstate[_SW_RESERVED : _SW_RESERVED + 8], "little")
    software = struct.pack("<IIQI28x", _MAGIC1, extended_size, features, len(xstate))
    return xstate[:_SW_RESERVED] + software + xstate[_SW_RESERVED + len(software) :] + _MAGIC2
