"""The abilities of eBPF handlers in tests: those of this kernel, and the programs that need no others."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from dprobes.bpf.lower import Abilities, LoopForm, VmaLayout, is_supported
from dprobes.bpf.lower.lowering_request import CounterLayout
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features, KernelTypes
from dprobes.engines.ebpf.kernel.task_structures import paging_layout, vma_layout
from dprobes.rpn.instruction_set import Group
from dprobes.rpn.keyed_tables import table_of
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.bpf.lower.lowering_request import PagingLayout
    from dprobes.rpn.rpn_program import Program
    from dprobes.testing import FakeContext

__all__ = ["abilities", "is_applicable", "loop_forms"]


@functools.cache
def _iterator_functions() -> tuple[int, int, int]:
    types = KernelTypes()
    try:
        new, following, destroy = (types.find(Kind.FUNC, f"bpf_iter_num_{n}") for n in ("new", "next", "destroy"))
    finally:
        types.close()
    return new, following, destroy


@functools.cache
def _vma_layout() -> VmaLayout | None:
    try:
        return vma_layout(KernelTypes())
    except FileNotFoundError:
        return None


@functools.cache
def _paging_layout() -> PagingLayout | None:
    return paging_layout(Features())


@functools.cache
def loop_forms() -> tuple[LoopForm, ...]:
    """Return the forms of loops that this kernel's verifier accepts, the most efficient first."""
    features = Features()
    needed = {
        LoopForm.MAY_GOTO: Feature.MAY_GOTO,
        LoopForm.ITERATOR: Feature.ITERATORS,
        LoopForm.CALLBACK: Feature.BPF_LOOP,
    }
    return tuple(form for form, feature in needed.items() if feature in features)


def abilities(loops: LoopForm | None = None, *, sleepable: bool = True) -> Abilities:
    """Return the abilities for the compilation of handlers; none writes memory, which lockdown may forbid."""
    loops = loops or loop_forms()[0]
    iterator = _iterator_functions() if loops is LoopForm.ITERATOR else (0, 0, 0)
    return Abilities(
        loops,
        sleepable=sleepable,
        iterator=iterator,
        vma=_vma_layout(),
        overrides_returns=True,
        user=os.geteuid(),
        paging=_paging_layout(),
        counters=CounterLayout({}),
    )


def is_applicable(
    program: Program, target: Architecture, context: FakeContext, offered: Abilities | None = None
) -> bool:
    """
    Return whether eBPF can execute a program in a context.

    ``offered`` are the abilities to assume, by default those of this kernel.
    """
    offered = offered or abilities()
    if target.name not in ("i386", "x86_64") or context._registers[True]:
        return False
    for code in program.bodies():
        for instruction in code.instructions:
            table = table_of(instruction.operand, program.tables) if instruction.row.group is Group.TABLE else None
            if table is not None and table.has_user_stack and instruction.row.operator == "push":
                return False
            register = target.register(instruction.operand) if isinstance(instruction.operand, str) else None
            if not is_supported(instruction.row, register, offered):
                return False
    return True
