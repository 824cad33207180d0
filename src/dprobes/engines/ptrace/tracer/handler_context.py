"""
The ``Context`` of a handler on a stopped thread.

Memory is accessed as the probed program would access it. The tracer's breakpoints are hidden and remain (a byte written
under one becomes its original byte). An access that the program itself could not make is a fault. A write is done as a
whole or not at all.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch.x86_processors import ACCESSED, X86_64
from dprobes.engines.ptrace.tracer.breakpoint_placement import is_mapped_writable, write_memory
from dprobes.engines.ptrace.tracer.call_injection import MMAP, MODIFY_LDT, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError
from dprobes.engines.ptrace.tracer_messages import Placed
from dprobes.errors import InternalError, reason_of
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import process_field
from dprobes.platform.linux.ptrace_calls import Register, SegmentDescriptor
from dprobes.platform.x86 import register_images
from dprobes.platform.x86.instruction_emulation import Action
from dprobes.rpn.instruction_set import UNSEEN_ENTRY
from dprobes.target.process_maps import PAGE_SIZE
from dprobes.vm import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.engines.hits.hit_context import Changes
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Entry
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.extensions import Extension
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.platform.linux.ptrace_calls import RegisterWords
    from dprobes.vm.rpn_machine import Machine, Point

__all__ = ["LocalTables", "ThreadContext", "decode_descriptor"]

# Segments: meaning of selectors in a stopped thread.
#
# User code sees three kinds of selector (Intel SDM, volume 3, 3.4.2; ``arch/x86/include/asm/segment.h``)::
#
#     index of descriptor (13 bits) | table: 0 GDT, 1 LDT | privilege (2 bits)
#
# The kinds are: the kernel's flat user segments and three thread-local ones in the GDT, and the program's own in its
# LDT, which only the process itself can read (modify_ldt(2)). A descriptor there is 8 bytes (3.4.5), from the lowest
# bit on::
#
#     limit 0-15 | base 0-23 | type (4) | 1: code or data | privilege (2) | present | limit 16-19
#     | for programs | 64-bit | 32-bit | limit counts pages | base 24-31
#
# In 64-bit code the processor ignores bases and limits, except the bases of fs and gs.


if TYPE_CHECKING:
    LocalDescriptors = Callable[[Thread, int], SegmentDescriptor | None]
    """Look-up of the descriptor with an index in a thread's local table; it may raise ``InjectionError``."""

_USER_CODE_32, _USER_DATA, _USER_CODE_64 = 4, 5, 6  # indices in the GDT
_LOCAL_TABLE = 4
_PRIVILEGE = 3
_CONTENTS_EXPAND_DOWN, _CONTENTS_CODE = 1, 2

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


class _Segment(NamedTuple):
    """A segment, whose valid offsets are ``first`` to ``last``."""

    base: int
    first: int
    last: int
    readable: bool
    writable: bool


_FLAT_DATA = _Segment(0, 0, _MASK_32, readable=True, writable=True)
_FLAT_CODE = _Segment(0, 0, _MASK_32, readable=True, writable=False)
_FLAT = {_USER_CODE_32: _FLAT_CODE, _USER_DATA: _FLAT_DATA, _USER_CODE_64: _FLAT_CODE}


def no_descriptor(thread: Thread, index: int) -> None:
    """Return None, as for a thread without local descriptors."""


