"""``Context`` of a handler for a stopped thread of a stub's target."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.gdb.stub_registers import registers_of
from dprobes.errors import InternalError
from dprobes.rpn.instruction_set import UNSEEN_ENTRY
from dprobes.vm import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_program import StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.hits.hit_context import Changes
    from dprobes.extensions import Extension
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.vm.rpn_machine import Machine

__all__ = ["AwaitedReturns", "CallEntry", "PendingCall", "StubContext"]

# While a return is awaited, a breakpoint is at the return address, which is on top of the stack or in a register when
# the function begins. The call has returned when the same thread arrives there with the stack pointer after the return.
# So tail calls and recursion are distinguished, and no return address is changed. A call that is left by ``longjmp`` or
# an exception is forgotten when its frame is entered again, or when there are too many calls.


_CALLS_MAX = 1 << 14
"""Maximum number of pending calls; beyond it the oldest are forgotten. The ptrace engine keeps as many."""


class CallEntry(NamedTuple):
    """The entry of a call: ``time`` is CLOCK_MONOTONIC in nanoseconds, ``registers`` are by their index."""

    time: int
    registers: Mapping[int, int]


class PendingCall(NamedTuple):
    """A call of a probed function: its return address, and the stack pointer after a return that drops no arguments."""

    thread: ThreadId | None
    address: int
    top: int
    probe: StubProbe
    entry: CallEntry


class AwaitedReturns:
    """Calls that have not returned, of functions that may pop up to ``dropped`` bytes of arguments when they return."""

    def __init__(self, dropped: int) -> None:
        self._slack = dropped
        self._calls: dict[tuple[ThreadId | None, StubProbe, int], PendingCall] = {}
        self._addresses: Counter[int] = Counter()

    @property
    def addresses(self) -> set[int]:
        """Addresses to which the calls return, at which breakpoints are needed."""
        return set(self._addresses)

    def enter(self, call: PendingCall) -> None:
        """Add a call whose return is awaited."""
        key = call.thread, call.probe, call.top
        self._forget(key)
        if len(self._calls) >= _CALLS_MAX:
            self._forget(next(iter(self._calls)))
        self._calls[key] = call
        self._addresses[call.address] += 1

    def arrive(self, thread: ThreadId | None, address: int, top: int) -> list[PendingCall]:
        """
        Remove and return the calls from which a thread has returned to ``address``, the inner ones first.

        ``top`` is the stack pointer after the return, which distinguishes recursive calls.
        """
        found = [
            (key, call)
            for key, call in self._calls.items()
            if key[0] == thread and call.address == address and 0 <= top - call.top <= self._slack
        ]
        for key, _ in found:
            self._forget(key)
        return [call for _, call in reversed(found)]

    def drop(self, probe: StubProbe) -> None:
        """Forget the calls of the functions that a probepoint probes."""
        for key in [key for key in self._calls if key[1] is probe]:
            self._forget(key)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._addresses.clear()

    def _forget(self, key: tuple[ThreadId | None, StubProbe, int]) -> None:
        call = self._calls.pop(key, None)
        if call is not None:
            self._addresses[call.address] -= 1
            if not self._addresses[call.address]:
                del self._addresses[call.address]


class StubContext:
    """
    Context of the handler of ``probe`` on the thread that ``select`` chose.

    It has the variables of the program that was passed to ``use``. ``names`` are the stub's names of registers, and
    ``written`` the changes of handlers to these, both by register index. ``warn`` takes a message for the user.
    """

    local_variables: MutableSequence[int]
    global_variables: MutableSequence[int]
    extensions: Mapping[str, Extension]
    keyed_tables: Sequence[KeyedStore]

    def __init__(
        self,
        target: StubTarget,
        architecture: Architecture,
        processor: StubProcessor,
        warn: Callable[[str], None],
    ) -> None:
        self._target = target
        self._architecture = architecture
        self._processor = processor
        self._warn = warn
        self.thread: ThreadId | None = None
        self._registers: Registers
        self.names = registers_of(architecture, processor, target.description)
        self._masks = {register.index: (1 << register.bits) - 1 for register in architecture.registers}
        self.program: StubProgram | None = None
        self.probe: StubProbe
        self.process = 0
        self.word_size: int = architecture.word_size
        self.written: Changes | None = None
        self.entry: CallEntry | None = None
        """Entry of the call that has just returned."""
        self.user = 0
        self.name = b""

    def use(self, program: StubProgram) -> None:
        """Give handlers access to the variables, tables and extensions of their program."""
        self.program = program
        self.local_variables = program.local_variables
        self.global_variables = program.global_variables
        self.extensions = program.extensions
        self.keyed_tables = program.keyed_tables

    def select(self, thread: ThreadId | None, registers: Registers, process: int) -> None:
        """Select a thread, with its registers and the id of its process, for all further calls."""
        self.thread, self._registers, self.process = thread, registers, process
        self.written = None

    # Registers

    def register(self, index: int, *, user: bool) -> int:  # noqa: ARG002 - in user code both contexts are the same
        name = self.names.get(index)
        if name is None or name not in self._registers:
            raise InternalError(f"register {index:#x} was not refused before insertion")
        return self._registers[name] & self._masks[index]

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        raise InternalError(f"register {index:#x} was not refused before insertion (selector {selector:#x})")

    def set_register(self, index: int, value: int, *, user: bool) -> None:  # noqa: ARG002 - as in ``register``
        name = self.names[index]
        if name not in self._registers:
            raise SelectorFault(value)
        if self.written is None:
            self.written = {}
        before = self.written[index][0] if index in self.written else self._registers[name]
        self.written[index] = (before, value)
        self._registers[name] = value

    def set_aside(self) -> Changes | None:
        """Restore the registers to their values at the hit, and return the handlers' changes, or None without any."""
        changes, self.written = self.written, None
        for index, (before, _) in (changes or {}).items():
            self._registers[self.names[index]] = before
        return changes

    def apply(self, changes: Changes) -> None:
        """Apply changes that ``set_aside`` returned, in addition to earlier changes of other registers."""
        for index, (_, after) in changes.items():
            self.set_register(index, after, user=True)

    def pointers(self) -> tuple[int, int, int, int]:
        """Return cs, the instruction pointer, ss and the stack pointer; 0 for registers that do not exist."""
        registers, processor = self._registers, self._processor
        cs, ss = registers.value("cs"), registers.value("ss")
        return cs, registers[processor.pc], ss, registers[processor.sp]

    # Memory

    def read(self, address: int, size: int) -> bytes:
        data = self._target.read(address, size)
        if len(data) < size:
            raise AddressFault(address + len(data))
        return data

    def write(self, address: int, data: bytes) -> None:
        self.read(address, len(data))
        if not self._target.write(address, data):
            raise AddressFault(address)

    def is_readable(self, address: int) -> bool:
        return len(self._target.read(address, 1)) == 1

    def is_writable(self, address: int) -> bool:
        raise InternalError(f"whether {address:#x} can be written was not refused before insertion")

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:
        raise InternalError(f"the address {selector:#x}:{offset:#x} was not refused before insertion ({size}, {write})")

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
        assert self.program is not None
        return self.program.symbols[symbol] + self.program.bias

    def kernel_stack(self) -> list[int]:
        raise InternalError("the stack of the kernel was not refused before insertion")

    def user_stack(self, frames: int) -> list[int]:
        assert self.program is not None
        assert self.program.stacks is not None, "the session has set it"
        return self.program.stacks.stack(self._registers, frames)

    def traced_field(self, name: str) -> int:
        raise InternalError(f"the tracepoint's field '{name}' was not refused before insertion")

    def entry_time(self) -> int:
        if self.entry is None:
            raise AddressFault(UNSEEN_ENTRY)
        return self.entry.time

    def entry_register(self, index: int) -> int:
        value = None if self.entry is None else self.entry.registers.get(index)
        if value is None:
            raise AddressFault(UNSEEN_ENTRY)
        return value

    # Variables and identities

    def cpu_variables(self) -> MutableSequence[int]:
        assert self.program is not None
        return self.program.cpu_variables

    def thread_variables(self) -> MutableSequence[int]:
        assert self.program is not None
        return self.program.variables_of(self.tid())

    def pid(self) -> int:
        return self.process

    def tid(self) -> int:
        return self.process if self.thread is None else self.thread.thread

    def uid(self) -> int:
        return self.user

    def cpu(self) -> int:
        return 0

    def task(self) -> int:
        raise InternalError("'push task' was not refused before insertion")

    def entry_counter(self, number: int) -> int | None:
        raise InternalError(f"performance counter {number} was not refused before insertion")

    def counter(self, number: int) -> int | None:
        raise InternalError(f"performance counter {number} was not refused before insertion")

    def time(self) -> int:
        return time.monotonic_ns()

    def process_name(self) -> bytes:
        return self.name

    def call_extension(self, name: str | None, machine: Machine) -> None:
        from dprobes.extensions.extension import call_extensions

        call_extensions(self.extensions, name, machine, self._warn)
