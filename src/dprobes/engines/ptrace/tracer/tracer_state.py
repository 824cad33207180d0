"""
What the tracer knows, as data: its threads, their hits and waits, and what all of its parts share.

It decides nothing: who may run when is up to ``thread_stopper`` and ``tracer_process``.
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
    """What a thread is doing, as far as the tracer knows."""

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

    ``handled`` are the results of handlers in their order, ``written`` what these changed in the registers. A PENDING
    hit has a ``slot`` in which its instruction is executed, and its records are ``queued``.
    """

    state: HitState = HitState.NONE
    breakpoint: Breakpoint = field(init=False)
    handled: tuple[Handled, ...] = ()
    written: Changes | None = None
    slot: Slot = field(init=False)
    queued: QueuedRecords = field(init=False)
    since: float = 0.0
    """When it has become PENDING, in seconds of the monotonic clock."""
    looked_at: float = 0.0
    """When it was looked at then."""

    def follow(self, event: HitEvent) -> None:
        """Take notice of an event; a hit that is given up before it was counted was none, also for limits."""
        if event is HitEvent.GIVEN_UP and self.state in (HitState.HANDLED, HitState.UNFINISHED):
            for each in self.handled:
                each.probe.give_back()
        self.state = AFTER[self.state, event]

    def end(self) -> None:
        """Give up the hit, if there is one, of a thread that does not go on with it; the counter has pending ones."""
        if self.state is not HitState.NONE and self.state is not HitState.PENDING:
            self.follow(HitEvent.GIVEN_UP)

    @property
    def is_late(self) -> bool:
        """Whether handlers have run, and the thread may still execute the instruction in a step in which it sleeps."""
        return self.state is HitState.UNFINISHED or self.state is HitState.COUNTED


class ExitRequest(NamedTuple):
    """What a handler asks for its process by an ``exit``: the operand, and the program that it is in."""

    code: int
    program: InsertedProgram


class ThreadGoneError(Exception):
    """Report that a thread ended, and its wait status, while it was to do something for us."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


STRANGE = (OSError, ArithmeticError, ValueError, struct.error)
"""What a thread with something unforeseen in its registers or its memory brings about: calls and numbers that fail."""


@dataclass(slots=True, eq=False)
class DebugState:
    """
    What a thread's debug registers watch for us.

    ``programmed`` is what its address space had watchpoints for when they were set; ``slots`` are those that found a
    register. ``superseded`` are watchpoints that lost their slot while the trap of a hit was under way.
    """

    programmed: tuple[Watchpoint, ...] = ()
    slots: dict[int, Watchpoint] = field(default_factory=dict)
    superseded: dict[int, Watchpoint] = field(default_factory=dict)
    has_foreign: bool = False
    """Whether a debugger had left watchpoints when the thread was seized: later nobody but us can set any."""


@dataclass(slots=True, eq=False)
class PendingReturn:
    """
    A return that is still to come: to ``address``, with the stack pointer ``top`` after it.

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
    A wait that a stop has interrupted, and that is made once more until it is over.

    ``call``, ``place`` and ``stack`` tell its entry into the kernel from others. ``until`` is by ``time.monotonic``,
    ``result`` what it returns then, with zeros in the memory at ``cleared``.
    """

    call: int
    place: int
    stack: int
    until: float
    result: int
    cleared: tuple[tuple[int, int], ...] = ()
    is_asked: bool = False
    """Whether its thread has been asked to stop because the time is over."""

    def is_entered(self, registers: RegisterWords) -> bool:
        """Return whether a thread that is entering the kernel makes this call."""
        return (registers[Register.ORIG_RAX], registers[Register.RIP], registers[Register.RSP]) == (
            self.call,
            self.place,
            self.stack,
        )


class RestartedCall(NamedTuple):
    """A system call that the kernel makes once more after a stop: its instruction, its number, how it was left."""

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
    """The (effective, real) user ids when they were last looked up."""
    hit: ThreadHit = field(default_factory=ThreadHit)
    trapped: int = 0
    """The address of the breakpoint into which it has run, until that is handled (``Stopper``)."""
    is_left_to_us: bool = False
    """Whether it has come there from a handler in the process, which leaves the hit to the tracer."""
    parked: NativeStop | None = None
    """What its handler in the process has ended with, if the tracer is to see to that."""
    awaits_jumps: bool = False
    """Whether it is to stop before it runs on, until there are jumps in the code that it has mapped (``JumpWaits``)."""
    restarting: int = 0
    """The address of a system call instruction that the thread executes once more, because we interrupted it."""
    restarted: RestartedCall | None = None
    """The system call that it was in when it was last interrupted, which it may still be about to make once more."""
    is_outside: bool = False
    """Whether it is of a process in no program's scope, traced only as long as it shares memory with one that is."""
    exit_request: ExitRequest | None = None
    """What a handler ended with, if that is about the whole process."""
    debug: DebugState = field(default_factory=DebugState)
    wait: InterruptedWait | None = None
    """A wait with a timeout that a stop has interrupted, until it returns."""
    returns: list[PendingReturn] = field(default_factory=list)
    """The returns that are still to come of functions that were left by a tail call, the innermost last."""

    variables: dict[InsertedProgram, MutableSequence[int]] = field(default_factory=dict)
    """The variables that programs have for it, from their first use on."""

    def variables_for(self, program: InsertedProgram) -> MutableSequence[int]:
        """Return the variables that a program has for it."""
        program = program.principal or program
        if program not in self.variables:
            found = None
            if program.native is not None and program.thread_count:
                found = program.native.thread_variables(self.tid)
            self.variables[program] = [0] * program.thread_count if found is None else found
        return self.variables[program]

    def begin_program(self, space: AddressSpace) -> None:
        """Forget what was of the program before an exec; the thread runs in ``space`` now, with its registers clear."""
        self.space = space
        self.hit.end()
        self.hit, self.debug, self.returns, self.variables = ThreadHit(), DebugState(), [], {}
        self.rseq = self.trapped = self.restarting = 0
        self.is_left_to_us = self.awaits_jumps = False
        self.parked = None
        self.restarted = None
        self.uid = self.exit_request = None


class ThreadTable(dict[int, Thread]):
    """The traced threads, by thread id."""

    def enter(self, tid: int, pid: int, space: AddressSpace) -> Thread:
        """Enter a running thread."""
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
    """What the parts of the tracer share: the way to the client, the programs, and the threads."""

    connection: Connection
    programs: Programs
    threads: ThreadTable
