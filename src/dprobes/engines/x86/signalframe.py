"""
The signal frame that a thread returns from with all of its registers, as the kernel builds it for a handler.

The frame (``arch/x86/include/asm/sigframe.h``, ``asm/fpu/signal.h``, ``include/uapi/asm/sigcontext.h``) grows upwards
from the new stack pointer; 64-bit, and 32-bit behind the words that ``int $0x80; pop; pop; pop; ret`` takes::

    rsp ─► return address ─► rt_sigreturn gadget
           ucontext: flags, link, stack (24), sigcontext (256), signal mask
           ... up to a multiple of 64: XSAVE image, FP_XSTATE_MAGIC2

    esp ─► 12 bytes, return address ─► __kernel_rt_sigreturn
           number, &siginfo, &ucontext, siginfo (128), ucontext
           ... FSAVE image (112), at a multiple of 64: XSAVE image, FP_XSTATE_MAGIC2
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.engines.linux.ptracecalls import NO_SYSTEM_CALL, RESTARTS, Register
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TILE_DATA", "SignalFrame", "frame_32", "frame_64", "restorable"]

_MAGIC1 = 0x46505853  # FP_XSTATE_MAGIC1
_MAGIC2 = struct.pack("<I", 0x46505845)
_SW_RESERVED = 464  # struct _fpx_sw_bytes in the legacy area of an XSAVE image
_STATE_BV = 512  # XSTATE_BV in the XSAVE header: which components are not in their initial state
_FSAVE_SIZE = 112

TILE_DATA = 18
"""The number of the one XSAVE component that a thread has only once it has asked for it (the tiles of AMX)."""
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
    """A signal frame: where it goes, its bytes, and the stack pointer of code that returns into it."""

    address: int
    data: bytes
    stack_pointer: int


def frame_64(registers: Sequence[int], mask: int, xstate: bytes, return_to: int) -> SignalFrame:
    """Return a frame for a 64-bit thread, below its red zone; ``return_to`` is an rt_sigreturn gadget."""
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
    """Return a frame for a 32-bit thread; ``fsave`` is its x87 state as NT_PRFPREG has it for such a thread."""
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
    # The magic number 0 in the last word says that an FXSAVE image follows.
    legacy = fsave[: _FSAVE_SIZE - 4].ljust(_FSAVE_SIZE - 4, b"\0") + fsave[4:6] + b"\0\0"
    data = data.ljust(fpu - address, b"\0") + legacy + _fpu_image(xstate, fpu_size)
    return SignalFrame(address, data, address)


def restorable(xstate: bytes, tiles: int) -> bytes:
    """
    Return what a signal frame may hold of an XSAVE image that ptrace gave; ``tiles`` is where the tiles begin, or 0.

    ptrace gives every thread the tiles of AMX. The kernel takes a frame with them only from a thread that uses them:
    from any other it restores the x87 unit and SSE, and clears the rest (``check_xstate_in_sigframe``).
    """
    bit = 1 << TILE_DATA
    if not tiles or int.from_bytes(xstate[_STATE_BV : _STATE_BV + 8], "little") & bit:
        return xstate
    features = int.from_bytes(xstate[_SW_RESERVED : _SW_RESERVED + 8], "little") & ~bit
    return xstate[:_SW_RESERVED] + features.to_bytes(8, "little") + xstate[_SW_RESERVED + 8 : tiles]


def _restarting(registers: Sequence[int]) -> list[int]:
    """Return the registers with which an interrupted system call is made again, as the kernel would have it."""
    values = list(registers)
    if values[Register.ORIG_RAX] < NO_SYSTEM_CALL and values[Register.RAX] in RESTARTS:
        values[Register.RAX] = values[Register.ORIG_RAX]
        values[Register.RIP] = values[Register.RIP] - 2 & (1 << 64) - 1
    return values


def _fpu_image(xstate: bytes, extended_size: int) -> bytes:
    """Return an XSAVE image as a signal frame has it; ptrace leaves the enabled features where they belong."""
    features = int.from_bytes(xstate[_SW_RESERVED : _SW_RESERVED + 8], "little")
    software = struct.pack("<IIQI28x", _MAGIC1, extended_size, features, len(xstate))
    return xstate[:_SW_RESERVED] + software + xstate[_SW_RESERVED + len(software) :] + _MAGIC2
