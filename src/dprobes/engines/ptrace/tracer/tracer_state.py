"""
State of the tracer, as data: its threads, their hits and waits, and the objects that its parts share.

This module decides nothing: ``thread_stopper`` and ``tracer_process`` decide which thread runs when.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.hits.hit_lifecycle import AFTER, HitEvent, HitState
from dprobes.platform.linux.ptrace_calls import Register

if TYPE_CHECKING:
    from collections.abc import Collection, MutableSequence

    from dprobes.engines.counter_events import EventCounters
    from dprobes.engines.hits.hit_context import Changes
    from dprobes.engines.hits.probe_hits import QueuedRecords
    from dprobes.engines.ptrace.breakpoint_sites import Site
    from dprobes.engines.ptrace.site_patches import NativeStop
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Entry, Slot, Watchpoint
    from dprobes.engines.ptrace.tracer.tracer_programs import Handled, InsertedProgram, Probe, Programs
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = [
    "STRANGE",
    "DebugState",
    "ExitRequest",
    "InterruptedWait",
    "PendingReturn",
    "Thread",
    "ThreadGoneError",
    "ThreadHit",
    "ThreadState",
    "ThreadTable",
    "TracerState",
]


class ThreadState(enum.Enum):
    """State of a thread, as far as the tracer knows."""

    RUNNING = "running, or about to report a stop"
    STOPPED = "stopped, and waiting for the tracer"
    LISTENING = "stopped together with its process, until a SIGCONT"
    NEWBORN = "not yet run: its first stop is still to come"
    VFORKING = "waiting in the kernel for its vfork child"
    ENDED = "ended, while other threads of the process go on (a zombie leader)"


@dataclass(slots=True, eq=False)
class ThreadHit:
    """
    The hit of a thread at a breakpoint, whose ``state`` follows the table of ``engines.hits.hit_lifecycle``.

    ``handled`` are the results of handlers in their order, ``written`` the registers that these changed. A PENDING hit
    has a ``slot`` in which its instruction is executed, and its records are ``queued``.
    """

    state: HitState = HitState.NONE
    breakpoint: Breakpoint = field(init=False)
    handled: tuple[Handled, ...] = ()
    written: Changes | None = None
    slot: Slot = field(init=False)
    queued: QueuedRecords = field(init=False)
    since: float = 0.0
    """Time at which it became PENDING, in seconds of the monotonic clock."""
    looked_at: float = 0.0
    """Time of the last check of a PENDING hit, in seconds of the monotonic clock."""

    def follow(self, event: HitEvent) -> None:
        """Apply an event to the state; a hit that is given up before it was counted does not count for limits."""
        if event is HitEvent.GIVEN_UP and self.state in (HitState.HANDLED, HitState.UNFINISHED):
            for each in self.handled:
                each.probe.give_back()
        self.state = AFTER[self.state, event]

    def end(self) -> None:
        """Give up the hit, if any, of a thread that does not continue with it. A PENDING hit is left to the counter."""
        if self.state is not HitState.NONE and self.state is not HitState.PENDING:
            self.follow(HitEvent.GIVEN_UP)

    @property
    def is_late(self) -> bool:
        """True if handlers have run, and the thread may still execute the instruction in a step in which it sleeps."""
        return self.state is HitState.UNFINISHED or self.state is HitState.COUNTED


class ExitRequest(NamedTuple):
    """Request of a handler for its process, made by ``exit``: the operand, and the handler's program."""

    code: int
    program: InsertedProgram


class ThreadGoneError(Exception):
    """Error that a thread ended, with the wait status ``status``, while it executed code for the tracer."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


STRANGE = (OSError, ArithmeticError, ValueError, struct.error)
"""Exceptions that unexpected values in a thread's registers or memory can cause."""


@dataclass(slots=True, eq=False)
class DebugState:
    """
    Watchpoints in a thread's debug registers.

    ``programmed`` has the watchpoints of its address space at the time when the registers were set; ``slots`` has those
    that have a register. ``superseded`` has watchpoints that lost their slot while the trap of a hit was pending.
    """

    programmed: tuple[Watchpoint, ...] = ()
    slots: dict[int, Watchpoint] = field(default_factory=dict)
    superseded: dict[int, Watchpoint] = field(default_factory=dict)
    has_foreign: bool = False
    """True if a debugger had left watchpoints when the thread was seized: after that only the tracer can set any."""


@dataclass(slots=True, eq=False)
class PendingReturn:
    """
    An awaited return to ``address``, after which the stack pointer is ``top``.

    It is ``doubtful`` once the thread has left functions without a return.
    """

    address: int
    top: int
    probe: Probe
    site: Site
    entry: Entry | None = None
    doubtful: bool = False


