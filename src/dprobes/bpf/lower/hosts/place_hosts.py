"""
Interface of handlers that are hit in the kernel, in eBPF, with the user context of the current thread.

``push r`` pushes registers of the hit. ``push u`` pushes registers with which the current thread entered the kernel.
User and kernel addresses are read by different helpers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT, Host
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS, copy_task_registers, leave_kernel, task_registers
from dprobes.bpf.lower.lowering_request import ARGUMENT_REGISTERS, Placement
from dprobes.bpf.lower.state.handler_state import SCRATCH, Field
from dprobes.bpf.map_layouts import INLINE_ENDING, SKIPPED, ProbeField
from dprobes.target.kernel.traced_fields import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.target.kernel.traced_fields import SystemCallNumbers, TracedField

__all__ = ["AnywhereHost", "InlineHost", "KernelHost", "TracepointHost", "TrampolineHost"]

_R = Register
_BREAKPOINT_SIZE = 1
_KERNEL_WORD = -64
"""Stack offset of a word of the kernel's memory."""


def _read(asm: Assembler, from_kernel: Helper, from_user: Helper) -> None:
    """Call the helper for the half of the address space, the kernel's or the user's, in which the address in R3 is."""
    kernel, done = asm.label(), asm.label()
    asm.jump_if(Jump.JSLT, _R.R3, 0, kernel)  # the upper half of all addresses is the kernel's
    asm.call(from_user)
    asm.jump(done)
    asm.place(kernel)
    asm.call(from_kernel)
    asm.place(done)


class AnywhereHost(Host):
    """The writer of the kernel interface of a handler that is hit in user mode and in the kernel."""

    has_user_context = True

    def user_register(self, name: str, nobody: Label) -> None:
        """Load a register of the user context to R0; go to ``nobody`` in a kernel thread. Clobbers R1-R5 and R9."""
        asm = self._asm
        in_kernel, done = asm.label(), asm.label()
        leave_kernel(asm, CONTEXT, in_kernel)
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
    """Load a register with which the current thread entered the kernel to R0; go to ``nobody`` in a kernel thread."""
    task_registers(asm, nobody)
    asm.load(_R.R0, _R.R0, REGISTER_OFFSETS[name])
    if name in ("cs", "ss"):
        asm.alu(Alu.AND, _R.R0, 0xFFFF)


def load_word_of_cpu(asm: Assembler, table: int, dst: Register) -> None:
    """Load this CPU's word of a table in the kernel's memory, or 0 if it cannot be read. Clobbers R0-R5."""
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.alu(Alu.LSH, _R.R0, 3)
    asm.mov(_R.R3, table)
    asm.alu(Alu.ADD, _R.R3, _R.R0)
    asm.add(_R.R1, _R.R10, _KERNEL_WORD)
    asm.mov(_R.R2, 8)
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.load(dst, _R.R10, _KERNEL_WORD)


