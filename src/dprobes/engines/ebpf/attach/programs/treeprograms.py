"""
Programs that keep SCOPE: on the kernel's tracepoints they add the children of processes in it, and remove what ends.

Process ids are of the initial namespace. A child is in scope before it first runs. The members of ``task_struct`` are
found in the kernel's type information.

A process that has not executed its program yet has a key of its own until it does (``awaiting_key``), so that none of
its hits before count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.isa import NO_OVERWRITE, Alu, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.layout import AWAITING, KIND_SHIFT, Entry, MapName, Status
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

__all__ = ["exec_program", "exit_program", "follow_processes", "fork_program", "own_process"]

R0, R1, R2, R3, R4 = (Register(number) for number in range(5))
R6, R7, R10 = Register.R6, Register.R7, Register.R10


def fork_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_fork(parent, child)``, which runs before the child does."""
    asm = Assembler()
    end, full = asm.label(), asm.label()
    begin_fork(asm, types, end)
    asm.store(R10, -4, R4, Size.W)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.store(R10, -8, R6, Size.W)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -8)
    point_to_stack(asm, R3, -4)
    asm.mov(R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, full)
    add_to_status(asm, Status.ALIVE, 1)
    asm.jump(end)
    asm.place(full)
    add_to_status(asm, Status.UNFOLLOWED, 1)
    asm.place(end)
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def exec_program() -> Assembled:
    """Return the program on ``sched_process_exec``, which runs before the first instruction of the new program."""
    asm = Assembler()
    end, full = asm.label(), asm.label()
    load_process(asm)
    asm.mov(R6, R0)
    _delete_awaiting(asm, R6, end)
    asm.store(R10, -4, R6, Size.W)
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    point_to_stack(asm, R3, -4)
    asm.mov(R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
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
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -4)
    asm.call(Helper.MAP_DELETE_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, absent)


def exit_program(types: KernelTypes) -> Assembled:
    """
    Return the program on ``sched_process_exit(task)``, which emits ``Entry.PROCESS`` for the last thread of a process.

    Where the ring has no room the entry is lost; ``Status.ALIVE`` is right nevertheless.
    """
    asm = Assembler()
    end, there = asm.label(), asm.label()
    begin_exit(asm, types, end)
    asm.store(R10, -8, R6, Size.W)  # of several last threads one can delete the key
    asm.load_map(R1, MapName.SCOPE)
    point_to_stack(asm, R2, -8)
    asm.call(Helper.MAP_DELETE_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, there)
    _delete_awaiting(asm, R6, end)
    asm.place(there)
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
        links.add(attach_typed_tracepoint("sched_process_exit", exit_program(types), maps, types))
        if children:
            links.add(attach_typed_tracepoint("sched_process_fork", fork_program(types), maps, types))
        if awaits_exec:
            links.add(attach_typed_tracepoint("sched_process_exec", exec_program(), maps, types))
    except BaseException:
        links.close()
        raise
    return links
