"""
The simulated context of a handler compiled to eBPF: its memory, and the replies of its host.

``MadeUpHost`` provides the values that cannot be simulated in this process: identities, the clock, call stacks.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.bpf.map_layouts import NAME_SIZE
from dprobes.testing import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.testing import FakeContext

__all__ = ["NotMappableError", "host_of", "libc", "memory_of", "write_counter", "write_name", "write_words"]


class NotMappableError(Exception):
    """Memory of a simulated context cannot be mapped in this process."""


def write_words(asm: Assembler, words: Sequence[int], word_size: int) -> None:
    """
    Write code that stores ``words`` at R1, at most R2 bytes, as ``Host.kernel_stack`` does.

    R0 is the number of stored bytes; R3 is overwritten.
    """
    done = asm.label()
    asm.mov(Register.R0, 0)
    for n, word in enumerate(words):
        end = (n + 1) * word_size
        asm.jump_if(Jump.JLT, Register.R2, end, done)
        asm.mov(Register.R3, word)
        asm.store(Register.R1, n * word_size, Register.R3, Size.DW if word_size == 8 else Size.W)
        asm.mov(Register.R0, end)
    asm.place(done)


def write_name(asm: Assembler, context: FakeContext) -> None:
    """Write code that stores the simulated process name at R1, as ``Host.process_name`` does; R2 is overwritten."""
    name = context.process_name().ljust(NAME_SIZE, b"\0")
    for start in range(0, NAME_SIZE, 8):
        asm.mov(Register.R2, int.from_bytes(name[start : start + 8], "little"))
        asm.store(Register.R1, start, Register.R2)


def write_counter(asm: Assembler, context: FakeContext, number: int, unread: Label) -> None:
    """Load the made-up performance counter to R0, as ``Host.counter`` does; go to ``unread`` if there is none."""
    value = context.counter(number)
    if value is None:
        asm.jump(unread)
    else:
        asm.mov(Register.R0, value)


def host_of(context: FakeContext, cookie: int, function: int) -> type[Host]:
    """
    Return a host with the identities of a simulated context.

    ``cookie`` identifies the probepoint; ``function`` is the address of the returning function.
    """

    class MadeUpHost(Host):
        def _answer(self, name: str) -> None:
            self._asm.mov(Register.R0, context.ids[name])

        def pid(self) -> None:
            self._answer("pid")

        def tid(self) -> None:
            self._answer("tid")

        def uid(self) -> None:
            self._answer("uid")

        def cpu(self) -> None:
            self._answer("cpu")

        def task(self) -> None:
            self._answer("task")

        def time(self) -> None:
            self._answer("time")

        def global_pid(self) -> None:
            self._answer("pid")

        def global_tid(self) -> None:
            self._answer("tid")

        def process_name(self) -> None:
            write_name(self._asm, context)

        def kernel_stack(self) -> None:
            write_words(self._asm, context.frames_in_kernel, self._word_size)

        def user_stack(self, area: int, work: int, log_mask: int, key: int | None = None) -> None:
            write_words(self._asm, context.frames_in_program, self._word_size if key is None else 8)

        def traced_field(self, name: str, nobody: Label) -> None:
            if name in context.traced_fields:
                self._asm.mov(Register.R0, context.traced_fields[name])
            else:
                self._asm.jump(nobody)

        def counter(self, number: int, room: tuple[Register, int], unread: Label) -> None:
            write_counter(self._asm, context, number, unread)

        def note_stop(self, refused: Label) -> None:
            pass

        def stop_process(self) -> None:
            pass

        def override_return(self) -> None:
            pass

        def cookie(self) -> None:
            self._asm.mov(Register.R0, cookie)

        def function_ip(self) -> None:
            self._asm.mov(Register.R0, function)

    return MadeUpHost


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, with the types of mmap(2) and munmap(2) at given addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class memory_of:  # noqa: N801 - used like a function
    """A context manager that maps the memory of a simulated context in this process."""

    def __init__(self, context: FakeContext) -> None:
        self._context = context
        self._mapped: list[int] = []

    def __enter__(self) -> None:
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        for page in self._context._pages:
            address = page * PAGE
            found = None
            if 0 <= address < 1 << 47:
                found = libc().mmap(address, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
            if found != (address or None):  # ctypes says None for 0
                self.__exit__()
                raise NotMappableError(f"no memory can be mapped at {address:#x} in this process")
            self._mapped.append(address)
            ctypes.memmove(address, bytes(self._context._pages[page]), PAGE)
            if page in self._context._read_only:
                libc().mprotect(address, PAGE, mmap.PROT_READ)

    def __exit__(self, *exception: object) -> None:
        for address in self._mapped:
            libc().munmap(address, PAGE)
        self._mapped.clear()
