"""
Programs that keep MAPPERS: they notice a watched module's first instruction in a process, and what becomes of that.

Where the module's place is a new one, its watchpoints have to be attached there first. So the program tells user space
of it (ARRIVALS) and lets the process wait in the kernel, for a limited time: nobody else can see that it waits. What a
process starts with fork(2) has the module where it was; an exec takes it away.

A program cannot sleep until somebody wakes it up. So it asks again and again; where it may sleep at all, it gives way
to others each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.isa import LOOPS_MAX, NO_OVERWRITE, Alu, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.layout import ARRIVAL, MapName, Status
from dprobes.bpf.lower.hits.scopefilter import write_filter
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.hosts.vma import PagingQuestion
from dprobes.engines.ebpf.attach.programs.tracepoints import (
    add_to_status,
    begin_exit,
    begin_fork,
    load_argument,
    load_process,
    point_to_stack,
)

if TYPE_CHECKING:
    from dprobes.bpf.lower.request import Abilities, Filter
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = ["WAITING_TIME", "arrival_program", "departure_program", "exec_program", "fork_program", "leave_program"]

R0, R1, R2, R3, R4, R5 = (Register(number) for number in range(6))
R6, R7, R10 = Register.R6, Register.R7, Register.R10

WAITING_TIME = 0.5
"""Seconds that a process waits for its watchpoints at most."""

_NANOSECONDS = 1_000_000_000

_KEY = -4
_ENTRY = -24
"""Where on the stack the entry of ARRIVALS is made: u32 process id, u64 load bias."""
_BIAS = _ENTRY + 8
_SINCE = -32
_STACK = -40
"""An address that the process can read: its stack pointer."""


def _end(asm: Assembler) -> Assembled:
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def arrival_program(scope: Filter, abilities: Abilities) -> Assembled:
    """Return the program at the module's first instructions; its cookie is the link address of each."""
    asm = Assembler()
    out, new, mapped, full, waiting = (asm.label() for _ in range(5))
    asm.mov(R6, R1)
    write_filter(asm, scope, lambda: load_process(asm), out)
    asm.mov(R1, R6)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.load(R7, R6, REGISTER_OFFSETS["eip"])
    asm.alu(Alu.SUB, R7, R0)
    asm.store(R10, _ENTRY, 0)
    asm.store(R10, _BIAS, R7)
    load_process(asm)
    asm.store(R10, _ENTRY, R0, Size.W)
    asm.load_map(R1, MapName.MAPPERS)
    point_to_stack(asm, R2, _ENTRY)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, new)
    asm.load(R1, R0, 0)
    asm.jump_if(Jump.JEQ, R1, R7, out)  # this is not the first of its first instructions
    asm.place(new)
    asm.load_map(R1, MapName.MAPPERS)
    point_to_stack(asm, R2, _ENTRY)
    point_to_stack(asm, R3, _BIAS)
    asm.mov(R4, 0)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, mapped)
    asm.place(full)
    add_to_status(asm, Status.LATE, 1)
    asm.jump(out)
    asm.place(mapped)
    asm.load_map(R1, MapName.BIASES)
    point_to_stack(asm, R2, _BIAS)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, out)
    asm.load_map(R1, MapName.ARRIVALS)
    point_to_stack(asm, R2, _ENTRY)
    asm.mov(R3, ARRIVAL.size)
    asm.mov(R4, RingOutput.FORCE_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.jump_if(Jump.JNE, R0, 0, full)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(R10, _SINCE, R0)
    asm.load(R1, R6, REGISTER_OFFSETS["esp"])
    asm.store(R10, _STACK, R1)
    asm.mov(R1, LOOPS_MAX)
    asm.load_function(R2, waiting)
    point_to_stack(asm, R3, _STACK)
    asm.mov(R4, 0)
    asm.call(Helper.LOOP)
    asm.place(out)
    asm.mov(R0, 0)
    asm.exit()
    _wait_a_turn(asm, waiting, abilities)
    return asm.assemble()


def _wait_a_turn(asm: Assembler, entry: int, abilities: Abilities) -> None:
    """Write what is repeated until the watchpoints are attached; R2 is our stack from ``_STACK`` on."""
    done, late, again = asm.label(), asm.label(), asm.label()
    paging = PagingQuestion(asm, abilities)
    asm.function(entry)
    asm.mov(R6, R2)
    asm.load_map(R1, MapName.BIASES)
    asm.alu(Alu.ADD, R2, _BIAS - _STACK)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, done)
    asm.call(Helper.KTIME_GET_NS)
    asm.load(R1, R6, _SINCE - _STACK)
    asm.alu(Alu.SUB, R0, R1)
    asm.jump_if(Jump.JGT, R0, int(WAITING_TIME * _NANOSECONDS), late)
    if abilities.sleepable:
        # Finding the page of another process's memory (here: of our own) begins with cond_resched().
        asm.load(R1, R6, 0)
        asm.mov(R2, 1)
        paging.ask()
        asm.jump_if(Jump.JNE, R0, 0, again)
        asm.call(Helper.GET_CURRENT_TASK_BTF)
        asm.mov(R4, R0)
        asm.load(R3, R6, 0)
        asm.mov(R2, 1)
        point_to_stack(asm, R1, -8)
        asm.mov(R5, 0)
        asm.call(Helper.COPY_FROM_USER_TASK)
    asm.place(again)
    asm.mov(R0, 0)
    asm.exit()
    asm.place(late)
    add_to_status(asm, Status.LATE, 1)
    asm.place(done)
    asm.mov(R0, 1)
    asm.exit()
    paging.write_functions()


def _forget(asm: Assembler, process: Register) -> None:
    asm.store(R10, _KEY, process, Size.W)
    asm.load_map(R1, MapName.MAPPERS)
    point_to_stack(asm, R2, _KEY)
    asm.call(Helper.MAP_DELETE_ELEM)


def departure_program() -> Assembled:
    """Return the program at the last function of a library that is about to be unmapped."""
    asm = Assembler()
    load_process(asm)
    _forget(asm, R0)
    return _end(asm)


def fork_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_fork(parent, child)``, which runs before the child does."""
    asm = Assembler()
    out, full = asm.label(), asm.label()
    begin_fork(asm, types, out)
    asm.store(R10, _KEY, R4, Size.W)
    asm.load_map(R1, MapName.MAPPERS)
    point_to_stack(asm, R2, _KEY)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, out)
    asm.load(R1, R0, 0)
    asm.store(R10, _BIAS, R1)
    asm.store(R10, _KEY, R6, Size.W)
    asm.load_map(R1, MapName.MAPPERS)
    point_to_stack(asm, R2, _KEY)
    point_to_stack(asm, R3, _BIAS)
    asm.mov(R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, full)
    asm.jump(out)
    asm.place(full)
    add_to_status(asm, Status.LATE, 1)
    asm.place(out)
    return _end(asm)


def exec_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_exec(task, ...)``: the new program has not run yet."""
    asm = Assembler()
    load_argument(asm, R2, 0)
    asm.load(R3, R2, types.member_offset("task_struct", "tgid"), Size.W)
    _forget(asm, R3)
    return _end(asm)


def leave_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_exit(task)``: the last thread of a process takes its entry away."""
    asm = Assembler()
    out = asm.label()
    begin_exit(asm, types)
    asm.jump_if(Jump.JNE, R4, 0, out)
    _forget(asm, R6)
    asm.place(out)
    return _end(asm)
