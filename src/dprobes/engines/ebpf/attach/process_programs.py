"""
Programs that keep SCOPE: on the kernel's tracepoints they add the children of processes in it, and remove what ends.

Process ids are of the initial namespace. A child is in scope before it first runs. A process has ended for
``Status.ALIVE`` when its last thread gets to ``sched_process_exit``; it is in scope until none of its threads can run
any more. The members of ``task_struct`` are found in the kernel's type information.

A process that has not executed its program yet has a key of its own until it does (``awaiting_key``), so that none of
its hits before count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import NO_OVERWRITE, OVERWRITE, Alu, Atomic, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.map_layouts import AWAITING, KIND_SHIFT, SCOPE_VALUE, Entry, MapName, ScopeField, Status
from dprobes.engines.ebpf.kernel.bpf_links import attach_typed_tracepoint
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptor, Descriptors, load
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramRunner, ProgramType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.engines.ebpf.kernel.kernel_types import KernelTypes

__all__ = [
    "add_to_status",
    "begin_exit",
    "begin_fork",
    "follow_processes",
    "follow_threads",
    "load_argument",
    "load_process",
    "own_process",
    "point_to_stack",
]

# The arguments of the kernel's tracepoints, and process ids, for programs that follow processes.
#
# A thread executes much of the kernel's code after ``sched_process_exit``: it closes files, sends SIGCHLD, and leaves
# its CPU for the last time. Then its parent waits for it, and its number may be given to another one.
# ``sched_process_free`` comes after all of that, for each thread, but may come when its number has been given away. So
# whatever is forgotten there is noted with the address of what ends, which nothing else can have until then.


R0, R1, R2, R3, R4, R6, R7, R10 = (Register(number) for number in (0, 1, 2, 3, 4, 6, 7, 10))


def load_argument(asm: Assembler, dst: Register, number: int) -> None:
    """Load an argument of the tracepoint; R1 is still the context."""
    asm.load(dst, R1, 8 * number)


def point_to_stack(asm: Assembler, dst: Register, offset: int) -> None:
    """Let a register point to the program's stack."""
    asm.mov(dst, R10)
    asm.alu(Alu.ADD, dst, offset)


def load_process(asm: Assembler) -> None:
    """Load the id of the running process to R0; takes R1-R5."""
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.alu(Alu.RSH, R0, 32)


def add_to_status(asm: Assembler, word: Status, number: int) -> None:
    """Add to a word of STATUS; takes R1 and R2."""
    asm.load_value(R1, MapName.STATUS, word)
    asm.mov(R2, number)
    asm.atomic(Atomic.ADD, R1, 0, R2)


def begin_fork(asm: Assembler, types: KernelTypes, end: Label) -> None:
    """Load the id of the new process to R6, and that of its parent to R4, at ``sched_process_fork(parent, child)``."""
    tgid, pid = types.member_offset("task_struct", "tgid"), types.member_offset("task_struct", "pid")
    load_argument(asm, R2, 0)
    load_argument(asm, R3, 1)
    asm.load(R6, R3, tgid, Size.W)
    asm.load(R4, R3, pid, Size.W)
    asm.jump_if(Jump.JNE, R6, R4, end)  # a thread
    asm.load(R4, R2, tgid, Size.W)


def begin_exit(asm: Assembler, types: KernelTypes) -> None:
    """
    At ``sched_process_exit(task)`` or ``sched_process_free(task)`` load the process: its id to R6, what it is to R7.

    The latter is the address of what its threads have in common. R4 is how many of them have not begun to end.
    """
    load_argument(asm, R2, 0)
    asm.load(R6, R2, types.member_offset("task_struct", "tgid"), Size.W)
    asm.load(R7, R2, types.member_offset("task_struct", "signal"))
    # do_exit() counts a thread out of "live" before it gets here; when several find 0, all of them do.
    asm.load(R4, R7, types.member_offset("signal_struct", "live"), Size.W)


R8, R9 = Register.R8, Register.R9

_VALUE = -8 - SCOPE_VALUE.size
"""Where on the stack the value of a new process is made."""


