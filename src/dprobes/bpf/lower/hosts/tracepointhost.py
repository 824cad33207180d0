"""
What a handler at a tracepoint asks of the kernel, in eBPF.

The program's argument is the tracepoint's record, or an array of the arguments, 8 bytes each; ``TracedField`` says how
a field is reached from there. There are no registers of the hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.hosts.kernelhost import KernelHost
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.target.kernel.tracedfields import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.assembler import Label
    from dprobes.target.kernel.tracedfields import SystemCallNumbers, TracedField

__all__ = ["TracepointHost"]

_R = Register

_IS_NARROW = 2
"""TS_COMPAT: a 32-bit system call is under way (arch/x86/include/asm/thread_info.h)."""

_NARROW = -48
"""Where on the stack it waits for the state whether the system call is a 32-bit one."""

_BITS = 64


class TracepointHost(KernelHost):
    """Write what one handler at a tracepoint needs."""

    def find_module(self, outside: Label, busy: Label) -> None:  # noqa: ARG002 - as in Host
        """Let only the system call go on that is meant. Takes R0-R3."""
        traced = self._request.traced
        if traced is not None and traced.system_call is not None:
            self._find_system_call(traced.system_call, outside)

    def _find_system_call(self, call: SystemCallNumbers, outside: Label) -> None:
        asm = self._asm
        narrow, found = asm.label(), asm.label()
        asm.call(Helper.GET_CURRENT_TASK_BTF)
        asm.load(_R.R1, _R.R0, call.status, Size.W)
        asm.alu(Alu.AND, _R.R1, _IS_NARROW)
        asm.store(_R.R10, _NARROW, _R.R1)
        self._place(call.number, call.number.path, outside)
        asm.load(_R.R2, _R.R2, call.number.path[-1], Size.W)
        asm.load(_R.R1, _R.R10, _NARROW)
        asm.jump_if(Jump.JNE, _R.R1, 0, narrow)
        for number, here in ((call.wide, None), (call.narrow, narrow)):
            if here is not None:
                asm.place(here)
            if number is not None:
                asm.jump_if(Jump.JEQ, _R.R2, number, found)
            asm.jump(outside)
        asm.place(found)

    def prepare(self) -> None:
        """Write what has to be known before the handler starts; takes R0-R5."""
        super().prepare()
        if self._request.traced is not None and self._request.traced.system_call is not None:
            self._asm.load(_R.R1, _R.R10, _NARROW)
            self._asm.store(SCRATCH, Field.PLACE, _R.R1)

    def register(self, dst: Register, name: str) -> None:  # noqa: ARG002 - all of them are the same
        """Load 0: the header of a record shows no registers."""
        self._asm.mov(dst, 0)

    def traced_field(self, name: str, nobody: Label) -> None:
        """Load a field to R0, from all programs alike; go to ``nobody`` behind a null pointer. Takes R1-R3."""
        asm, traced = self._asm, self._request.traced
        field = traced.fields.get(name) if traced is not None else None
        if field is None:
            asm.jump(nobody)
            return
        if field.narrow_path is None:
            self._load_field(field, field.path, nobody)
            return
        narrow, done = asm.label(), asm.label()
        asm.load(_R.R1, SCRATCH, Field.PLACE)
        asm.jump_if(Jump.JNE, _R.R1, 0, narrow)
        self._load_field(field, field.path, nobody)
        asm.jump(done)
        asm.place(narrow)
        self._load_field(field, field.narrow_path, nobody)
        asm.mov(_R.R0, _R.R0, wide=False)
        asm.place(done)

    def _load_field(self, field: TracedField, path: Sequence[int], nobody: Label) -> None:
        asm = self._asm
        self._place(field, path, nobody)
        offset = path[-1] if path else field.start
        if field.form is Form.NUMBER:
            self._load_number(_R.R0, _R.R2, offset, field.size)
            if field.is_signed and field.size < _BITS // 8:
                asm.alu(Alu.LSH, _R.R0, _BITS - 8 * field.size)
                asm.alu(Alu.ARSH, _R.R0, _BITS - 8 * field.size)
            self._forget_pointer()
            return
        if field.form is not Form.ADDRESS:
            asm.load(_R.R3, _R.R2, offset, Size.W)
            asm.alu(Alu.AND, _R.R3, 0xFFFF)
        asm.mov(_R.R0, _R.R2)
        self._forget_pointer()
        if field.form is Form.ADDRESS:
            asm.alu(Alu.ADD, _R.R0, offset)
            return
        asm.alu(Alu.ADD, _R.R0, _R.R3)
        if field.form is Form.PLACED_BEHIND:
            asm.alu(Alu.ADD, _R.R0, offset + 4)

    def _place(self, field: TracedField, path: Sequence[int], nobody: Label) -> None:
        """Load to R2 what the last number of a path counts from, the argument without a path; R1 is lost."""
        asm = self._asm
        asm.mov(_R.R2, CONTEXT)
        for offset in (field.start, *path[:-1]) if path else ():
            asm.load(_R.R2, _R.R2, offset)
            asm.jump_if(Jump.JEQ, _R.R2, 0, nobody)

    def _load_number(self, dst: Register, base: Register, offset: int, size: int) -> None:
        """Load a number of the record or of a structure; what lies at an odd place is put together of bytes."""
        asm = self._asm
        if offset % size == 0:
            asm.load(dst, base, offset, Size.of(size))
            return
        asm.mov(dst, 0)
        for byte in reversed(range(size)):
            asm.alu(Alu.LSH, dst, 8)
            asm.load(_R.R1, base, offset + byte, Size.B)
            asm.alu(Alu.OR, dst, _R.R1)

    def _forget_pointer(self) -> None:
        """Make a number of what the verifier knows as a pointer in R0, with which a handler may do what it likes."""
        self._asm.store(SCRATCH, Field.BIAS, _R.R0)
        self._asm.load(_R.R0, SCRATCH, Field.BIAS)
