"""
What a handler in the kernel asks of the kernel, in eBPF: it stands in kernel code, and sees a user context besides.

``push r`` is of the place that was hit, ``push u`` of the program that the current thread runs, as it entered the
kernel. Addresses of both halves are read, each by its own helper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
from dprobes.bpf.layout import ProbeField
from dprobes.bpf.lower.hosts.host import CONTEXT, Host
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS, USER_MODE, copy_task_registers, task_registers
from dprobes.bpf.lower.request import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label

__all__ = ["AnywhereHost", "KernelHost"]

_R = Register
_BREAKPOINT_SIZE = 1
_WORD = -64
"""Where on the stack a word of the kernel's memory is put."""


def _read(asm: Assembler, from_kernel: Helper, from_user: Helper) -> None:
    """Call the helper that reads the memory in which the address in R3 is."""
    kernel, done = asm.label(), asm.label()
    asm.jump_if(Jump.JSLT, _R.R3, 0, kernel)  # the upper half of all addresses is the kernel's
    asm.call(from_user)
    asm.jump(done)
    asm.place(kernel)
    asm.call(from_kernel)
    asm.place(done)


class AnywhereHost(Host):
    """Write what one handler needs that is hit in programs and in the kernel alike, and is about programs."""

    has_user_context = True

    def user_register(self, name: str, nobody: Label) -> None:
        """Load a register of the user context to R0; go to ``nobody`` in a thread of the kernel. Takes R1-R5 and R9."""
        asm = self._asm
        in_kernel, done = asm.label(), asm.label()
        asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["cs"])
        asm.alu(Alu.AND, _R.R1, USER_MODE)
        asm.jump_if(Jump.JNE, _R.R1, USER_MODE, in_kernel)
        self.register(_R.R0, name)
        asm.jump(done)
        asm.place(in_kernel)
        _load_user_register(asm, name, nobody)
        asm.place(done)

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """Read R2 bytes at address R3 to R1, as ``Host`` does."""
        if self._request.reads_kernel:
            arguments()
            _read(self._asm, Helper.PROBE_READ_KERNEL, Helper.PROBE_READ_USER)
        else:
            super().read_memory(arguments)

    def read_string(self) -> None:
        """Read a string at address R3 to R1, as ``Host`` does."""
        if self._request.reads_kernel:
            _read(self._asm, Helper.PROBE_READ_KERNEL_STR, Helper.PROBE_READ_USER_STR)
        else:
            super().read_string()


def _load_user_register(asm: Assembler, name: str, nobody: Label) -> None:
    """Load a register with which the current thread entered the kernel to R0."""
    task_registers(asm, nobody)
    asm.load(_R.R0, _R.R0, REGISTER_OFFSETS[name])
    if name in ("cs", "ss"):
        asm.alu(Alu.AND, _R.R0, 0xFFFF)


def load_word_of_cpu(asm: Assembler, table: int, dst: Register) -> None:
    """Load this CPU's word of a table in the kernel's memory, 0 if that cannot be read; takes R0-R5."""
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.alu(Alu.LSH, _R.R0, 3)
    asm.mov(_R.R3, table)
    asm.alu(Alu.ADD, _R.R3, _R.R0)
    asm.mov(_R.R1, _R.R10)
    asm.alu(Alu.ADD, _R.R1, _WORD)
    asm.mov(_R.R2, 8)
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.load(dst, _R.R10, _WORD)


class KernelHost(Host):
    """Write what one handler in the kernel needs."""

    has_user_context = True

    def find_module(self, outside: Label, busy: Label) -> None:  # noqa: ARG002 - as in Host
        """Let only events go on that interrupt the kernel's code that is meant. Takes R1-R3."""
        asm, code = self._asm, self._request.kernel_code
        if code is None:
            return
        start, end = code
        asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["eip"])
        for condition, address in ((Jump.JLT, start), (Jump.JGE, end)):
            asm.mov(_R.R2, address)
            asm.jump_if(condition, _R.R1, _R.R2, outside)

    def register(self, dst: Register, name: str) -> None:
        """Load a register of the hit; uses R9. At a breakpoint the instruction pointer is the probepoint's address."""
        if name == "eip" and self._request.follows_module and self._request.placement is Placement.KPROBE:
            # However it gets here, the kernel leaves the address behind a breakpoint (kprobe_int3_handler,
            # optimized_callback and kprobe_ftrace_handler in arch/x86/kernel/kprobes).
            self._load(dst, name, Size.DW)
            self._asm.alu(Alu.SUB, dst, _BREAKPOINT_SIZE)
            self._subtract_moved(dst)
            return
        if name == "eip" and self._request.placement in (Placement.KPROBE, Placement.ENTRY):
            # The kernel has the address behind the breakpoint, or whatever its way of getting here leaves.
            self.probe_entry(dst)
            self._asm.load(dst, dst, ProbeField.LINK)
            return
        self._load(dst, name, Size.H if name in ("cs", "ss") else Size.DW)

    def user_register(self, name: str, nobody: Label) -> None:
        """Load a register of the user context to R0; go to ``nobody`` in a thread of the kernel. Takes R1-R5."""
        _load_user_register(self._asm, name, nobody)

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """Write the registers with which the program has entered the kernel."""
        copy_task_registers(self._asm, nobody, to)

    def load_bias(self, dst: Register) -> None:
        """Load 0: the addresses of the kernel's symbols are known when a program is inserted."""
        self._asm.mov(dst, 0)

    def load_copy_bias(self, dst: Register) -> None:
        """Load what this CPU's copies of variables are further on than their symbols say; takes R0-R5."""
        offsets, _ = self._request.per_cpu
        load_word_of_cpu(self._asm, offsets, dst)

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """Read R2 bytes at address R3 to R1; R0 is 0 if all of them could be read."""
        arguments()
        _read(self._asm, Helper.PROBE_READ_KERNEL, Helper.PROBE_READ_USER)

    def read_string(self) -> None:
        """Read a string at address R3 to R1, as ``Host`` does."""
        _read(self._asm, Helper.PROBE_READ_KERNEL_STR, Helper.PROBE_READ_USER_STR)