class Segments:
    """Segments of stopped threads; ``warn`` is called if the ``local`` descriptors cannot be looked up."""

    def __init__(self, local: LocalDescriptors, warn: Callable[[str, str | None], None]) -> None:
        self._local = local
        self._warn = warn

    def linear_address(
        self, thread: Thread, registers: RegisterWords, selector: int, offset: int, size: int, *, write: bool
    ) -> int:
        """
        Return the flat address of ``size`` bytes at ``selector:offset``; a size of 0 requests only the address.

        Raise ``SelectorFault`` if the selector refers to no segment, or the segment does not contain or permit the
        access. In 64-bit code, only an unknown selector raises it.
        """
        number = selector & 0xFFFF
        if thread.space.word_size == 8:
            return self._base_64(thread, registers, number) + offset & _MASK_64
        segment = self._segment(thread, number)
        allowed = segment.writable if write else segment.readable or not size
        if not allowed or offset < segment.first or offset + max(1, size) - 1 > segment.last:
            raise SelectorFault(number)
        return segment.base + offset & _MASK_32

    def selector_to_load(self, thread: Thread, value: int) -> tuple[int, int]:
        """
        Return the selector to store in ds, es, fs or gs, and the base of its segment, for the requested value.

        Raise ``SelectorFault`` if the processor would refuse to load it, or the kernel to set it (``invalid_selector``
        in ``arch/x86/kernel/ptrace.c``).
        """
        selector = value & 0xFFFF
        if selector == 0:
            return 0, 0
        if selector & _PRIVILEGE != _PRIVILEGE:
            raise SelectorFault(selector)
        if selector == _PRIVILEGE:
            return selector, 0
        segment = self._segment(thread, selector)
        if not segment.readable:
            raise SelectorFault(selector)
        return selector, segment.base

    def _base_64(self, thread: Thread, registers: RegisterWords, selector: int) -> int:
        if selector <= _PRIVILEGE:
            return 0  # value of ds, es, fs and gs in most 64-bit programs
        for register, base in ((Register.FS, Register.FS_BASE), (Register.GS, Register.GS_BASE)):
            if registers[register] == selector:
                return registers[base]
        return self._segment(thread, selector).base

    def _segment(self, thread: Thread, selector: int) -> _Segment:
        """
        Return the segment of a selector in the descriptor tables of a thread; its privilege bits are ignored.

        Raise ``SelectorFault`` if there is none.
        """
        index = selector >> 3
        if selector & _LOCAL_TABLE:
            descriptor = self._local_descriptor(thread, index)
            if descriptor is None:
                raise SelectorFault(selector)
            return _decoded(descriptor)
        if (flat := _FLAT.get(index)) is not None:
            return flat
        descriptor = ptrace_calls.get_thread_area(thread.tid, index) if index else None
        if descriptor is None or descriptor.not_present:
            raise SelectorFault(selector)
        return _decoded(descriptor)

    def _local_descriptor(self, thread: Thread, index: int) -> SegmentDescriptor | None:
        try:
            return self._local(thread, index)
        except InjectionError as problem:
            self._warn(f"the local descriptor table of process {thread.pid} cannot be read: {problem}", None)
            return None


def _decoded(descriptor: SegmentDescriptor) -> _Segment:
    limit = descriptor.limit
    if descriptor.limit_in_pages:
        limit = limit << 12 | 0xFFF
    is_code = bool(descriptor.contents & _CONTENTS_CODE)
    first, last = 0, limit
    if descriptor.contents == _CONTENTS_EXPAND_DOWN:
        first, last = limit + 1, _MASK_32 if descriptor.is_32_bit else 0xFFFF
    only = bool(descriptor.read_exec_only)
    return _Segment(descriptor.base, first, last, readable=not (is_code and only), writable=not (is_code or only))


_READ = 0

_PROT_READ_WRITE = 0x3
_MAP_PRIVATE_ANONYMOUS = 0x22
_SIZE = 8


