"""
BPF programs on the tracepoints of processes and signals, which update SCOPE and ENDING, and report faults.

They add the children of processes in SCOPE, and remove processes that end. Process ids are ids in the initial PID
namespace. A child is in scope before it first runs. ``Status.ALIVE`` counts a process until its last thread reaches
``sched_process_exit``; SCOPE has it until none of its threads can run. The offsets in ``task_struct`` are from the
kernel's BTF.

A command that has not called execve yet has a separate key (``awaiting_key``), so that its earlier hits do not count.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import NO_OVERWRITE, OVERWRITE, Alu, Atomic, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.map_layouts import (
    AWAITING,
    KIND_SHIFT,
    NOTE_HITS,
    PROBE_ENTRY_SIZE,
    REMOVED_BY,
    SCOPE_VALUE,
    TICKETS_SHIFT,
    CounterCell,
    CounterReading,
    Entry,
    MapName,
    ProbeField,
    ScopeField,
    Status,
)
from dprobes.engines.ebpf.kernel.bpf_links import attach_tracepoints, attach_typed_tracepoint
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptor, finished, load
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.engine_interface import Notice
from dprobes.errors import TargetError
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramRunner, ProgramType
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.lowering_request import CounterLayout
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
    from dprobes.engines.ebpf.kernel.kernel_features import Features, KernelTypes

__all__ = [
    "FaultWatch",
    "add_to_status",
    "begin_exit",
    "begin_fork",
    "delete",
    "follow_counters",
    "follow_processes",
    "follow_threads",
    "load_argument",
    "load_process",
    "look_up",
    "own_process",
    "point_to_stack",
    "update",
    "watch_signals",
]

# A thread executes much kernel code after ``sched_process_exit``: it closes files, sends SIGCHLD, and leaves its CPU
# for the last time. Then its parent reaps it, and its id may be reused. ``sched_process_free`` follows for each thread,
# maybe after its id was reused. So an id is stored with the address of the ending thread's task_struct, or of its
# process' signal_struct, which is not reused before that.


R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = (Register(number) for number in range(11))


def load_argument(asm: Assembler, dst: Register, number: int) -> None:
    """Load argument ``number`` (from 0) of the tracepoint; R1 must still be the context."""
    asm.load(dst, R1, 8 * number)


def point_to_stack(asm: Assembler, dst: Register, offset: int) -> None:
    """Set a register to the frame pointer R10 plus ``offset``."""
    asm.mov(dst, R10)
    asm.alu(Alu.ADD, dst, offset)


def look_up(asm: Assembler, name: MapName, key: int) -> None:
    """Load the address of a key's value to R0, or 0. ``key`` is the key's stack offset. Clobbers R1-R5."""
    asm.load_map(R1, name)
    point_to_stack(asm, R2, key)
    asm.call(Helper.MAP_LOOKUP_ELEM)


def update(asm: Assembler, name: MapName, key: int, value: int, flags: int) -> None:
    """Update a map; ``key`` and ``value`` are stack offsets. R0 is not 0 if that fails. Clobbers R1-R5."""
    asm.load_map(R1, name)
    point_to_stack(asm, R2, key)
    point_to_stack(asm, R3, value)
    asm.mov(R4, flags)
    asm.call(Helper.MAP_UPDATE_ELEM)


def delete(asm: Assembler, name: MapName, key: int) -> None:
    """Delete a key, at the stack offset ``key``, from a map; R0 is not 0 if it does not exist. Clobbers R1-R5."""
    asm.load_map(R1, name)
    point_to_stack(asm, R2, key)
    asm.call(Helper.MAP_DELETE_ELEM)


def load_process(asm: Assembler) -> None:
    """Load the id (tgid) of the current process to R0; clobbers R1-R5."""
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.alu(Alu.RSH, R0, 32)


def add_to_status(asm: Assembler, word: Status, number: int) -> None:
    """Add ``number`` to a word of the map STATUS atomically; clobbers R1 and R2."""
    asm.load_value(R1, MapName.STATUS, word)
    asm.mov(R2, number)
    asm.atomic(Atomic.ADD, R1, 0, R2)


def begin_fork(asm: Assembler, types: KernelTypes, end: Label) -> None:
    """
    Load the child's process id to R6 and the parent's to R4, at ``sched_process_fork(parent, child)``.

    Jump to ``end`` for a new thread. Clobbers R2 and R3.
    """
    tgid, pid = types.member_offset("task_struct", "tgid"), types.member_offset("task_struct", "pid")
    load_argument(asm, R2, 0)
    load_argument(asm, R3, 1)
    asm.load(R6, R3, tgid, Size.W)
    asm.load(R4, R3, pid, Size.W)
    asm.jump_if(Jump.JNE, R6, R4, end)  # a thread
    asm.load(R4, R2, tgid, Size.W)


def begin_exit(asm: Assembler, types: KernelTypes) -> None:
    """
    Load the process at ``sched_process_exit(task)`` or ``sched_process_free(task)``: its id to R6, its identity to R7.

    The identity is the address of the ``signal_struct`` that its threads share. R4 is its member ``live``: the number
    of threads that have not begun to end.
    """
    load_argument(asm, R2, 0)
    asm.load(R6, R2, types.member_offset("task_struct", "tgid"), Size.W)
    asm.load(R7, R2, types.member_offset("task_struct", "signal"))
    # do_exit() counts a thread out of "live" before it gets here; when several find 0, all of them do.
    asm.load(R4, R7, types.member_offset("signal_struct", "live"), Size.W)


_VALUE = -8 - SCOPE_VALUE.size
"""Offset on the stack of the value in SCOPE for a new process."""


def fork_program(types: KernelTypes, *, children: bool) -> Assembled:
    """
    Return the program on ``sched_process_fork(parent, child)``, which runs before the child does.

    With ``children``, it adds the child of a process in scope to the scope. It deletes the id of any other child,
    because the id may have belonged to a process for which ``free_program`` has not run yet.
    """
    asm = Assembler()
    end, full, outside = asm.label(), asm.label(), asm.label()
    begin_fork(asm, types, end)
    asm.store(R10, -4, R6, Size.W)
    if children:
        asm.store(R10, -8, R4, Size.W)
        look_up(asm, MapName.SCOPE, -8)
        asm.jump_if(Jump.JEQ, R0, 0, outside)
        _add_to_scope(asm, OVERWRITE)
        asm.jump_if(Jump.JNE, R0, 0, full)
        add_to_status(asm, Status.ALIVE, 1)
        asm.jump(end)
        asm.place(full)
        add_to_status(asm, Status.UNFOLLOWED, 1)
    asm.place(outside)
    delete(asm, MapName.SCOPE, -4)
    asm.place(end)
    return finished(asm)


def _add_to_scope(asm: Assembler, flags: int) -> None:
    """Add to SCOPE the process whose id is at R10 - 4. R0 is not 0 if SCOPE is full. Clobbers R1-R4."""
    for place in range(_VALUE, _VALUE + SCOPE_VALUE.size, 8):
        asm.store(R10, place, 0)
    update(asm, MapName.SCOPE, -4, _VALUE, flags)


def exec_program() -> Assembled:
    """Return the program on ``sched_process_exec``, which runs before the first instruction of the executed file."""
    asm = Assembler()
    end, full = asm.label(), asm.label()
    load_process(asm)
    asm.mov(R6, R0)
    _delete_awaiting(asm, R6, end)
    asm.store(R10, -4, R6, Size.W)
    _add_to_scope(asm, NO_OVERWRITE)
    asm.jump_if(Jump.JNE, R0, 0, full)
    asm.jump(end)
    asm.place(full)
    add_to_status(asm, Status.ALIVE, -1)
    add_to_status(asm, Status.UNFOLLOWED, 1)
    asm.place(end)
    return finished(asm)


def _delete_awaiting(asm: Assembler, process: Register, absent: Label) -> None:
    """Delete the awaiting key of the process whose id is in a register; jump to ``absent`` if there is none."""
    asm.mov(R1, process)
    asm.alu(Alu.OR, R1, AWAITING)
    asm.store(R10, -4, R1, Size.W)
    delete(asm, MapName.SCOPE, -4)
    asm.jump_if(Jump.JNE, R0, 0, absent)


def exit_program(types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_exit(task)``, which emits ``Entry.PROCESS`` for the last thread of a process.

    The process remains in scope (``free_program``). If the ring is full, the entry is lost, but ``Status.ALIVE`` is
    updated.
    """
    asm = Assembler()
    end, there, ended = asm.label(), asm.label(), asm.label()
    begin_exit(asm, types)
    asm.mov(R9, R4)
    asm.store(R10, -8, R6, Size.W)
    look_up(asm, MapName.SCOPE, -8)
    asm.jump_if(Jump.JNE, R0, 0, there)
    asm.jump_if(Jump.JNE, R9, 0, end)
    _delete_awaiting(asm, R6, end)
    asm.jump(ended)
    asm.place(there)
    asm.mov(R8, R0)
    asm.store(R8, ScopeField.IDENTITY, R7)
    asm.mov(R1, 1)
    asm.atomic(Atomic.ADD, R8, ScopeField.ENDING, R1, size=Size.W)
    asm.jump_if(Jump.JNE, R9, 0, end)
    asm.mov(R0, 0)  # of several last threads one finds 0
    asm.atomic(Atomic.CMPXCHG, R8, ScopeField.HAS_ENDED, R1, size=Size.W)
    asm.jump_if(Jump.JNE, R0, 0, end, wide=False)
    asm.place(ended)
    add_to_status(asm, Status.ALIVE, -1)
    # u32 kind | u32 0 | u32 process id, which is already written
    asm.store(R10, -16, Entry.PROCESS << KIND_SHIFT, Size.W)
    asm.store(R10, -12, 0, Size.W)
    asm.load_map(R1, MapName.RING)
    point_to_stack(asm, R2, -16)
    asm.mov(R3, 12)
    asm.mov(R4, RingOutput.FORCE_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.place(end)
    return finished(asm)


def free_program(types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_free(task)``, which removes a process from scope with its last thread.

    It counts threads, because the process may be reaped before its last thread has left the kernel. A thread that ended
    before the process came into scope was not counted. In this case, hits in the last context switch of another thread
    may be lost.
    """
    asm = Assembler()
    end = asm.label()
    begin_exit(asm, types)
    asm.store(R10, -4, R6, Size.W)
    look_up(asm, MapName.SCOPE, -4)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R1, R0, ScopeField.IDENTITY)
    asm.jump_if(Jump.JNE, R1, R7, end)  # the id is another process', or no thread of this one was counted
    asm.mov(R8, -1)
    asm.atomic(Atomic.ADD, R0, ScopeField.ENDING, R8, size=Size.W, fetch=True)
    asm.load(R4, R7, types.member_offset("signal_struct", "nr_threads"), Size.W)
    asm.jump_if(Jump.JNE, R4, 0, end)  # there are threads whose ids were not released (release_task)
    asm.jump_if(Jump.JSGT, R8, 1, end, wide=False)
    delete(asm, MapName.SCOPE, -4)
    asm.place(end)
    return finished(asm)


def own_process() -> int:
    """Return the id of this process in the initial PID namespace, as BPF programs see it."""
    asm = Assembler()
    load_process(asm)
    asm.exit()
    program = load(asm.assemble(), {}, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE, name="own_process")
    with Descriptor(program):
        return ProgramRunner(program, bytearray(8)).run()


def follow_processes(
    maps: Mapping[MapName, int], types: KernelTypes, *, children: bool, awaits_exec: bool = False
) -> Descriptors:
    """
    Attach the BPF programs that keep SCOPE up to date at fork, exec and exit, until the result is closed.

    With ``children``, the children of processes in scope are added. With ``awaits_exec``, a process whose
    ``awaiting_key`` is in SCOPE is added when it calls execve.

    The caller adds the first process: set ``Status.ALIVE`` to 1, add the key, then check whether the process still
    exists. ``maps`` must have STATUS, SCOPE and RING.
    """
    programs = {
        "sched_process_free": free_program(types),
        "sched_process_exit": exit_program(types),
        "sched_process_fork": fork_program(types, children=children),
    }
    if awaits_exec:
        programs["sched_process_exec"] = exec_program()
    return attach_tracepoints(programs, maps, types)


if TYPE_CHECKING:
    Known = AbstractSet[MapName]

_KEY, _IDENTITY = -8, -16


def follow_threads(maps: Mapping[MapName, int], types: KernelTypes) -> Descriptors:
    """
    Attach BPF programs that delete the data about threads and processes when they end, until the result is closed.

    These are the data in THREAD_VARIABLES and SPACES, if the maps exist. A thread's variables are deleted at execve. At
    its end they are deleted after it has left its CPU for the last time and its id was released, but before another
    thread with the same id first runs. A process gets another number in SPACES at each execve, so returns from calls
    before the execve are not seen.
    """
    known = {name for name in (MapName.THREAD_VARIABLES, MapName.SPACES) if name in maps}
    programs = {
        "sched_process_fork": _thread_fork_program(known, types),
        "sched_process_exec": _thread_exec_program(known),
    }
    if MapName.THREAD_VARIABLES in known:
        programs |= {
            "sched_process_free": _thread_free_program(types),
            "sched_process_exit": _thread_exit_program(),
        }
    return attach_tracepoints(programs, maps, types)


def _thread_exit_program() -> Assembled:
    """
    Return the program on ``sched_process_exit(task)``, which the ending thread runs.

    If ENDING is full, the thread loses its variables at once.
    """
    asm = Assembler()
    end = asm.label()
    load_argument(asm, R6, 0)
    _load_thread(asm)
    asm.store(R10, _KEY, R0)
    asm.store(R10, _IDENTITY, R6)
    update(asm, MapName.ENDING, _KEY, _IDENTITY, OVERWRITE)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R0, R10, _KEY)
    _forget(asm, {MapName.THREAD_VARIABLES})
    asm.place(end)
    return finished(asm)


def _thread_free_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_free(task)``, which deletes the data of an ended thread."""
    asm = Assembler()
    end = asm.label()
    load_argument(asm, R6, 0)
    asm.load(R0, R6, types.member_offset("task_struct", "pid"), Size.W)
    asm.store(R10, _KEY, R0)
    look_up(asm, MapName.ENDING, _KEY)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R1, R0, 0)
    asm.jump_if(Jump.JNE, R1, R6, end)
    asm.load(R0, R10, _KEY)
    _forget(asm, {MapName.THREAD_VARIABLES, MapName.ENDING})
    asm.place(end)
    return finished(asm)


def _thread_fork_program(known: Known, types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_fork(parent, child)``, which deletes data of a former thread with the id.

    It runs before the new thread does.
    """
    asm = Assembler()
    load_argument(asm, R2, 1)
    asm.load(R0, R2, types.member_offset("task_struct", "pid"), Size.W)
    _forget(asm, known | {MapName.ENDING} if MapName.THREAD_VARIABLES in known else known)
    return finished(asm)


def _thread_exec_program(known: Known) -> Assembled:
    """
    Return the program on ``sched_process_exec(task, old_pid, ...)``, which deletes the data under both thread ids.

    The task has the thread group leader's id now.
    """
    asm = Assembler()
    load_argument(asm, R6, 1)
    _load_thread(asm)
    _forget(asm, known)
    asm.mov(R0, R6, wide=False)
    _forget(asm, known)
    return finished(asm)


def _load_thread(asm: Assembler) -> None:
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.mov(R0, R0, wide=False)


def _forget(asm: Assembler, known: Known) -> None:
    """Delete the data about the thread, and the process, with the id in R0 from the maps ``known``. Clobbers R0-R5."""
    asm.store(R10, _KEY, R0)
    for name in (MapName.ENDING, MapName.THREAD_VARIABLES, MapName.SPACES):
        if name in known:
            delete(asm, name, _KEY)  # of which a key in SPACES is the lower half


_READING = -32
"""Stack offset of a reading of an event (``CounterReading``)."""


def follow_counters(maps: Mapping[MapName, int], types: KernelTypes, counters: CounterLayout) -> Descriptors:
    """
    Attach BPF programs that maintain the cells in COUNTERS, one for each thread and counter.

    They run until the result is closed. A cell is updated when a CPU switches to another thread. It is deleted when its
    thread executes a program or ends, and once more when another thread gets its id, before that thread first runs.
    """
    cells = range(len(counters.cells))
    programs = {
        "sched_switch": _switch_program(types, counters),
        "sched_process_fork": _forget_cells(cells, lambda asm: _load_child(asm, types)),
        "sched_process_exec": _forget_cells(cells, _load_thread),
        "sched_process_exit": _forget_cells(cells, _load_thread),
    }
    return attach_tracepoints(programs, maps, types)


def _load_child(asm: Assembler, types: KernelTypes) -> None:
    """Load the id of the new thread at ``sched_process_fork(parent, child)`` to R0; clobbers R2."""
    load_argument(asm, R2, 1)
    asm.load(R0, R2, types.member_offset("task_struct", "pid"), Size.W)


def _forget_cells(cells: Iterable[int], load_id: Callable[[Assembler], None]) -> Assembled:
    """Return the program that deletes the cells of the thread whose id ``load_id`` loads to R0."""
    asm = Assembler()
    load_id(asm)
    asm.mov(R6, R0)
    for cell in cells:
        _store_counter_key(asm, cell)
        delete(asm, MapName.COUNTERS, _KEY)
    return finished(asm)


def _store_counter_key(asm: Assembler, cell: int) -> None:
    """Store the key of a cell of the thread in R6 on the stack (``thread_counters.load_key``); clobbers R0 and R1."""
    from dprobes.bpf.lower.hosts.thread_counters import load_key

    asm.mov(R0, R6)
    load_key(asm, cell)
    asm.store(R10, _KEY, R0)


def _switch_program(types: KernelTypes, counters: CounterLayout) -> Assembled:
    """
    Return the program on ``sched_switch(preempt, prev, next, ...)``, which updates the counters of both threads.

    A thread that has read no counter costs a look-up for each counter.
    """
    asm, pid = Assembler(), types.member_offset("task_struct", "pid")
    load_argument(asm, R8, 2)
    load_argument(asm, R2, 1)
    for is_end in (True, False):
        done = asm.label()
        asm.load(R6, R2 if is_end else R8, pid, Size.W)
        asm.jump_if(Jump.JEQ, R6, 0, done)  # the idle thread
        for cell, number in enumerate(counters.cells):
            _update_cell(asm, cell, has_event=counters.has_event(number), is_end=is_end)
        asm.place(done)
    return finished(asm)


def _update_cell(asm: Assembler, cell: int, *, has_event: bool, is_end: bool) -> None:
    """
    Write code that starts or stops counting for the thread in R6 on this CPU, if the thread has the cell.

    ``cell`` is the index of the counter. If ``has_event`` is True, its value is that of a perf event, otherwise a time.
    With ``is_end``, the code stops counting. Clobbers R0-R5 and R7.
    """
    from dprobes.bpf.lower.hosts.thread_counters import read_event

    unread, done = asm.label(), asm.label()
    _store_counter_key(asm, cell)
    look_up(asm, MapName.COUNTERS, _KEY)
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.mov(R7, R0)
    if has_event:
        read_event(asm, cell, (R10, _READING), unread)
        asm.load(R0, R10, _READING + CounterReading.VALUE)
    else:
        asm.call(Helper.KTIME_GET_NS)
    if is_end:
        asm.load(R1, R7, CounterCell.SINCE)
        asm.alu(Alu.SUB, R0, R1)
        asm.load(R1, R7, CounterCell.TOTAL)
        asm.alu(Alu.ADD, R0, R1)
        asm.store(R7, CounterCell.TOTAL, R0)
    else:
        asm.store(R7, CounterCell.SINCE, R0)
    if has_event:
        asm.jump(done)
        asm.place(unread)
        asm.mov(R1, 1)
        asm.store(R7, CounterCell.IS_BROKEN, R1)
    asm.place(done)


FAULTS = frozenset({signal.SIGILL, signal.SIGTRAP, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})
"""Signals for faults of instructions."""

_SIGNAL_ENTRY = -24
"""Offset of the entry on the stack: u32 kind, u32 thread id, u64 ip, u32 signal and tickets, u32 code."""


def signal_program(types: KernelTypes, *, in_scope: bool, casts: bool = False, entries: int | None = None) -> Assembled:
    """
    Return the program on ``signal_deliver(signal, info, action)``. With ``in_scope``, only threads in SCOPE count.

    The program writes ``Entry.SIGNAL`` when a thread is about to receive a signal for a fault, which means that the
    instruction has not completed. If a uprobe's instruction was executed out of line, the kernel has reset the
    instruction pointer to the probepoint (``arch_uprobe_abort_xol``). A fault that the kernel resolves sends no signal.
    Signals for which the ring has no room are counted in ``Status.UNSEEN``.

    If hits have notes (NOTES), by which their tickets are returned, ``entries`` is the number of entries of the probe
    table, a power of two; otherwise it is None. With ``casts``, the program uses ``bpf_rdonly_cast``, for kernels whose
    verifier does not treat ``info`` as a pointer.
    """
    code, ip = types.member_offset("kernel_siginfo", "si_code"), types.member_offset("pt_regs", "ip")
    asm = Assembler()
    end = asm.label()
    asm.load(R6, R1, 0)
    asm.load(R8, R1, 8)
    asm.mov(R3, 1)
    asm.alu(Alu.LSH, R3, R6)
    mask = sum(1 << number for number in FAULTS)
    asm.alu(Alu.AND, R3, mask)
    asm.jump_if(Jump.JEQ, R3, 0, end)
    # A signal that a process sends has a code of at most 0 (SI_USER, SI_TKILL), a fault a positive one.
    if casts:
        asm.mov(R1, R8)
        asm.mov(R2, types.find(Kind.STRUCT, "kernel_siginfo"))
        asm.call_kfunc(types.find(Kind.FUNC, "bpf_rdonly_cast"))
        asm.mov(R8, R0)
    asm.load(R7, R8, code, Size.W)
    asm.jump_if(Jump.JSLE, R7, 0, end, wide=False)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.store(R10, _SIGNAL_ENTRY + 4, R0, Size.W)
    if in_scope:
        asm.alu(Alu.RSH, R0, 32)
        asm.store(R10, _SIGNAL_ENTRY, R0, Size.W)
        look_up(asm, MapName.SCOPE, _SIGNAL_ENTRY)
        asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.store(R10, _SIGNAL_ENTRY, Entry.SIGNAL << KIND_SHIFT, Size.W)
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    asm.mov(R1, R0)
    asm.call(Helper.TASK_PT_REGS)
    asm.load(R0, R0, ip)
    asm.store(R10, _SIGNAL_ENTRY + 8, R0)
    asm.store(R10, _SIGNAL_ENTRY + 16, R6, Size.W)
    asm.store(R10, _SIGNAL_ENTRY + 20, R7, Size.W)
    if entries is not None:
        _give_back(asm, entries)
    asm.load_map(R1, MapName.RING)
    point_to_stack(asm, R2, _SIGNAL_ENTRY)
    asm.mov(R3, -_SIGNAL_ENTRY)
    asm.mov(R4, RingOutput.NO_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    add_to_status(asm, Status.UNSEEN, 1)
    asm.place(end)
    return finished(asm)


def _give_back(asm: Assembler, entries: int) -> None:
    """
    Write code that returns the tickets of the thread's last hit, if it was at the instruction pointer in the entry.

    Clobbers R0-R5 and R8.
    """
    done = asm.label()
    look_up(asm, MapName.NOTES, _SIGNAL_ENTRY + 4)
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.mov(R8, R0)
    for pair in range(0, 16 * NOTE_HITS, 16):
        other = asm.label()
        asm.load(R1, R8, pair)
        asm.load(R2, R10, _SIGNAL_ENTRY + 8)
        asm.jump_if(Jump.JNE, R1, R2, other)
        asm.store(R8, pair, 0)
        asm.load(R2, R10, _SIGNAL_ENTRY + 16, Size.W)
        asm.alu(Alu.ADD, R2, 1 << TICKETS_SHIFT)
        asm.store(R10, _SIGNAL_ENTRY + 16, R2, Size.W)
        asm.load(R2, R8, pair + 8)
        asm.alu(Alu.AND, R2, entries - 1)
        asm.alu(Alu.LSH, R2, PROBE_ENTRY_SIZE.bit_length() - 1)
        asm.load_value(R1, MapName.PROBES)
        asm.alu(Alu.ADD, R1, R2)
        # Without a breakpoint, nothing clears the note of the previous hit.
        asm.load(R2, R1, ProbeField.DISABLED, Size.W)
        asm.jump_if(Jump.JEQ, R2, 1, other)
        asm.mov(R2, -1)
        asm.atomic(Atomic.ADD, R1, ProbeField.HITS, R2)
        asm.load(R0, R10, _SIGNAL_ENTRY + 4, Size.W)
        asm.alu(Alu.OR, R0, REMOVED_BY - (1 << 32), wide=False)
        asm.mov(R2, 0)
        asm.atomic(Atomic.CMPXCHG, R1, ProbeField.DISABLED, R2, size=Size.W)
        asm.place(other)
    asm.place(done)


def watch_signals(
    maps: Mapping[MapName, int], types: KernelTypes, *, in_scope: bool, entries: int | None = None
) -> int:
    """
    Attach the program that reports fault signals (``signal_program``) to ``signal_deliver``.

    Return the descriptor of its link, which the caller closes. With ``in_scope``, only threads in SCOPE count.
    ``entries`` is the size of the probe table if hits have notes, otherwise None. ``maps`` must have STATUS and RING,
    with ``in_scope`` also SCOPE, and with ``entries`` also NOTES and PROBES. Raise
    OSError if the kernel does not permit the program, ``TargetError`` if its BTF lacks the structures.
    """

    def attach(*, casts: bool) -> int:
        program = signal_program(types, in_scope=in_scope, casts=casts, entries=entries)
        return attach_typed_tracepoint("signal_deliver", program, maps, types)

    try:
        return attach(casts=False)
    except PermissionError:
        # Some kernels take the argument for a number, because it may be one that stands for no information. This was
        # seen with 6.12.117 of Debian 12 (the verifier says "marking pointer arg1 as scalar as it may encode error").
        return attach(casts=True)


_CONSEQUENCE = "records are emitted also where the instruction faults"


class FaultWatch:
    """
    Watch on the faults of a run. It begins when a probepoint first needs it.

    ``in_scope`` and ``entries`` are those of ``watch_signals``.
    """

    def __init__(self, maps: Mapping[MapName, int], entries: int | None, features: Features, *, in_scope: bool) -> None:
        self._maps = maps
        self._entries = entries
        self._features = features
        self._in_scope = in_scope
        self._has_begun = False
        self._link = Descriptor(-1)

    def begin(self) -> Notice | None:
        """
        Attach the program of ``watch_signals``, unless it is attached.

        Return a notice if the kernel does not permit it, otherwise None.
        """
        if self._has_begun:
            return None
        self._has_begun = True
        if Feature.TYPED_TRACEPOINT not in self._features:
            return Notice(f"this kernel shows no type information (BTF): {_CONSEQUENCE}")
        types, in_scope, entries = self._features.types, self._in_scope, self._entries
        try:
            self._link.fd = watch_signals(self._maps, types, in_scope=in_scope, entries=entries)
        except (OSError, TargetError):
            return Notice(f"this kernel does not let programs look at signals: {_CONSEQUENCE}")
        return None

    def close(self) -> None:
        """Detach the program that reports fault signals."""
        self._link.close()