def fork_program(types: KernelTypes, *, children: bool) -> Assembled:
    """
    Return the program on ``sched_process_fork(parent, child)``, which runs before the child does.

    With ``children`` the child of a process in scope is in scope. Any other one is not, though its number may be that
    of a process whose end ``free_program`` has not seen yet.
    """
    asm = Assembler()
    end, full, outside = asm.label(), asm.label(), asm.label()
    begin_fork(asm, types, end)
    asm.store(R10, -4, R6, Size.W)
    if children:
        asm.store(R10, -8, R4, Size.W)
        asm.load_map(R1, MapName.SCOPE)
        point_to_stack(asm, R2, -8)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, R0, 0, outside)
        _add_to_scope(asm, OVERWRITE)
        asm.jump_if(Jump.JNE, R0, 0, full)
        add_to_status(asm, Status.ALIVE, 1)
        asm.jump(end)
        asm.place(full)
        add_to_status(asm, Status.UNFOLLOWED, 1)
    asm.place(outside)
    _delete_from_scope(asm)
    asm.place(end)
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def _add_to_scope(asm: Assembler, flags: int) -> None:
    """Add the process whose id is at -4 of the stack; R0 is not 0 if there is no room. Takes R1-R4."""
    for place in range(_VALUE, _VALUE + SCOPE_VALUE.size, 8):
        asm.store(R10, place, 0)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    point_to_stack(asm, R3, _VALUE)
    asm.mov(R4, flags)
    asm.call(Helper.MAP_UPDATE_ELEM)


def _delete_from_scope(asm: Assembler) -> None:
    """Delete the key at -4 of the stack; R0 is not 0 if there is none. Takes R1-R5."""
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    asm.call(Helper.MAP_DELETE_ELEM)


def exec_program() -> Assembled:
    """Return the program on ``sched_process_exec``, which runs before the first instruction of the new program."""
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
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def _delete_awaiting(asm: Assembler, process: Register, absent: Label) -> None:
    """Delete the key of a process that has not executed its program; go to ``absent`` if there is none."""
    asm.mov(R1, process)
    asm.alu(Alu.OR, R1, AWAITING)
    asm.store(R10, -4, R1, Size.W)
    _delete_from_scope(asm)
    asm.jump_if(Jump.JNE, R0, 0, absent)


