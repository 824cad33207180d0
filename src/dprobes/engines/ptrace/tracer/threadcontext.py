"""
The ``Context`` of a handler on a stopped thread.

Memory is read and written as the program would do it: our breakpoints do not show and stay in place (what is written
under one becomes the byte that it stands in for), and what the program itself may not access is a fault. A write is
done as a whole or not at all.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch.x86 import X86_64
from dprobes.engines.linux import processcalls, ptracecalls
from dprobes.engines.linux.procfs import process_field
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.reports import Placed
from dprobes.engines.ptrace.tracer.memorywrites import is_mapped_writable, write_memory
from dprobes.engines.ptrace.tracer.segments import Segments, no_descriptor
from dprobes.engines.x86 import cpuid, xsave
from dprobes.engines.x86.emulation import Action
from dprobes.errors import InternalError, reason_of
from dprobes.rpn.isa import UNSEEN_ENTRY
from dprobes.target.processmaps import PAGE_SIZE
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.engines.hits.hitcontext import Changes
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.entries import Entry
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.segments import LocalDescriptors
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.extensions import Extension
    from dprobes.keyed.store import KeyedStore
    from dprobes.vm.machine import Machine

__all__ = ["ThreadContext"]

_RSEQ_CPU_ID = 4  # offsetof(struct rseq, cpu_id), include/uapi/linux/rseq.h

_CPUID = 0x3C

_CS, _RIP, _SS, _RSP = int(Register.CS), int(Register.RIP), int(Register.SS), int(Register.RSP)

# Index in appendix A to word of user_regs_struct.
_WORDS = {
    register.index: int(word)
    for word in Register
    if (register := X86_64.register(word.name.lower())) is not None  # the appendix has no orig_rax
}

# The base that the processor loads with a selector.
_SEGMENTS: dict[int, int | None] = {
    Register.DS: None,
    Register.ES: None,
    Register.FS: Register.FS_BASE,
    Register.GS: Register.GS_BASE,
}


def _ignore(*_: object) -> None:
    """Drop a warning or a message, where nobody takes them."""


_NAME_FILES = 64
"""How many files with names of threads are kept open."""
_NAME_SIZE = 64


class ThreadContext:
    """
    The thread that ``select`` chose, as the handler of ``probe`` sees it, and the variables that ``use`` chose.

    ``written`` holds what handlers changed in the registers. ``warn_once`` is told what the user of a program should
    know (message, hint, and the number of the program), ``send`` gets what the client should hear of breakpoints, and
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
        self.memory = processcalls.RemoteMemory()
        self._segments = Segments(local, self.warn)
        self._names: dict[int, int] = {}
        """Descriptors of the files with the names of the threads that hit last, by thread id."""
        self._thread: Thread
        self._registers: ctypes.Array[ctypes.c_ulong]
        self._floating_point: xsave.FloatingPoint | None = None
        self.probe: Probe
        self.process = 0
        self.word_size = 8
        self.written: Changes | None = None
        self.entries: Mapping[Probe, Entry] = {}
        """The entries of the calls that have just returned."""

    def use(self, program: InsertedProgram) -> None:
        """Give handlers what is their program's."""
        self.program = program
        self.local_variables = program.counters.variables.local
        self._cpu_variables = program.counters.variables.by_cpu
        self.global_variables = program.global_variables
        self.extensions = program.extensions
        self.keyed_tables = program.keyed_tables

    def warn(self, message: str, hint: str | None) -> None:
        """Tell the user of the program at hand something."""
        self._warn_once(message, hint, None if self.program is None else self.program.number)

    def select(self, thread: Thread, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Speak of ``thread`` from now on, whose instruction pointer in ``registers`` is that of the probe."""
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

    def register(self, index: int, *, user: bool) -> int:  # noqa: ARG002 - in user code both contexts are the same
        word = _WORDS.get(index)
        if word is not None:
            return self._registers[word]
        if self._floating_point is None:
            self._floating_point = xsave.FloatingPoint(ptracecalls.floating_point_state(self._thread.tid))
        return self._floating_point.register(index)

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        if index != _CPUID:
            raise InternalError(f"register {index:#x} was not refused before insertion (selector {selector:#x})")
        try:
            return cpuid.cpuid_of_leaf(selector & 0xFFFFFFFF)[::-1]
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
        """Set registers back to what they were before handlers changed them, and return the changes."""
        changes, self.written = self.written, None
        if changes:
            registers = self._registers
            for word, (before, after) in changes.items():
                if registers[word] == after:  # else a repeated string instruction has moved on
                    registers[word] = before
        return changes

    def apply(self, changes: Changes) -> None:
        """Make changes that were set aside; what was changed before stays as far as they do not concern it."""
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
        """Take notice of instructions under our breakpoints that a handler changed."""
        for breakpoint_ in breakpoints:
            # What was decided about the old instruction does not apply to the new one.
            emulation = (Action.STEP, len(breakpoint_.site.original))
            breakpoint_.site = replace(breakpoint_.site, emulation=emulation, copy=None)
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
        if self._thread.space.served_page(address, size) is not None:
            raise OSError
        data = self.memory.read(self._thread.tid, address, size)
        if len(data) < size:
            raise OSError
        return int.from_bytes(data, "little")

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a word on the stack, for the emulation of instructions; raise OSError if the program could not."""
        data = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if self._thread.space.served_page(address, size) is not None:
            raise OSError
        if not self.memory.write(self._thread.tid, address, data):
            raise OSError

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
        from dprobes.engines.linux.threadstack import stack_of

        return stack_of(self._thread.space.unwind_space(self._thread.tid), self._registers, frames)

    def traced_field(self, name: str) -> int:
        raise InternalError(f"the tracepoint's field '{name}' was not refused before insertion")

    # System variables

    def pid(self) -> int:
        return self._thread.pid

    def tid(self) -> int:
        return self._thread.tid

    def uid(self) -> int:
        # The owner of the directory in /proc is the effective user id, and cheap to ask for; the real one is looked
        # up again when that changes.
        thread = self._thread
        effective = os.stat(f"/proc/{thread.tid}").st_uid
        if thread.uid is None or thread.uid[0] != effective:
            thread.uid = (effective, int(process_field(thread.tid, "Uid").split()[0]))
        return thread.uid[1]

    def cpu(self) -> int:
        thread = self._thread
        if not thread.rseq:
            thread.rseq = ptracecalls.rseq_area(thread.tid)
        if thread.rseq:
            try:
                data = os.pread(thread.space.memory, 4, thread.rseq + _RSEQ_CPU_ID)
            except OSError:
                data = b""
            cpu = int.from_bytes(data, "little")
            if len(data) == 4 and cpu < 1 << 31:
                return cpu
        with open(f"/proc/{thread.pid}/task/{thread.tid}/stat", "rb") as file:
            # proc(5): field 39 is the CPU; the second field may hold blanks and parentheses.
            return int(file.read().rpartition(b")")[2].split()[36])

    def task(self) -> int:
        raise InternalError("'push task' was not refused before insertion")

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
        """Return the name of the thread as the kernel keeps it, without its NUL."""
        tid = self._thread.tid
        descriptor = self._names.get(tid)
        if descriptor is not None:
            try:
                return os.pread(descriptor, _NAME_SIZE, 0).rstrip(b"\n")
            except ProcessLookupError:  # it was of another thread with this id
                os.close(self._names.pop(tid))
        if len(self._names) == _NAME_FILES:
            os.close(self._names.pop(next(iter(self._names))))
        self._names[tid] = descriptor = os.open(f"/proc/{self._thread.pid}/task/{tid}/comm", os.O_RDONLY)
        return os.pread(descriptor, _NAME_SIZE, 0).rstrip(b"\n")