class KernelHost(Host):
    """A writer of the kernel interface of handlers whose hits are in the kernel."""

    has_user_context = True

    def find_module(self, outside: Label, busy: Label) -> None:  # noqa: ARG002 - as in Host
        """
        Go to ``outside`` if the event does not interrupt the addresses of ``Request.kernel_code``.

        Go there also if a port instruction does not access ``Request.ports``. Clobbers R1-R3.
        """
        asm, code, ports = self._asm, self._request.kernel_code, self._request.ports
        if ports is not None:
            asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["edx"])
            asm.alu(Alu.AND, _R.R1, 0xFFFF)
            asm.jump_if(Jump.JLT, _R.R1, ports.first, outside)
            asm.jump_if(Jump.JGT, _R.R1, ports.last, outside)
            if ports.count_size:
                asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["ecx"])
                asm.alu(Alu.LSH, _R.R1, 64 - 8 * ports.count_size)
                asm.jump_if(Jump.JEQ, _R.R1, 0, outside)
        if code is None:
            return
        start, end = code
        asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["eip"])
        for condition, address in ((Jump.JLT, start), (Jump.JGE, end)):
            asm.mov(_R.R2, address)
            asm.jump_if(condition, _R.R1, _R.R2, outside)

    def register(self, dst: Register, name: str) -> None:
        """Load a register of the hit. At a breakpoint, ``eip`` is the probepoint's address. Clobbers R9."""
        if name == "eip" and self._request.follows_module and self._request.placement is Placement.KPROBE:
            # In every case the kernel leaves the address after a breakpoint (kprobe_int3_handler, optimized_callback
            # and kprobe_ftrace_handler in arch/x86/kernel/kprobes).
            self._load(dst, name, Size.DW)
            self._asm.alu(Alu.SUB, dst, _BREAKPOINT_SIZE)
            self._subtract_moved(dst)
            return
        if name == "eip" and self._request.placement in (Placement.KPROBE, Placement.ENTRY):
            # The kernel has the address after the breakpoint, or another one, which depends on the kind of kprobe.
            self.probe_entry(dst)
            self._asm.load(dst, dst, ProbeField.LINK)
            return
        self._load(dst, name, Size.H if name in ("cs", "ss") else Size.DW)

    def user_register(self, name: str, nobody: Label) -> None:
        """Load a register of the user context to R0; go to ``nobody`` in a thread of the kernel. Clobbers R1-R5."""
        _load_user_register(self._asm, name, nobody)

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """
        Write the registers with which the thread entered the kernel to the address that ``to`` loads.

        Go to ``nobody`` in a thread of the kernel. Clobbers R0-R5.
        """
        copy_task_registers(self._asm, nobody, to)

    def load_bias(self, dst: Register) -> None:
        """Set ``dst`` to 0: the run-time addresses of the kernel's symbols are known at the insertion."""
        self._asm.mov(dst, 0)

    def load_copy_bias(self, dst: Register) -> None:
        """Load the distance of this CPU's copies of variables from their symbols; clobbers R0-R5."""
        offsets, _ = self._request.per_cpu
        load_word_of_cpu(self._asm, offsets, dst)

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """Read R2 bytes at address R3 to R1; R0 is 0 if all of them could be read."""
        arguments()
        _read(self._asm, Helper.PROBE_READ_KERNEL, Helper.PROBE_READ_USER)

    def read_string(self) -> None:
        """Read a string at address R3 to R1, as ``Host`` does."""
        _read(self._asm, Helper.PROBE_READ_KERNEL_STR, Helper.PROBE_READ_USER_STR)


# The kernel interface of a handler at a tracepoint, in eBPF.
#
# The program's argument is the tracepoint's record, or an array of the arguments, 8 bytes each. ``TracedField`` has the
# path from there to a field. There are no registers of the hit.


_IS_NARROW = 2
"""TS_COMPAT: a 32-bit system call is under way (arch/x86/include/asm/thread_info.h)."""

_NARROW = -48
"""Stack offset of the flag for a 32-bit system call, until there is a state."""

_BITS = 64


class TracepointHost(KernelHost):
    """The writer of the kernel interface of a handler at a tracepoint."""

    def find_module(self, outside: Label, busy: Label) -> None:  # noqa: ARG002 - as in Host
        """Go to ``outside`` unless the hit is at the requested system call. Clobbers R0-R3."""
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
        asm.jump_if_word(Jump.JNE, _R.R10, _NARROW, 0, narrow)
        for number, here in ((call.wide, None), (call.narrow, narrow)):
            if here is not None:
                asm.place(here)
            if number is not None:
                asm.jump_if(Jump.JEQ, _R.R2, number, found)
            asm.jump(outside)
        asm.place(found)

    def prepare(self) -> None:
        """Write code before the handler that stores data for the handler. Clobbers R0-R5."""
        super().prepare()
        if self._request.traced is not None and self._request.traced.system_call is not None:
            self._asm.copy_from(_R.R10, _NARROW, SCRATCH, Field.PLACE)

    def register(self, dst: Register, name: str) -> None:  # noqa: ARG002 - all of them are the same
        """Set ``dst`` to 0: the header of a record shows no registers."""
        self._asm.mov(dst, 0)

    def traced_field(self, name: str, nobody: Label) -> None:
        """
        Load a field to R0, for 64-bit and 32-bit processes; go to ``nobody`` after a null pointer.

        Clobbers R1-R3.
        """
        asm, traced = self._asm, self._request.traced
        field = traced.fields.get(name) if traced is not None else None
        if field is None:
            asm.jump(nobody)
            return
        if field.narrow_path is None:
            self._load_field(field, field.path, nobody)
            return
        narrow, done = asm.label(), asm.label()
        asm.jump_if_word(Jump.JNE, SCRATCH, Field.PLACE, 0, narrow)
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
        """
        Load to R2 the address to which a path's last offset is relative. For an empty path, it is the BPF context.

        Go to ``nobody`` after a null pointer.
        """
        asm = self._asm
        asm.mov(_R.R2, CONTEXT)
        for offset in (field.start, *path[:-1]) if path else ():
            asm.jump_if_word(Jump.JEQ, _R.R2, offset, 0, nobody, by=_R.R2)

    def _load_number(self, dst: Register, base: Register, offset: int, size: int) -> None:
        """Load a number to ``dst``. An unaligned number is assembled from bytes, which clobbers R1."""
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
        """Turn a value that the verifier tracks as a pointer in R0 into a number, so that it allows all operations."""
        self._asm.store(SCRATCH, Field.BIAS, _R.R0)
        self._asm.load(_R.R0, SCRATCH, Field.BIAS)


