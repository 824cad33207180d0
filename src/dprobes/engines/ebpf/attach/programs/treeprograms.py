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

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.isa import NO_OVERWRITE, OVERWRITE, Alu, Atomic, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.layout import AWAITING, KIND_SHIFT, SCOPE_VALUE, Entry, MapName, ScopeField, Status
from dprobes.engines.ebpf.attach.programs.tracepoints import (
    add_to_status,
    begin_exit,
    begin_fork,
    load_process,
    point_to_stack,
)
from dprobes.engines.ebpf.kernel.descriptors import Descriptor, Descriptors
from dprobes.engines.ebpf.kernel.links import attach_typed_tracepoint
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.linux.bpfcalls import ProgramFlag, ProgramRunner, ProgramType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.asm.assembler import Label
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = ["exec_program", "exit_program", "follow_processes", "fork_program", "free_program", "own_process"]

R0, R1, R2, R3, R4 = (Register(number) for number in range(5))
R6, R7, R8, R9, R10 = (Register(number) for number in range(6, 11))

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
