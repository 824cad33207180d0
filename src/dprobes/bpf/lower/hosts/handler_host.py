"""
Kernel interface of a handler, in eBPF: registers of the hit thread, its memory, identities, the clock, the ring.

Templates use the kernel only through this interface. The docstring of a method describes the code that it writes, and
the registers that the code uses. Calls of helpers clobber R0-R5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import CALL, Alu, Atomic, CallKind, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS, Identities, copy_task_registers, leave_kernel
from dprobes.bpf.lower.hosts.vma_lookup import Answer, PagingQuestion, VmaQuestions, ask_once, write_module_test
from dprobes.bpf.lower.lowering_request import Placement, Watched
from dprobes.bpf.lower.state.handler_state import SCRATCH, Field
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, SNAPSHOT_REGISTERS, MapName, ProbeField, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.bpf.lower.lowering_request import Request

__all__ = ["CONTEXT", "COOKIE", "COUNTER_ROOM", "SHARED_MAX", "Host", "can_share", "dispatch"]

# One program for the handlers of many definitions: the attach cookie selects the probepoint that was hit.
#
# A separate program for each definition needs a separate link as well, and the kernel takes tens of milliseconds to
# remove a link. Tail calls would let one program reach any number of others, but not those that may sleep. So handlers
# are put one after the other, and a tree of comparisons selects the right one.


COOKIE = -104
"""Stack offset of the attach cookie (``Request.shared``), below all other data on the stack."""

SHARED_MAX = 8_000
"""
Maximum number of instructions of all handlers in one program.