# The kernel interface of a handler at a BPF trampoline, in eBPF: at the entry of a function of the kernel, or its
# return.
#
# The program's argument is an array of the words that the function takes in registers, followed at its return by its
# return value. No other registers are saved.


_ARGUMENT_SIZE = 8
_RESULT = -112
"""Stack offset of the value that a skipped function returns. With 0, the function is executed."""


class TrampolineHost(KernelHost):
    """The writer of the kernel interface of a handler at a trampoline."""

    def begin(self) -> None:
        """Set the return value of the BPF program to 0, with which the function is executed."""
        if self._request.placement is Placement.MODIFY_RETURN:
            self._asm.store(_R.R10, _RESULT, 0)

    def load_result(self) -> None:
        """Load the return value of the program to R0."""
        if self._request.placement is Placement.MODIFY_RETURN:
            self._asm.load(_R.R0, _R.R10, _RESULT)
        else:
            super().load_result()

    def override_return(self) -> None:
        """Make the entered function return R2 without executing its code; clobbers no register."""
        self._asm.store(_R.R10, _RESULT, _R.R2)

    def register(self, dst: Register, name: str) -> None:
        """Load an argument word, the result, or the function's address to ``dst``, or 0 for an unsaved register."""
        words = self._request.arguments
        if name == "eip":
            self.probe_entry(dst)
            self._asm.load(dst, dst, ProbeField.LINK)
        elif name in ARGUMENT_REGISTERS[:words]:
            self._load_word(dst, ARGUMENT_REGISTERS.index(name))
        elif name == "eax" and self._request.placement is Placement.FEXIT:
            self._load_word(dst, words)
        else:
            self._asm.mov(dst, 0)

    def _load_word(self, dst: Register, number: int) -> None:
        """Load a word of the array to ``dst`` through memory: the verifier would restrict the use of its type."""
        self._asm.copy_from(CONTEXT, _ARGUMENT_SIZE * number, SCRATCH, Field.BIAS, by=dst)
        self._asm.load(dst, SCRATCH, Field.BIAS)


# A handler in the probed process that may end with ``exit N`` or ``skip``: it stores a word for its trampoline.
#
# The context has a word that is not a register. Its value is the way in which the handler ended; with 0, the trampoline
# executes the instruction.


class InlineHost(Host):
    """The writer of the interface of a handler in a process that may stop the process, or skip a function."""

    def begin(self) -> None:
        """Clear the word for the trampoline, which then executes the instruction."""
        self._asm.store(CONTEXT, INLINE_ENDING, 0)

    def note_stop(self, refused: Label) -> None:
        """Record nothing: the tracer keeps the thread stopped, and the end of the tracer resumes it."""

    def stop_process(self) -> None:
        """Make the trampoline stop the thread, with the code of ``exit`` in R8."""
        self._asm.store(CONTEXT, INLINE_ENDING, _R.R8)

    def override_return(self) -> None:
        """Make the entered function return R2 without executing its code; clobbers no register."""
        self._asm.store(CONTEXT, REGISTER_OFFSETS["eax"], _R.R2)
        self._asm.store(CONTEXT, INLINE_ENDING, SKIPPED)
