"""
The variables of the thread that took a hit: a value of a hash (``MapName.THREAD_VARIABLES``).

A thread gets them, all 0, before the first handler that uses them. They go with the thread, which is the business of
programs on the kernel's tracepoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import NO_OVERWRITE, Alu, Helper, Jump, Register
from dprobes.bpf.layout import MapName
from dprobes.rpn.isa import Group

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.flow import HandlerFlow
    from dprobes.bpf.lower.hosts.host import Host

__all__ = ["give_variables", "point_to_variables", "uses_variables"]

_KEY = -120
"""Where on the stack the key of the thread is put: not far down, because callbacks share the stack."""

_EXISTS = -17
"""What the kernel answers if a key is there already (-EEXIST)."""

_R = Register


def uses_variables(flow: HandlerFlow) -> bool:
    """Return whether a handler uses variables of threads."""
    rows = (instruction.row for instruction in flow.instructions.values())
    return any(row is not None and (row.group is Group.THREAD_VARIABLE or row.syntax == "log tv") for row in rows)


def point_to_variables(asm: Assembler, host: Host) -> None:
    """Let R0 point to the variables of the thread; 0 if it has none. Takes R1-R5."""
    known = asm.label()
    host.global_tid()
    asm.jump_if(Jump.JNE, _R.R0, 0, known)
    host.cpu()  # an idle thread: each CPU has one
    asm.alu(Alu.ADD, _R.R0, 1)
    asm.alu(Alu.LSH, _R.R0, 32)
    asm.place(known)
    asm.store(_R.R10, _KEY, _R.R0)
    asm.load_map(_R.R1, MapName.THREAD_VARIABLES)
    _point_to_key(asm)
    asm.call(Helper.MAP_LOOKUP_ELEM)


def give_variables(asm: Assembler, host: Host, full: Label) -> None:
    """See to it that the thread has variables; go to ``full`` if there is no room for them. Takes R0-R5."""
    there = asm.label()
    point_to_variables(asm, host)
    asm.jump_if(Jump.JNE, _R.R0, 0, there)
    asm.load_map(_R.R1, MapName.THREAD_VARIABLES)
    _point_to_key(asm)
    asm.load_value(_R.R3, MapName.ZEROS)
    asm.mov(_R.R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.jump_if(Jump.JEQ, _R.R0, 0, there)
    asm.jump_if(Jump.JNE, _R.R0, _EXISTS, full)
    asm.place(there)


def _point_to_key(asm: Assembler) -> None:
    asm.mov(_R.R2, _R.R10)
    asm.alu(Alu.ADD, _R.R2, _KEY)
