"""What the features of this kernel mean for the engine: whether it works, and how handlers are to be written."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import Abilities, LoopForm, NestingLayout, PagingLayout, StackLayout, VmaLayout
from dprobes.engines.ebpf.attach.run_scope import is_initial_namespace
from dprobes.engines.ebpf.bpf_privilege import is_in_user_namespace, missing_privilege
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_registry import KernelSupport
from dprobes.errors import TargetError, reason_of
from dprobes.resolve.probed_space import Space, space_of
from dprobes.rpn.program_needs import ELAPSED, ENTRY
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.kernel_types import KernelTypes
    from dprobes.rpn.rpn_program import Program

__all__ = ["abilities_of", "kernel_support"]

_NEEDED = (Feature.BPF, Feature.MMAPABLE_ARRAY, Feature.RING_BUFFER)
_NO_TYPES = "this kernel shows no type information (BTF)", "a kernel with CONFIG_DEBUG_INFO_BTF"
_NESTED = "processes have other numbers in this PID namespace than in the kernel", "the initial PID namespace"
_LOOPS = (Feature.MAY_GOTO, Feature.ITERATORS, Feature.BPF_LOOP)


def kernel_support(features: Features) -> KernelSupport:
    """Return whether the engine works here, and what it can besides its row in the registry."""
    problem = missing_privilege()
    if problem is not None:
        return KernelSupport(problem, "run dprobes as root, or with CAP_BPF and CAP_PERFMON")
    for feature in _NEEDED:
        if (error := features.error(feature)) is not None:
            return _problem(feature, error)
    if not any(feature in features for feature in _LOOPS):
        return KernelSupport("this kernel has no loops in BPF programs", "Linux 5.17 and newer has them")
    # Found out by opening a file; that programs can be loaded on typed tracepoints goes with it.
    problem, remedy = (None, None)
    if Feature.BTF not in features:
        problem, remedy = _NO_TYPES
    elif not is_initial_namespace():
        problem, remedy = _NESTED
    return KernelSupport(tree_problem=problem, tree_remedy=remedy, capabilities=_Found(features))


_FEATURES = {
    Capability.WRITE_MEMORY: (Feature.WRITE_USER,),
    Capability.WRITE_REGISTER: (Feature.WRITE_REGISTERS,),
    Capability.VERIFY_WRITE: (Feature.FIND_VMA, Feature.BTF),
}


_WAYS = {
    Capability.KERNEL_MODULE: (Feature.KPROBE, Feature.TRAMPOLINE),
    Capability.KERNEL_SKIP: (Feature.OVERRIDE_RETURN, Feature.MODIFY_RETURN),
}
"""What one of several features is enough for."""


class _Found:
    """Hold the capabilities that this kernel has features for; few programs ask for any, so each is tried then."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def __contains__(self, capability: object) -> bool:
        if not isinstance(capability, Capability):
            return False
        if (ways := _WAYS.get(capability)) is not None:
            return any(feature in self._features for feature in ways)
        needed = _FEATURES.get(capability)
        return needed is not None and all(feature in self._features for feature in needed)


def _problem(feature: Feature, error: OSError) -> KernelSupport:
    if error.errno in (errno.EPERM, errno.EACCES):
        if is_in_user_namespace():
            return KernelSupport(
                "the kernel permits no BPF programs to processes in a user namespace",
                "run dprobes as root of the machine; a container must have no user namespace of its own",
            )
        return KernelSupport(
            "the kernel does not permit BPF programs to this process",
            "run dprobes as root; in a container, allow the bpf(2) and perf_event_open(2) system calls",
        )
    reason = reason_of(error)
    return KernelSupport(f"this kernel has no {feature.value} ({reason})", "Linux 5.17 and newer has what is needed")


def abilities_of(features: Features, program: Program) -> Abilities:
    """Return how the handlers of a program are to be written for this kernel, the best form of loops first."""
    writes = any(i.row.writes for code in program.bodies() for i in code.instructions)
    # Only of kernel programs: functions of others are skipped by other engines.
    skips = space_of(program) is Space.KERNEL and any(
        i.row.syntax == "skip" for code in program.bodies() for i in code.instructions
    )
    loops, iterator = LoopForm.CALLBACK, (0, 0, 0)
    if Feature.MAY_GOTO in features:
        loops = LoopForm.MAY_GOTO
    elif Feature.ITERATORS in features:
        loops, iterator = LoopForm.ITERATOR, _iterator_ids(features.types)
    return Abilities(
        loops=loops,
        sleepable=Feature.SLEEPABLE_UPROBE in features,
        writes_memory=writes and Feature.WRITE_USER in features,
        writes_registers=writes and Feature.WRITE_REGISTERS in features,
        iterator=iterator,
        vma=_vma_layout(features) if _asks_for_mappings(program) else None,
        function_ip=Feature.FUNC_IP in features,
        overrides_returns=skips,
        nesting=_nesting_layout(features) if _asks_for_entries(program) else None,
        stack=_stack_layout(features) if _asks_for_stacks(program) else None,
        user=os.geteuid(),
        paging=_paging_layout(features) if space_of(program) is not Space.KERNEL else None,
    )


def _asks_for_stacks(program: Program) -> bool:
    """Return whether handlers copy stacks of programs."""
    instructions = (i for code in program.bodies() for i in code.instructions)
    return any(i.row.syntax.startswith("log ustack") for i in instructions) or any(
        table.has_user_stack for table in program.tables
    )


def _stack_layout(features: Features) -> StackLayout | None:
    if Feature.BTF not in features:
        return None
    types = features.types
    try:
        return StackLayout(
            mm=types.member_offset("task_struct", "mm"),
            base=types.member_offset("task_struct", "thread") + types.member_offset("thread_struct", "fsbase"),
            bottom=types.member_offset("mm_struct", "start_stack"),
        )
    except TargetError:
        return None


def _asks_for_entries(program: Program) -> bool:
    """Return whether handlers of returns want to know of the entry."""
    return any(i.row.syntax in (ELAPSED, ENTRY) for code in program.bodies() for i in code.instructions)


def _nesting_layout(features: Features) -> NestingLayout | None:
    if Feature.BTF not in features:
        return None
    types = features.types
    try:
        return NestingLayout(
            mm=types.member_offset("task_struct", "mm"),
            area=types.member_offset("mm_struct", "uprobes_state") + types.member_offset("uprobes_state", "xol_area"),
            trampoline=types.member_offset("xol_area", "vaddr"),
            task=types.member_offset("task_struct", "utask"),
            depth=types.member_offset("uprobe_task", "depth"),
        )
    except TargetError:
        return None


def _asks_for_mappings(program: Program) -> bool:
    """Return whether handlers have to find out what is mapped somewhere."""
    return any(instruction.row.operator == "vfyrw" for code in program.bodies() for instruction in code.instructions)


def _vma_layout(features: Features) -> VmaLayout | None:
    if Feature.FIND_VMA not in features or Feature.BTF not in features:
        return None
    from dprobes.engines.ebpf.kernel.task_structures import vma_layout

    return vma_layout(features.types)


def _paging_layout(features: Features) -> PagingLayout | None:
    if Feature.SLEEPABLE_UPROBE not in features:
        return None
    from dprobes.engines.ebpf.kernel.task_structures import paging_layout

    return paging_layout(features)


def _iterator_ids(types: KernelTypes) -> tuple[int, int, int]:
    new, following, destroy = (types.find(Kind.FUNC, f"bpf_iter_num_{what}") for what in ("new", "next", "destroy"))
    return new, following, destroy