def exit_program(types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_exit(task)``, which emits ``Entry.PROCESS`` for the last thread of a process.

    The process stays in scope, see ``free_program``. Where the ring has no room the entry is lost; ``Status.ALIVE`` is
    right nevertheless.
    """
    asm = Assembler()
    end, there, ended = asm.label(), asm.label(), asm.label()
    begin_exit(asm, types)
    asm.mov(R9, R4)
    asm.store(R10, -8, R6, Size.W)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -8)
    asm.call(Helper.MAP_LOOKUP_ELEM)
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
    # u32 kind | u32 0 | u32 process id, which is there already
    asm.store(R10, -16, Entry.PROCESS << KIND_SHIFT, Size.W)
    asm.store(R10, -12, 0, Size.W)
    asm.load_map(R1, MapName.RING)
    point_to_stack(asm, R2, -16)
    asm.mov(R3, 12)
    asm.mov(R4, RingOutput.FORCE_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.place(end)
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def free_program(types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_free(task)``, which takes a process out of scope with its last thread.

    It counts threads, because the last one to end may be on its way when the process has been waited for. One that had
    come to its end before the process came into scope was not counted: then the last switch of another one may be lost.
    """
    asm = Assembler()
    end = asm.label()
    begin_exit(asm, types)
    asm.store(R10, -4, R6, Size.W)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R1, R0, ScopeField.IDENTITY)
    asm.jump_if(Jump.JNE, R1, R7, end)  # the number is that of another process, or nothing of this one was counted
    asm.mov(R8, -1)
    asm.atomic(Atomic.ADD, R0, ScopeField.ENDING, R8, size=Size.W, fetch=True)
    asm.load(R4, R7, types.member_offset("signal_struct", "nr_threads"), Size.W)
    asm.jump_if(Jump.JNE, R4, 0, end)  # there are threads whose numbers were not given back (release_task)
    asm.jump_if(Jump.JSGT, R8, 1, end, wide=False)
    _delete_from_scope(asm)
    asm.place(end)
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def own_process() -> int:
    """Return the id of this process in the initial namespace, as programs see it."""
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
    Keep SCOPE until the result is closed.

    With ``children`` those of processes in scope are in scope, too, and with ``awaits_exec`` processes whose
    ``awaiting_key`` is in it when they execute a program.

    The first process is for the caller to put in: set ``Status.ALIVE`` to 1, then add the key, then see whether the
    process is still there. Needs STATUS, SCOPE and RING.
    """
    links = Descriptors()
    try:
        links.add(attach_typed_tracepoint("sched_process_free", free_program(types), maps, types))
        links.add(attach_typed_tracepoint("sched_process_exit", exit_program(types), maps, types))
        fork = fork_program(types, children=children)
        links.add(attach_typed_tracepoint("sched_process_fork", fork, maps, types))
        if awaits_exec:
            links.add(attach_typed_tracepoint("sched_process_exec", exec_program(), maps, types))
    except BaseException:
        links.close()
        raise
    return links


# Programs that let what is known of threads and processes go with these, on the kernel's tracepoints.
#
# A thread loses its variables when it executes a program, and when it has left its CPU for the last time and its number
# was given back; or else when another thread gets that number, before that first runs. A process has another space
# (``MapName.SPACES``) with each program that it executes, so that nobody returns from its earlier calls.


if TYPE_CHECKING:
    Known = AbstractSet[MapName]

_KEY, _IDENTITY = -8, -16


def follow_threads(maps: Mapping[MapName, int], types: KernelTypes) -> Descriptors:
    """Do so until the result is closed, with those of THREAD_VARIABLES and SPACES that there are."""
    known = {name for name in (MapName.THREAD_VARIABLES, MapName.SPACES) if name in maps}
    links = Descriptors()
    try:
        programs = {"sched_process_fork": _fork_program(known, types), "sched_process_exec": _exec_program(known)}
        if MapName.THREAD_VARIABLES in known:
            programs |= {"sched_process_free": _free_program(types), "sched_process_exit": _exit_program()}
        for tracepoint, program in programs.items():
            links.add(attach_typed_tracepoint(tracepoint, program, maps, types))
    except BaseException:
        links.close()
        raise
    return links


def _exit_program() -> Assembled:
    """
    Return the program on ``sched_process_exit(task)``, which the ending thread runs.

    Where ENDING has no room for it, the thread loses its variables at once.
    """
    asm = Assembler()
    end = asm.label()
    load_argument(asm, R6, 0)
    _load_thread(asm)
    asm.store(R10, _KEY, R0)
    asm.store(R10, _IDENTITY, R6)
    asm.load_map(R1, MapName.ENDING)
    point_to_stack(asm, R2, _KEY)
    point_to_stack(asm, R3, _IDENTITY)
    asm.mov(R4, OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R0, R10, _KEY)
    _forget(asm, {MapName.THREAD_VARIABLES})
    asm.place(end)
    return _ended(asm)


def _free_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_free(task)``, which runs when the thread cannot any more."""
    asm = Assembler()
    end = asm.label()
    load_argument(asm, R6, 0)
    asm.load(R0, R6, types.member_offset("task_struct", "pid"), Size.W)
    asm.store(R10, _KEY, R0)
    asm.load_map(R1, MapName.ENDING)
    point_to_stack(asm, R2, _KEY)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.load(R1, R0, 0)
    asm.jump_if(Jump.JNE, R1, R6, end)
    asm.load(R0, R10, _KEY)
    _forget(asm, {MapName.THREAD_VARIABLES, MapName.ENDING})
    asm.place(end)
    return _ended(asm)


def _fork_program(known: Known, types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_fork(parent, child)``, which runs before the new thread does."""
    asm = Assembler()
    load_argument(asm, R2, 1)
    asm.load(R0, R2, types.member_offset("task_struct", "pid"), Size.W)
    _forget(asm, known | {MapName.ENDING} if MapName.THREAD_VARIABLES in known else known)
    return _ended(asm)


def _exec_program(known: Known) -> Assembled:
    """Return the program on ``sched_process_exec(task, old_pid, ...)``; the first thread's number is the task's now."""
    asm = Assembler()
    load_argument(asm, R6, 1)
    _load_thread(asm)
    _forget(asm, known)
    asm.mov(R0, R6, wide=False)
    _forget(asm, known)
    return _ended(asm)


def _load_thread(asm: Assembler) -> None:
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.mov(R0, R0, wide=False)


def _forget(asm: Assembler, known: Known) -> None:
    """Delete what is known of the thread in R0, and of the process with that number."""
    asm.store(R10, _KEY, R0)
    for name in (MapName.ENDING, MapName.THREAD_VARIABLES, MapName.SPACES):
        if name in known:
            asm.load_map(R1, name)
            point_to_stack(asm, R2, _KEY)  # of which a key in SPACES is the lower half
            asm.call(Helper.MAP_DELETE_ELEM)


def _ended(asm: Assembler) -> Assembled:
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()