The kernel expands single instructions, which moves all that follow, so that the time grows with the square of the size.
At four times as many, the kernel's own jumps become too long (16 bits).
"""

_CONTEXT = Register.R6
_R = Register


def can_share(assembled: Assembled) -> bool:
    """Return whether a handler can share a BPF program with others, or False if it is a callback of ``bpf_loop``."""
    return not any((insn.opcode, insn.src, insn.imm) == (CALL, CallKind.HELPER, Helper.LOOP) for insn in assembled.code)


def dispatch(handlers: Sequence[tuple[int, Assembled]], mask: int) -> Assembled:
    """
    Return one BPF program for handlers, each with the number of its probepoint, in ascending order.

    The handlers were lowered as ``Request.shared``. The number is the attach cookie, masked by ``mask``.
    """
    asm = Assembler()
    asm.mov(_CONTEXT, _R.R1)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.store(_R.R10, COOKIE, _R.R0)
    asm.mov(_R.R1, _CONTEXT)
    asm.alu(Alu.AND, _R.R0, mask)
    leaves = [asm.label() for _ in handlers]
    _choose(asm, [number for number, _ in handlers], leaves)
    behind: dict[tuple[Insn, ...], tuple[Assembled, list[Label]]] = {}
    for leaf, (_, assembled) in zip(leaves, handlers, strict=True):
        asm.place(leaf)
        functions = assembled.code[assembled.end_of_main :]
        if functions not in behind:
            behind[functions] = assembled, [asm.label() for _ in assembled.functions[1:]]
        asm.include(assembled, behind[functions][1])
    for assembled, labels in behind.values():
        asm.include_functions(assembled, labels)
    return asm.assemble()


def _choose(asm: Assembler, numbers: Sequence[int], leaves: Sequence[Label]) -> None:
    """Jump to the label in ``leaves`` whose number, of the ascending ``numbers``, is in R0."""
    if len(leaves) == 1:
        asm.jump(leaves[0])
        return
    middle, upper = len(leaves) // 2, asm.label()
    asm.jump_if(Jump.JGE, _R.R0, numbers[middle], upper)
    _choose(asm, numbers[:middle], leaves[:middle])
    asm.place(upper)
    _choose(asm, numbers[middle:], leaves[middle:])


# The entry of a handler's probepoint in the probe table, and the ring that its records go to, in eBPF.


class ProbeTable:
    """The writer of code that reads the probe table entry, counts in it, and fills the ring."""

    _asm: Assembler
    _request: Request

    def probe_entry(self, dst: Register) -> None:
        """Set a register to the address of the probepoint's entry in the probe table; clobbers R9."""
        asm = self._asm
        if self._request.probe is not None:
            asm.load_value(dst, MapName.PROBES, self._request.probe * PROBE_ENTRY_SIZE)
            return
        asm.load(Register.R9, SCRATCH, Field.PROBE)
        self.entry_at(dst, Register.R9)

    def entry_at(self, dst: Register, index: Register) -> None:
        """Set a register to the address of the entry at ``index``; clobbers ``index``."""
        asm = self._asm
        asm.point_to_element(dst, MapName.PROBES, index, self._request.tables.probes, PROBE_ENTRY_SIZE)

    def probe_offset(self, dst: Register) -> None:
        """Load the file offset of the probepoint's specified place, or of a sample. Clobbers R9."""
        if self._request.module is not None:
            self._asm.load(dst, SCRATCH, Field.PLACE)
            return
        self.probe_entry(dst)
        self._asm.load(dst, dst, ProbeField.OFFSET)

    def count(self, field: ProbeField) -> None:
        """Add one to a counter of the probepoint; clobbers R1, R2 and R9."""
        asm = self._asm
        self.probe_entry(Register.R1)
        asm.count(Register.R1, field)

    def output(self, *, wakes: bool = False) -> None:
        """
        Put R3 bytes at R2 into the ring; R0 is 0 if there was room. Clobbers R1-R5.

        A reader that waits is woken. With ``wakes``, it is woken in any case (BPF_RB_FORCE_WAKEUP).
        """
        asm = self._asm
        if self._request.abilities.polled:
            asm.mov(Register.R4, RingOutput.NO_WAKEUP)
        elif wakes:
            asm.mov(Register.R4, RingOutput.FORCE_WAKEUP)
        else:
            awake = asm.label()
            asm.mov(Register.R4, RingOutput.NO_WAKEUP)
            asm.load_value(Register.R1, MapName.STATUS, Status.WAITING)
            asm.jump_if_word(Jump.JEQ, Register.R1, 0, 0, awake, by=Register.R5)
            asm.mov(Register.R5, 0)
            asm.atomic(Atomic.XCHG, Register.R1, 0, Register.R5)
            asm.mov(Register.R4, RingOutput.FORCE_WAKEUP)
            asm.place(awake)
        asm.load_map(Register.R1, MapName.RING)
        asm.call(Helper.RINGBUF_OUTPUT)


CONTEXT = Register.R6
"""The register with the program's argument: a ``pt_regs``, or a structure that begins with one."""

COUNTER_ROOM = 48
"""Bytes that ``Host.counter`` uses for temporary data."""

_EVENT_ADDRESS = 176
"""Offset in ``struct bpf_perf_event_data`` of the address that a breakpoint watches."""

_FOUND = -48
"""Stack offset of a sample's file offset and a module's load bias, until there is a state."""

_KEY = -4
"""Stack offset of the key of a look-up."""

_STOP = 19
"""SIGSTOP."""


