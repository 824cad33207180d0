"""
Programs that let the variables of threads go with their threads, on the kernel's tracepoints.

A thread loses its variables when it ends and when it executes a program. Should the kernel's own code on a thread's
last way have given it new ones, they go when another thread gets its number, before that first runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.isa import Helper, Register, Size
from dprobes.bpf.layout import MapName
from dprobes.engines.ebpf.attach.tracepoints import load_argument, point_to_stack
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import attach_typed_tracepoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = ["follow_threads"]

R0, R1, R2, R6, R10 = (Register(number) for number in (0, 1, 2, 6, 10))
_KEY = -8


def follow_threads(maps: Mapping[MapName, int], types: KernelTypes) -> Descriptors:
    """Let variables go with their threads until the result is closed; needs THREAD_VARIABLES."""
    links = Descriptors()
    try:
        for tracepoint, program in (
            ("sched_process_exit", _exit_program()),
            ("sched_process_fork", _fork_program(types)),
            ("sched_process_exec", _exec_program()),
        ):
            links.add(attach_typed_tracepoint(tracepoint, program, maps, types))
    except BaseException:
        links.close()
        raise
    return links


def _exit_program() -> Assembled:
    """Return the program on ``sched_process_exit(task)``, which the ending thread runs."""
    asm = Assembler()
    _load_thread(asm)
    _forget(asm)
    return _ended(asm)


def _fork_program(types: KernelTypes) -> Assembled:
    """Return the program on ``sched_process_fork(parent, child)``, which runs before the new thread does."""
    asm = Assembler()
    load_argument(asm, R2, 1)
    asm.load(R0, R2, types.member_offset("task_struct", "pid"), Size.W)
    _forget(asm)
    return _ended(asm)


def _exec_program() -> Assembled:
    """Return the program on ``sched_process_exec(task, old_pid, ...)``; the first thread's number is the task's now."""
    asm = Assembler()
    load_argument(asm, R6, 1)
    _load_thread(asm)
    _forget(asm)
    asm.mov(R0, R6, wide=False)
    _forget(asm)
    return _ended(asm)


def _load_thread(asm: Assembler) -> None:
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.mov(R0, R0, wide=False)


def _forget(asm: Assembler) -> None:
    """Delete the variables of the thread in R0."""
    asm.store(R10, _KEY, R0)
    asm.load_map(R1, MapName.THREAD_VARIABLES)
    point_to_stack(asm, R2, _KEY)
    asm.call(Helper.MAP_DELETE_ELEM)


def _ended(asm: Assembler) -> Assembled:
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()