@dataclass(slots=True, eq=False)
class InterruptedWait:
    """
    Wait that a stop has interrupted, and that is restarted until it is over.

    ``call`` (system call number), ``place`` (instruction pointer) and ``stack`` (stack pointer) identify its entry into
    the kernel. ``until`` is the end of its timeout by ``time.monotonic``, or infinite. The call then returns
    ``result``, and the memory at ``cleared``, (address, size) each, is set to zeros.
    """

    call: int
    place: int
    stack: int
    until: float
    result: int
    cleared: tuple[tuple[int, int], ...] = ()
    is_asked: bool = False
    """True if the thread has been asked to stop because the timeout is over."""

    def is_entered(self, registers: RegisterWords) -> bool:
        """Return whether a thread that is entering the kernel makes this call."""
        return (registers[Register.ORIG_RAX], registers[Register.RIP], registers[Register.RSP]) == (
            self.call,
            self.place,
            self.stack,
        )


class RestartedCall(NamedTuple):
    """A system call that the kernel restarts after a stop: address of its instruction, its number, and its result."""

    place: int
    number: int
    result: int


@dataclass(slots=True, eq=False)
class Thread:
    """A traced thread; ``rseq`` is the address of its ``struct rseq``, 0 while that is not known."""

    tid: int
    pid: int
    space: AddressSpace
    state: ThreadState
    rseq: int = 0
    uid: tuple[int, int] | None = None
    """Last known (effective, real) user ids; None before the first look-up and after an exec."""
    hit: ThreadHit = field(default_factory=ThreadHit)
    trapped: int = 0
    """Address of the breakpoint that the thread has run into, until the hit is handled (``Stopper``); otherwise 0."""
    is_left_to_us: bool = False
    """True if a handler in the process has stopped for the tracer to handle the hit at ``trapped``."""
    parked: NativeStop | None = None
    """Place where its handler in the process has ended with an exit code that the tracer must handle."""
    awaits_jumps: bool = False
    """True if it must stop when it is resumed, until the code that it has mapped has its jumps (``JumpWaits``)."""
    restarting: int = 0
    """Address of a system call instruction that the thread repeats because the tracer interrupted it; otherwise 0."""
    restarted: RestartedCall | None = None
    """System call that it was in when it was last interrupted, and which it may not have repeated yet."""
    is_outside: bool = False
    """True if its process is in no program's scope, and is traced only because it shares memory with one that is."""
    exit_request: ExitRequest | None = None
    """Request of a handler's ``exit`` for the process; None if there is none."""
    debug: DebugState = field(default_factory=DebugState)
    wait: InterruptedWait | None = None
    """Wait that a stop has interrupted, and that would fail or last too long by itself, until it returns."""
    returns: list[PendingReturn] = field(default_factory=list)
    """Pending returns of functions that were left by a tail call, the innermost last."""

    variables: dict[InsertedProgram, MutableSequence[int]] = field(default_factory=dict)
    """Variables that programs have for it, from their first use on."""
    counters: EventCounters | None = None
    """Performance counters of the thread; None before the first reading."""

    def counter(self, number: int) -> int | None:
        """Return a performance counter of the thread, or None if it is not available (``EventCounters.read``)."""
        if self.counters is None:
            from dprobes.engines.counter_events import EventCounters

            self.counters = EventCounters(self.tid)
        return self.counters.read(number)

    def end(self) -> None:
        """Close the performance counters of a thread that has ended, and give up its hit, unless that is pending."""
        self.hit.end()
        if self.counters is not None:
            self.counters.close()

    def variables_for(self, program: InsertedProgram) -> MutableSequence[int]:
        """Return a program's variables for the thread. They are allocated when they are first used."""
        program = program.principal or program
        if program not in self.variables:
            found = None
            if program.native is not None and program.thread_count:
                found = program.native.thread_variables(self.tid)
            self.variables[program] = [0] * program.thread_count if found is None else found
        return self.variables[program]

    def begin_program(self, space: AddressSpace) -> None:
        """Forget the state before an exec. The thread now runs in ``space``, and its debug registers are empty."""
        self.space = space
        self.hit.end()
        self.hit, self.debug, self.returns, self.variables = ThreadHit(), DebugState(), [], {}
        self.rseq = self.trapped = self.restarting = 0
        self.is_left_to_us = self.awaits_jumps = False
        self.parked = None
        self.restarted = None
        self.uid = self.exit_request = None
        if self.counters is not None:
            self.counters.close()
            self.counters = None  # an exec may have changed the thread id


class ThreadTable(dict[int, Thread]):
    """The traced threads, by thread id."""

    def enter(self, tid: int, pid: int, space: AddressSpace) -> Thread:
        """Add a thread that runs to the table, and return its entry."""
        thread = self[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
        return thread

    def spaces(self) -> Collection[AddressSpace]:
        """Return all address spaces, each once."""
        return {id(thread.space): thread.space for thread in self.values()}.values()

    def in_space(self, space: AddressSpace) -> list[Thread]:
        """Return the threads that run in an address space."""
        return [thread for thread in self.values() if thread.space is space]

    def of_process(self, pid: int) -> list[Thread]:
        """Return the threads of a process."""
        return [thread for thread in self.values() if thread.pid == pid]


@dataclass(slots=True, eq=False)
class TracerState:
    """Objects that the parts of the tracer share: the connection to the client, the programs, and the threads."""

    connection: Connection
    programs: Programs
    threads: ThreadTable
