"""
Programs that let what is known of threads and processes go with these, on the kernel's tracepoints.

A thread loses its variables when it executes a program, and when it has left its CPU for the last time and its number
was given back; or else when another thread gets that number, before that first runs. A process has another space
(``MapName.SPACES``) with each program that it executes, so that nobody returns from its earlier calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, Assembler
from dprobes.bpf.asm.isa import OVERWRITE, Helper, Jump, Register, Size
from dprobes.bpf.layout import MapName
from dprobes.engines.ebpf.attach.programs.tracepoints import load_argument, point_to_stack
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import attach_typed_tracepoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

    Known = AbstractSet[MapName]

__all__ = ["follow_threads"]

R0, R1, R2, R3, R4, R6, R10 = (Register(number) for number in (0, 1, 2, 3, 4, 6, 10))
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
