"""
How the thread that returns from a probed function enters the kernel: found out in child processes, through ctypes.

x86-64 only. 32-bit programs use a breakpoint in any case.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import resource
import signal
import struct

__all__ = ["Trampoline", "trampoline"]


class Trampoline(enum.Enum):
    """Say how a returning thread gets into the kernel, from the page that a uretprobe makes it return to."""

    BREAKPOINT = "a breakpoint"
    FILTERED_CALL = "a system call that seccomp filters"
    EXEMPT_CALL = "a system call that seccomp lets pass"


_SYS_URETPROBE = 335
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_NOT_ASKED = 255
# struct sock_filter { u16 code; u8 jt, jf; u32 k; }: load the number; if it is that of uretprobe, answer EPERM.
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, _SYS_URETPROBE),
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    )
)


def trampoline() -> Trampoline:
    """
    Find out how uretprobes enter the kernel: make their system call in child processes, with a filter and without.

    Outside the page for it the call ends in SIGILL. Since Linux kernel commit ff474a78cef5 ("uprobe: Add uretprobe
    syscall to speed up return probe") (in v6.11); not filtered since cf6cb56ef244 ("seccomp: passthrough uretprobe
    systemcall without filtering") (in v6.14, and in stable kernels before).
    """
    if _status_of_call(filtered=False) != -signal.SIGILL:
        return Trampoline.BREAKPOINT
    return Trampoline.EXEMPT_CALL if _status_of_call(filtered=True) == -signal.SIGILL else Trampoline.FILTERED_CALL


def _status_of_call(*, filtered: bool) -> int:
    """Return what becomes of a process that makes the system call: its errno, or the negative signal that ends it."""
    # With the GIL held, which the child could not get from a thread that it does not have. Not os.fork: the child does
    # nothing that the interpreter would have to know.
    libc = ctypes.PyDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(_FILTER, len(_FILTER))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(_FILTER) // 8, ctypes.addressof(code)))
    child = libc.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        if filtered:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
                os._exit(_NOT_ASKED)
        libc.syscall(_SYS_URETPROBE)
        os._exit(ctypes.get_errno())
    if child < 0:
        raise OSError(ctypes.get_errno(), "no process to try a system call in")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