class LocalTables:
    """Local descriptor tables of stopped threads. Each thread is made to read its own table from the kernel."""

    def __init__(self, stopper: Stopper) -> None:
        self._stopper = stopper
        self._memory = process_calls.RemoteMemory()

    def descriptor(self, thread: Thread, index: int) -> SegmentDescriptor | None:
        """
        Return the descriptor with an index in the table of a thread that has stopped at a breakpoint, or None.

        It is read every time, because the program may change its table. Raise ``InjectionError`` if the thread cannot
        read it, and ``ProcessLookupError`` if the thread is killed meanwhile.
        """
        if not may_inject(thread):
            raise InjectionError("a seccomp filter or a shadow stack prevents system calls in it")
        try:
            with self._stopper.others_stopped(thread.space, thread):
                data = self._ask(thread, index)
        except ThreadGoneError as gone:
            self._stopper.defer(thread.tid, gone.status)
            raise ProcessLookupError from gone
        return decode_descriptor(data) if len(data) == _SIZE else None

    def _ask(self, thread: Thread, index: int) -> bytes:
        word_size, size = thread.space.word_size, (index + 1) * _SIZE
        with injecting(thread) as call:
            buffer = call(MMAP[word_size], 0, size, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
            if -4096 < buffer < 0:
                raise InjectionError("its address space has no room")
            # Read the whole table up to the descriptor; the rest after the table's end is zeros.
            filled = call(MODIFY_LDT[word_size], _READ, buffer, size)
            data = self._memory.read(thread.tid, buffer + index * _SIZE, _SIZE) if filled == size else b""
            call(MUNMAP[word_size], buffer, size)
        return data


def decode_descriptor(data: bytes) -> SegmentDescriptor | None:
    """Return the descriptor in 8 bytes of a table, or None for one that programs cannot use."""
    bits = int.from_bytes(data, "little")
    kind = bits >> 40 & 0xF
    is_segment, privilege, is_present = bits >> 44 & 1, bits >> 45 & 3, bits >> 47 & 1
    if not (is_segment and is_present and privilege == 3):
        return None
    is_code = bool(kind & 8)
    return SegmentDescriptor(
        base=(bits >> 16 & 0xFFFFFF) | (bits >> 56 & 0xFF) << 24,
        limit=(bits & 0xFFFF) | (bits >> 48 & 0xF) << 16,
        is_32_bit=bits >> 54 & 1,
        contents=kind >> 2,
        read_exec_only=not kind & 2,
        limit_in_pages=bits >> 55 & 1,
        not_present=False,
        usable=bits >> 52 & 1,
        lm=is_code and bits >> 53 & 1,
    )


_RSEQ_CPU_ID = 4  # offsetof(struct rseq, cpu_id), include/uapi/linux/rseq.h

_CPUID = 0x3C

_CS, _RIP, _SS, _RSP = int(Register.CS), int(Register.RIP), int(Register.SS), int(Register.RSP)

# Index in appendix A to word of user_regs_struct.
_WORDS = {
    register.index: int(word)
    for word in Register
    if (register := X86_64.register(word.name.lower())) is not None  # the appendix has no orig_rax
}

_NAMED = {word.name.lower(): int(word) for word in Register}

_ACCESSED = next(register.index for register in X86_64.registers if register.name == ACCESSED)

# Word of the base that the processor loads together with a selector.
_SEGMENTS: dict[int, int | None] = {
    Register.DS: None,
    Register.ES: None,
    Register.FS: Register.FS_BASE,
    Register.GS: Register.GS_BASE,
}


def _ignore(*_: object) -> None:
    """Accept a warning or a message, and do nothing."""


_NAME_FILES = 64
"""Maximum number of files with names of threads that are kept open."""
_NAME_SIZE = 64


class ThreadContext:
    """
    Context of the thread passed to ``select``, for the handler of ``probe``, with the variables passed to ``use``.

    ``written`` contains the registers that handlers changed. ``warn_once`` is called with a warning for the user of a
    program (message, hint, and the number of the program), ``send`` with reports of breakpoints for the client.
    ``local`` looks up local descriptors.
    """

    local_variables: MutableSequence[int]
    global_variables: MutableSequence[int]
    extensions: Mapping[str, Extension]
    keyed_tables: Sequence[KeyedStore]

    def __init__(
        self,
        warn_once: Callable[[str, str | None, int | None], None] = _ignore,
        send: Callable[[object], None] = _ignore,
        local: LocalDescriptors = no_descriptor,
    ) -> None:
        self._warn_once = warn_once
        self._send = send
        self.program: InsertedProgram | None = None
        self.memory = process_calls.RemoteMemory()
        self._segments = Segments(local, self.warn)
        self._names: dict[int, int] = {}
        """Descriptors of the files with the names of the threads that hit last, by thread id."""
        self._thread: Thread
        self._registers: RegisterWords
        self._distances: dict[Probe, int] = {}
        """The distances of the accessed memory, for probes with a condition on it."""
        self._floating_point: register_images.FloatingPoint | None = None
        self.probe: Probe
        self.process = 0
        self.word_size = 8
        self.written: Changes | None = None
        self.entries: Mapping[Probe, Entry] = {}
        """Entries of the calls that have just returned."""

    def use(self, program: InsertedProgram) -> None:
        """Use the variables and extensions of a program from now on."""
        self.program = program
        self.local_variables = program.counters.variables.local
        self._cpu_variables = program.counters.variables.by_cpu
        self.global_variables = program.global_variables
        self.extensions = program.extensions
        self.keyed_tables = program.keyed_tables

    def warn(self, message: str, hint: str | None) -> None:
        """Warn the user of the current program."""
        self._warn_once(message, hint, None if self.program is None else self.program.number)

    def select(self, thread: Thread, registers: RegisterWords) -> None:
        """Use a thread from now on. The instruction pointer in ``registers`` is the address of the probe."""
        self._thread = thread
        self.process = thread.pid
        self.word_size = thread.space.word_size
        self._registers = registers
        self.written = None
        self._floating_point = None

    def entry_time(self) -> int:
        return self._entry().time

    def entry_register(self, index: int) -> int:
        if (value := self._entry().registers.get(index)) is None:
            raise AddressFault(UNSEEN_ENTRY)
        return value

    def entry_counter(self, number: int) -> int | None:
        return self._entry().counters.get(number)

    def _entry(self) -> Entry:
        if (entry := self.entries.get(self.probe)) is None:
            raise AddressFault(UNSEEN_ENTRY)
        return entry

    def cpu_variables(self) -> MutableSequence[int]:
        return self._cpu_variables[self.cpu()]

    def thread_variables(self) -> MutableSequence[int]:
        assert self.program is not None
        return self._thread.variables_for(self.program)

    # Registers

    def owners_of_access(self, owners: Sequence[tuple[Probe, Point]], raw: bytes) -> tuple[tuple[Probe, Point], ...]:
        """
        Return those probes at an instruction with the bytes ``raw`` whose condition on the accessed memory is true.

        The distances that ``push r, accessed`` gives are from now on those of this access.
        """
        self._distances = {}
        return tuple(each for each in owners if each[0].limits.access is None or self._accesses(each[0], raw))

    def _accesses(self, probe: Probe, raw: bytes) -> bool:
        from dprobes.target.code.memory_accesses import MemoryAccess, memory_access

        check, registers = probe.limits.access, self._registers
        assert check is not None
        access = memory_access(raw, check.instruction)
        assert isinstance(access, MemoryAccess), "only such instructions have a check"
        bias = registers[_RIP] - check.instruction
        first, length = check.first + (0 if check.absolute else bias), check.length
        distance = access.address(lambda name: int(registers[_NAMED[name]]), bias) - first
        if not -access.size < distance < length:
            return False
        self._distances[probe] = distance & _MASK_64
        return True

    def register(self, index: int, *, user: bool) -> int:  # noqa: ARG002 - in user code both contexts are the same
        word = _WORDS.get(index)
        if word is not None:
            return self._registers[word]
        if index == _ACCESSED:
            return self._distances[self.probe]
        if self._floating_point is None:
            self._floating_point = register_images.FloatingPoint(ptrace_calls.floating_point_state(self._thread.tid))
        return self._floating_point.register(index)

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        if index != _CPUID:
            raise InternalError(f"register {index:#x} was not refused before insertion (selector {selector:#x})")
        try:
            return register_images.cpuid_of_leaf(selector & 0xFFFFFFFF)[::-1]
        except OSError as error:
            self.warn(
                f"the cpuid registers read as zeros: the tracer may not run code of its own ({reason_of(error)})", None
            )
            return 0, 0, 0, 0

    def set_register(self, index: int, value: int, *, user: bool) -> None:  # noqa: ARG002 - as in ``register``
        word = _WORDS.get(index)
        if word is None:
            return
        if word not in _SEGMENTS:
            self._set_word(word, value if self.word_size == 8 else value & 0xFFFFFFFF)
        elif value & 0xFFFF != self._registers[word]:
            selector, base = self._segments.selector_to_load(self._thread, value)
            self._set_word(word, selector)
            if (base_word := _SEGMENTS[word]) is not None:
                self._set_word(base_word, base)

    def _set_word(self, word: int, value: int) -> None:
        if self.written is None:
            self.written = {}
        before = self.written[word][0] if word in self.written else self._registers[word]
        self.written[word] = (before, value)
        self._registers[word] = value

    def set_aside(self) -> Changes | None:
        """Restore the registers that handlers changed, and return the changes; None if there are none."""
        changes, self.written = self.written, None
        if changes:
            registers = self._registers
            for word, (before, after) in changes.items():
                if registers[word] == after:  # otherwise a repeated string instruction has advanced it
                    registers[word] = before
        return changes

    def apply(self, changes: Changes) -> None:
        """Apply changes that ``set_aside`` returned; earlier changes of other registers stay."""
        for word, (_, after) in changes.items():
            self._set_word(word, after)

    # Memory

    def read(self, address: int, size: int) -> bytes:
        if (served := self._thread.space.served_page(address, size)) is not None:
            raise AddressFault(served)
        data = self.memory.read(self._thread.tid, address, size)
        if len(data) < size:
            raise AddressFault(self._first_unreadable(address, size))
        breakpoints = self._thread.space.breakpoints
        if breakpoints:
            data = self._without_breakpoints(address, data)
        return data

    def _without_breakpoints(self, address: int, data: bytes) -> bytes:
        breakpoints = self._thread.space.breakpoints
        end = address + len(data)
        if len(breakpoints) < len(data):
            hidden = [a for a in breakpoints if address <= a < end]
        else:
            hidden = [a for a in range(address, end) if a in breakpoints]
        patches = self._thread.space.patches
        if not hidden and not patches.by_site:
            return data
        clean = bytearray(data)
        patches.hide(address, clean)
        for place in hidden:
            clean[place - address] = breakpoints[place].original
        return bytes(clean)

    def _first_unreadable(self, address: int, size: int) -> int:
        position = address
        while position < address + size:
            chunk = min(PAGE_SIZE - position % PAGE_SIZE, address + size - position)
            if len(self.memory.read(self._thread.tid, position, chunk)) < chunk:
                return position
            position += chunk
        return address  # another thread changed the mapping meanwhile

    def write(self, address: int, data: bytes) -> None:
        rewritten = write_memory(self.memory, self._thread, address, data)
        if rewritten:
            self._note_rewritten(rewritten)

    def _note_rewritten(self, breakpoints: list[Breakpoint]) -> None:
        """Record and report changes of instructions under breakpoints that a handler has made."""
        for breakpoint_ in breakpoints:
            # Emulation and copy of the old instruction do not apply to the new one.
            emulation = (Action.STEP, len(breakpoint_.site.original))
            breakpoint_.site = breakpoint_.site._replace(emulation=emulation, copy=None)
        for pid in self._thread.space.pids:
            self._send(Placed(pid, tuple((b.address, b.original) for b in breakpoints)))

    def is_readable(self, address: int) -> bool:
        if self._thread.space.served_page(address, 1) is not None:
            return False
        return len(self.memory.read(self._thread.tid, address, 1)) == 1

    def is_writable(self, address: int) -> bool:
        return self.is_readable(address) and is_mapped_writable(self._thread, address)

    def read_word(self, address: int, size: int) -> int:
        """Return a word of the stack, for the emulation of instructions; raise OSError if it cannot be read."""
        if self._is_served(address, size):
            raise OSError
        data = self.memory.read(self._thread.tid, address, size)
        if len(data) < size:
            raise OSError
        return int.from_bytes(data, "little")

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a word on the stack, for the emulation of instructions; raise OSError if the program could not."""
        data = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if self._is_served(address, size) or not self.memory.write(self._thread.tid, address, data):
            raise OSError

    def _is_served(self, address: int, size: int) -> bool:
        """Return whether only a user-space server (userfaultfd, FUSE) can deliver a page of the range."""
        space = self._thread.space
        return space.served is not None and space.served_page(address, size) is not None

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:
        return self._segments.linear_address(self._thread, self._registers, selector, offset, size, write=write)

    def read_physical(self, address: int, size: int) -> bytes:
        raise InternalError(f"reading {size} bytes of physical memory at {address:#x} was not refused before insertion")

    def write_physical(self, address: int, data: bytes) -> None:
        raise InternalError(f"changing physical memory at {address:#x} ({data.hex()}) was not refused before insertion")

    def physical_address(self, address: int) -> int:
        raise InternalError(f"the physical address of {address:#x} was not refused before insertion")

    def read_port(self, port: int, size: int) -> int:
        raise InternalError(f"reading {size} bytes from port {port:#x} was not refused before insertion")

    def write_port(self, port: int, size: int, value: int) -> None:
        raise InternalError(f"writing {value:#x} ({size} bytes) to port {port:#x} was not refused before insertion")

    def symbol_address(self, symbol: str) -> int:
        probe = self.probe
        return self._thread.space.symbols[probe.program.number, probe.file][symbol]

    def kernel_stack(self) -> list[int]:
        raise InternalError("the stack of the kernel was not refused before insertion")

    def user_stack(self, frames: int) -> list[int]:
        from dprobes.platform.linux.thread_stack import stack_of

        return stack_of(self._thread.space.unwind_space(self._thread.tid), self._registers, frames)

    def traced_field(self, name: str) -> int:
        raise InternalError(f"the tracepoint's field '{name}' was not refused before insertion")

    # System variables

    def pid(self) -> int:
        return self._thread.pid

    def tid(self) -> int:
        return self._thread.tid

    def uid(self) -> int:
        # The owner of the directory in /proc is the effective user id, which is quickly read; the real one is looked up
        # again when that changes.
        thread = self._thread
        effective = os.stat(f"/proc/{thread.tid}").st_uid
        if thread.uid is None or thread.uid[0] != effective:
            thread.uid = (effective, int(process_field(thread.tid, "Uid").split()[0]))
        return thread.uid[1]

    def cpu(self) -> int:
        thread = self._thread
        if not thread.rseq:
            thread.rseq = ptrace_calls.rseq_area(thread.tid)
        if thread.rseq:
            try:
                data = os.pread(thread.space.memory, 4, thread.rseq + _RSEQ_CPU_ID)
            except OSError:
                data = b""
            cpu = int.from_bytes(data, "little")
            if len(data) == 4 and cpu < 1 << 31:
                return cpu
        with open(f"/proc/{thread.pid}/task/{thread.tid}/stat", "rb") as file:
            # proc(5): field 39 is the CPU; the second field may contain blanks and parentheses.
            return int(file.read().rpartition(b")")[2].split()[36])

    def task(self) -> int:
        raise InternalError("'push task' was not refused before insertion")

    def counter(self, number: int) -> int | None:
        return self._thread.counter(number)

    def time(self) -> int:
        return time.monotonic_ns()

    def call_extension(self, name: str | None, machine: Machine) -> None:
        from dprobes.extensions.extension import call_extensions

        call_extensions(self.extensions, name, machine, lambda message: self.warn(message, None))

    # Header items

    def pointers(self) -> tuple[int, int, int, int]:
        registers = self._registers
        return registers[_CS], registers[_RIP], registers[_SS], registers[_RSP]

    def process_name(self) -> bytes:
        """Return the thread's ``comm`` (/proc/PID/task/TID/comm), without the newline."""
        tid = self._thread.tid
        descriptor = self._names.get(tid)
        if descriptor is not None:
            try:
                return os.pread(descriptor, _NAME_SIZE, 0).rstrip(b"\n")
            except ProcessLookupError:  # the file was that of a former thread with this id
                os.close(self._names.pop(tid))
        if len(self._names) == _NAME_FILES:
            os.close(self._names.pop(next(iter(self._names))))
        self._names[tid] = descriptor = os.open(f"/proc/{self._thread.pid}/task/{tid}/comm", os.O_RDONLY)
        return os.pread(descriptor, _NAME_SIZE, 0).rstrip(b"\n")
