"""Whose hits count: the scope of a run, as programs ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
from dprobes.bpf.layout import MapName

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.request import Filter

__all__ = ["write_filter"]

_KEY = -4
_R = Register


def write_filter(asm: Assembler, scope: Filter, load_process: Callable[[], None], outside: Label) -> None:
    """Go on only if the running thread is in scope; ``load_process`` puts its process id into R0. Takes R0-R5."""
    if scope.processes or scope.excluded is not None:
        load_process()
        if scope.excluded is not None:
            asm.jump_if(Jump.JEQ, _R.R0, scope.excluded, outside)
    if scope.processes:
        asm.store(_R.R10, _KEY, _R.R0, Size.W)
        asm.load_map(_R.R1, MapName.SCOPE)
        asm.mov(_R.R2, _R.R10)
        asm.alu(Alu.ADD, _R.R2, _KEY)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, outside)
    if scope.cgroup is not None:
        identity, level = scope.cgroup
        asm.mov(_R.R1, level)
        asm.call(Helper.GET_CURRENT_ANCESTOR_CGROUP_ID)
        asm.mov(_R.R1, identity)
        asm.jump_if(Jump.JNE, _R.R0, _R.R1, outside)
    if scope.uid is not None:
        asm.call(Helper.GET_CURRENT_UID_GID)
        asm.mov(_R.R1, scope.uid)
        asm.jump_if(Jump.JNE, _R.R0, _R.R1, outside, wide=False)