class Host(Identities, ProbeTable):
    """
    Writer of the code of a handler that depends on its environment: registers, memory, ids, ring and probe table.

    ``uses_ip`` and ``uses_ids`` request that the instruction pointer and the ids are determined before the handler
    starts.
    """

    has_user_context = False
    """True if ``push u`` shows other registers than ``push r``."""

    def __init__(
        self, asm: Assembler, architecture: Architecture, request: Request, *, uses_ip: bool, uses_ids: bool
    ) -> None:
        self._asm = asm
        self._request = request
        self._word_size = architecture.word_size
        self._size = Size.DW if architecture.word_size == 8 else Size.W
        self._keeps_ip = uses_ip and request.placement is Placement.RET_SITE
        self._keeps_ids = uses_ids and request.namespace is not None
        vma = request.abilities.vma
        self._vmas = None if vma is None else VmaQuestions(asm, vma)
        self._paging = PagingQuestion(asm, request.abilities)
        self.sleeps = False
        """True once code has been written that may sleep."""

    @property
    def _knows_bias(self) -> bool:
        return self._request.module is not None or self._request.watched is not None

    # Before the handler

    def cookie(self) -> None:
        """Load the attach cookie (``map_layouts.ProbeField``) to R0; clobbers R1-R5."""
        if self._request.shared:
            self._asm.load(Register.R0, Register.R10, COOKIE)
            return
        self._asm.mov(Register.R1, CONTEXT)
        self._asm.call(Helper.GET_ATTACH_COOKIE)

    def begin(self) -> None:
        """Write the first instructions of the BPF program, before the handler's prologue; clobbers R0-R5."""

    def load_result(self) -> None:
        """Load the return value of the BPF program to R0."""
        self._asm.mov(Register.R0, 0)

    def override_return(self) -> None:
        """Make the entered function return R2 without executing its code, at a KPROBE. Clobbers R0-R5."""
        self._asm.mov(Register.R1, CONTEXT)
        self._asm.call(Helper.OVERRIDE_RETURN)

    def find_module(self, outside: Label, busy: Label) -> None:
        """
        Go to ``outside`` unless the event interrupts the module's code, to ``busy`` if its mapping cannot be looked up.

        ``prepare`` stores the file offset and the load bias of the interrupted code. Clobbers R0-R5 and R7.
        """
        asm, module = self._asm, self._request.module
        if module is None:
            return
        assert self._vmas is not None, "a module cannot be recognised without bpf_find_vma"
        leave_kernel(asm, CONTEXT, outside)
        asm.load(Register.R2, CONTEXT, REGISTER_OFFSETS["eip"])
        ask_once(asm, self._vmas, self._request.tables.cpus, busy)
        write_module_test(asm, self._vmas, module, outside)
        asm.store(Register.R10, _FOUND, Register.R2)
        asm.store(Register.R10, _FOUND + 8, Register.R3)

    def prepare(self) -> None:
        """Write code before the handler that determines its items, such as ids. Clobbers R0-R5."""
        if self._keeps_ip:
            self._read_return_address()
        if self._keeps_ids:
            self.prepare_ids()
        if self._request.module is not None:
            self._asm.copy_from(Register.R10, _FOUND, SCRATCH, Field.PLACE)
        if self._knows_bias:
            self._asm.copy_from(Register.R10, _FOUND + 8, SCRATCH, Field.BIAS)

    def find_mapper(self, outside: Label) -> None:
        """Go to ``outside`` unless the process maps the watched module at the watched address. Clobbers R0-R5."""
        asm, watched = self._asm, self._request.watched
        if watched is None:
            return
        self.global_pid()
        asm.store(Register.R10, _KEY, Register.R0, Size.W)
        asm.look_up(MapName.MAPPERS, Register.R10, _KEY, outside)
        asm.copy_from(Register.R0, 0, Register.R10, _FOUND + 8)
        if watched is Watched.SYMBOL:
            asm.load(Register.R2, CONTEXT, _EVENT_ADDRESS)
            asm.mov(Register.R3, self._request.link)
            asm.alu(Alu.SUB, Register.R2, Register.R3)
            asm.jump_if(Jump.JNE, Register.R1, Register.R2, outside)

    def _read_return_address(self) -> None:
        asm = self._asm
        if self._request.abilities.calls is not None:  # if it cannot be read, the instruction faults as well
            asm.load(Register.R1, CONTEXT, REGISTER_OFFSETS["esp"])
            asm.copy_from(Register.R1, 0, SCRATCH, Field.IP)
            return
        asm.store(SCRATCH, Field.IP, 0)

        def arguments() -> None:
            asm.add(Register.R1, SCRATCH, Field.IP)
            asm.mov(Register.R2, self._word_size)
            asm.load(Register.R3, CONTEXT, REGISTER_OFFSETS["esp"])

        self.read_memory(arguments)

    # Registers

    def register(self, dst: Register, name: str) -> None:
        """Load a register of the hit thread, as the handler must see it; clobbers R9."""
        match name:
            case "eip":
                self._ip(dst)
            case "esp" if self._request.placement is Placement.RET_SITE:
                self._asm.load(dst, CONTEXT, REGISTER_OFFSETS[name], self._size)
                self._asm.alu(Alu.ADD, dst, self._word_size + self._request.return_bytes, wide=self._word_size == 8)
            case "cs" | "ss":
                self._load(dst, name, Size.H)
            case _:
                self._load(dst, name, self._size)

    def _load(self, dst: Register, name: str, size: Size) -> None:
        """
        Load the lower bytes of a register to ``dst``.

        A BPF program on a perf event can load only whole registers.
        """
        if self._request.placement is not Placement.EVENT:
            self._asm.load(dst, CONTEXT, REGISTER_OFFSETS[name], size)
            return
        self._asm.load(dst, CONTEXT, REGISTER_OFFSETS[name])
        if size is Size.H:
            self._asm.alu(Alu.AND, dst, 0xFFFF)
        elif size is Size.W:
            self._asm.mov(dst, dst, wide=False)

    def _ip(self, dst: Register) -> None:
        if self._keeps_ip:
            self._asm.load(dst, SCRATCH, Field.IP, self._size)
            return
        self._load(dst, "eip", self._size)
        if self._request.placement is Placement.BREAKPOINT:
            self._subtract_moved(dst)

    def _subtract_moved(self, dst: Register) -> None:
        if self._request.probe is None:
            self._asm.load(Register.R9, SCRATCH, Field.MOVED)
            self._asm.alu(Alu.SUB, dst, Register.R9)
        elif self._request.moved:
            self._asm.alu(Alu.SUB, dst, self._request.moved)

    def user_register(self, name: str, nobody: Label) -> None:  # noqa: ARG002 - for a host that has a user context
        """Load a register of the user context to R0; go to ``nobody`` if there is none. Clobbers R1-R5 and R9."""
        self.register(Register.R0, name)

    def traced_field(self, name: str, nobody: Label) -> None:  # noqa: ARG002 - for a host that is at a tracepoint
        """Load a field of the tracepoint to R0; go to ``nobody`` if it does not exist. Clobbers R1-R3."""
        self._asm.jump(nobody)

    def set_register(self, name: str, src: Register) -> None:
        """Set a register of the hit thread to ``src``. No other register is clobbered."""
        self._asm.store(CONTEXT, REGISTER_OFFSETS[name], src)

    def counter(self, number: int, room: tuple[Register, int], unread: Label) -> None:
        """
        Load a performance counter of the thread to R0, by its index in ``COUNTERS``. Clobbers R1-R5.

        Go to ``unread`` if it cannot be read. ``room`` is the place of COUNTER_ROOM bytes for temporary use.
        """
        from dprobes.bpf.lower.hosts.thread_counters import write_counter

        counters = self._request.abilities.counters
        assert counters is not None, "the instruction has no code without counters"
        write_counter(self, self._asm, counters, number, room, unread)

    def load_bias(self, dst: Register) -> None:
        """Load the load bias of the module in this process (run-time minus link address). Clobbers R0-R5 and R9."""
        asm = self._asm
        if self._knows_bias:
            asm.load(dst, SCRATCH, Field.BIAS)
            return
        if self._request.placement is Placement.URETPROBE:
            self.function_ip()
            asm.mov(dst, Register.R0)
        else:
            asm.load(dst, CONTEXT, REGISTER_OFFSETS["eip"])
            self._subtract_moved(dst)
        if self._request.probe is None:
            self.probe_entry(Register.R0)
            asm.load(Register.R0, Register.R0, ProbeField.LINK)
        else:
            asm.mov(Register.R0, self._request.link)
        asm.alu(Alu.SUB, dst, Register.R0)

    def load_copy_bias(self, dst: Register) -> None:
        """Raise AssertionError: only the kernel has copies of variables for each CPU (``KernelHost``)."""
        raise AssertionError(f"programs have no copies for each CPU (to {dst.name})")

    def function_ip(self) -> None:
        """Load the address of the function that returns, at a URETPROBE, to R0; clobbers R1-R5."""
        self._asm.mov(Register.R1, CONTEXT)
        self._asm.call(Helper.GET_FUNC_IP)

    # Memory

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """
        Read R2 bytes of user memory at address R3 to R1; R0 is 0 if all of them could be read.

        ``arguments`` loads these registers from data that is available after a call, too. If a page is not in memory,
        the code waits for it only if it is certain to arrive.
        """
        asm = self._asm
        arguments()
        asm.call(Helper.PROBE_READ_USER)
        if not self._request.abilities.sleepable or self._request.placement is Placement.EVENT:
            return
        self.sleeps, done = True, asm.label()
        asm.jump_if(Jump.JEQ, Register.R0, 0, done)
        arguments()
        asm.mov(Register.R1, Register.R3)
        self._paging.ask()
        asm.jump_if(Jump.JNE, Register.R0, 0, done)
        arguments()
        asm.call(Helper.COPY_FROM_USER)
        asm.place(done)

    def read_string(self) -> None:
        """
        Read a string at address R3 to R1, R2 bytes with its NUL at most.

        R0 is its length with the NUL, or negative. The helper reads no pages in, and it may access all of the R2 bytes.
        """
        self._asm.call(Helper.PROBE_READ_USER_STR)

    def clear_memory(self) -> None:
        """
        Set R2 bytes at R1 to zero. Clobbers R0-R5.

        In the kernel, a helper reads the highest address, where no user memory is. On an error, helpers clear their
        buffer (ARG_PTR_TO_UNINIT_MEM in the kernel's include/linux/bpf.h). In a process, such a read would fault, so a
        loop clears the bytes; no verifier forbids the loop there.
        """
        if not self._request.abilities.verified:
            self._clear_in_loops()
            return
        self._asm.mov(Register.R3, -1)
        self._asm.call(Helper.PROBE_READ_USER)

    def _clear_in_loops(self) -> None:
        asm, words, rest, done = self._asm, *(self._asm.label() for _ in range(3))
        asm.alu(Alu.ADD, Register.R2, Register.R1)
        asm.place(words)
        asm.add(Register.R3, Register.R1, 8)
        asm.jump_if(Jump.JGT, Register.R3, Register.R2, rest)
        asm.store(Register.R1, 0, 0)
        asm.mov(Register.R1, Register.R3)
        asm.jump(words)
        asm.place(rest)
        asm.jump_if(Jump.JGE, Register.R1, Register.R2, done)
        asm.store(Register.R1, 0, 0, Size.B)
        asm.alu(Alu.ADD, Register.R1, 1)
        asm.jump(rest)
        asm.place(done)

    def kernel_stack(self) -> None:
        """
        Write up to R2 bytes of the kernel's call stack to R1; R0 is their number, or a negative error.

        Clobbers R1-R5.
        """
        asm = self._asm
        if self._word_size == 4:  # code of 32-bit programs is interrupted, and the kernel has no such code
            asm.mov(Register.R0, 0)
            return
        asm.mov(Register.R3, Register.R2)
        asm.mov(Register.R2, Register.R1)
        asm.mov(Register.R1, CONTEXT)
        asm.mov(Register.R4, 0)
        asm.call(Helper.GET_STACK)

    def user_stack(self, area: int, work: int, log_mask: int, key: int | None = None) -> None:
        """
        Reserve R2 bytes at R1 for the user call stack, and set R0 to R2. Clobbers R1-R5 and R9.

        The ring entry from which the stack is unwound is built at offset ``area`` of the state. Four words at ``work``
        are for temporary use. R1 is the address after a prefix at LP; with ``key``, it is this offset of the state, for
        8-byte words. A stack that is copied into the entry of its record or key needs no room in the key.
        """
        if self._request.abilities.copies_stacks:
            from dprobes.bpf.lower.state.stack_snapshot import write_place

            if key is None:
                write_place(self._asm, self, work)
            return
        from dprobes.bpf.lower.state.stack_snapshot import write_snapshot

        layout = self._request.abilities.stack
        write_snapshot(self._asm, self, area, work, log_mask, self._word_size, key, layout)

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """
        Write the thread's user registers as ``struct pt_regs`` to the address that ``to`` loads. Clobbers R0-R5.

        Go to ``nobody`` in a thread of the kernel.
        """
        asm, in_kernel, done = self._asm, self._asm.label(), self._asm.label()
        is_event = self._request.placement is Placement.EVENT
        if is_event:
            leave_kernel(asm, CONTEXT, in_kernel)
        to(Register.R2)
        for offset in range(0, 8 * SNAPSHOT_REGISTERS, 8):
            asm.copy_from(CONTEXT, offset, Register.R2, offset)
        for name in ("eip", "esp"):  # the handler may see other values than the context has
            self.register(Register.R1, name)
            to(Register.R2)
            asm.store(Register.R2, REGISTER_OFFSETS[name], Register.R1)
        if is_event:
            asm.jump(done)
            asm.place(in_kernel)
            copy_task_registers(asm, nobody, to)
            asm.place(done)

    def vma_flags(self) -> None:
        """
        Load the flags of the mapping at the address in R2 to R1. R0 is 0, ``BUSY``, or another error.

        Clobbers R2-R5.
        """
        assert self._vmas is not None
        self._vmas.ask()
        self._asm.load(Register.R1, Register.R10, Answer.FLAGS)

    def write_functions(self) -> None:
        """Write the functions that the kernel and the handler call, after all other code."""
        self._paging.write_functions()
        if self._vmas is not None:
            self._vmas.write_callback()

    def write_memory(self) -> None:
        """Write R3 bytes at R2 to user memory at address R1; R0 is 0 if all could be written. Clobbers R1-R5."""
        self._asm.call(Helper.PROBE_WRITE_USER)

    def note_stop(self, refused: Label) -> None:
        """
        Record that the process is stopped for a core dump. Clobbers R0-R5 and R9.

        Go to ``refused`` if the list of stopped processes is full or closed: the process must not be stopped then.
        """
        from dprobes.bpf import core_stop_layout

        asm, free = self._asm, self._asm.label()
        asm.load_value(Register.R9, MapName.STOPS)
        asm.mov(Register.R1, 1)
        asm.atomic(Atomic.ADD, Register.R9, core_stop_layout.COUNT, Register.R1, fetch=True)
        asm.alu(Alu.AND, Register.R1, core_stop_layout.STOPS_MAX - 1)
        asm.alu(Alu.LSH, Register.R1, core_stop_layout.STOP_SIZE.bit_length() - 1)
        asm.alu(Alu.ADD, Register.R9, Register.R1)
        asm.jump_if_word(Jump.JEQ, Register.R9, core_stop_layout.FIRST, 0, free)
        asm.alu(Alu.RSH, Register.R1, 32)
        asm.jump_if(Jump.JNE, Register.R1, core_stop_layout.ENDED, refused)
        asm.place(free)
        asm.call(Helper.KTIME_GET_NS)
        asm.store(Register.R9, core_stop_layout.FIRST + core_stop_layout.TIME, Register.R0)
        self.global_pid()
        # An exchange is a barrier: CLOSED is read after it.
        asm.atomic(Atomic.XCHG, Register.R9, core_stop_layout.FIRST, Register.R0)
        asm.load_value(Register.R1, MapName.STOPS)
        asm.jump_if_word(Jump.JNE, Register.R1, core_stop_layout.CLOSED, 0, refused)

    def stop_process(self) -> None:
        """Send SIGSTOP to the process, which stops before it returns to user mode. Clobbers R0-R5."""
        self._asm.mov(Register.R1, _STOP)
        self._asm.call(Helper.SEND_SIGNAL)
