"""Consequences of this kernel's features for the engine: whether it works, and the form of handlers."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import (
    Abilities,
    CounterLayout,
    LoopForm,
    NestingLayout,
    PagingLayout,
    StackLayout,
    VmaLayout,
)
from dprobes.engines.ebpf.attach.run_scope import is_initial_namespace
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_registry import KernelSupport
from dprobes.errors import TargetError, reason_of
from dprobes.platform.linux.procfs import is_in_user_namespace, missing_privilege
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.performance_counters import counter_number
from dprobes.rpn.program_needs import COUNTED, ELAPSED, ENTRY, counters_read, takes_user_stacks
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

__all__ = ["FEATURES_OF", "WAYS_OF", "abilities_of", "kernel_support"]

_NEEDED = (Feature.BPF, Feature.MMAPABLE_ARRAY, Feature.RING_BUFFER)
_NO_TYPES = "this kernel shows no type information (BTF)", "a kernel with CONFIG_DEBUG_INFO_BTF"
_NESTED = "processes have other numbers in this PID namespace than in the kernel", "the initial PID namespace"
_ITERATOR = ("new", "next", "destroy")
_LOOPS = (Feature.MAY_GOTO, Feature.ITERATORS, Feature.BPF_LOOP)


def kernel_support(features: Features) -> KernelSupport:
    """Return whether the engine works on this kernel, and the capabilities that its row in the registry lacks."""
    problem = missing_privilege()
    if problem is not None:
        return KernelSupport(problem, "run dprobes as root, or with CAP_BPF and CAP_PERFMON")
    for feature in _NEEDED:
        if (error := features.error(feature)) is not None:
            return _problem(feature, error)
    if not any(feature in features for feature in _LOOPS):
        return KernelSupport("this kernel has no loops in BPF programs", "Linux 5.17 and newer has them")
    # This test only opens a file; a kernel with BTF can load programs on typed tracepoints.
    problem, remedy = (None, None)
    if Feature.BTF not in features:
        problem, remedy = _NO_TYPES
    elif not is_initial_namespace():
        problem, remedy = _NESTED
    return KernelSupport(tree_problem=problem, tree_remedy=remedy, capabilities=_Found(features))


FEATURES_OF = {
    Capability.PORT_WATCHPOINT: (Feature.KPROBE,),
    Capability.WRITE_MEMORY: (Feature.WRITE_USER,),
    Capability.WRITE_REGISTER: (Feature.WRITE_REGISTERS,),
    Capability.VERIFY_WRITE: (Feature.FIND_VMA, Feature.BTF),
    Capability.COUNTER: (Feature.READ_KERNEL, Feature.TYPED_TRACEPOINT),
    Capability.SWITCH_COUNTER: (Feature.READ_KERNEL, Feature.TYPED_TRACEPOINT),
}
"""Features of the kernel that a capability needs. All of them are required."""

WAYS_OF = {
    Capability.KERNEL_MODULE: (Feature.KPROBE, Feature.TRAMPOLINE),
    Capability.KERNEL_SKIP: (Feature.OVERRIDE_RETURN, Feature.MODIFY_RETURN),
}
"""Features of the kernel that a capability needs. One of them is required."""


class _Found:
    """Container of the capabilities for which this kernel has the features. A look-up tests the features."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def __contains__(self, capability: object) -> bool:
        if not isinstance(capability, Capability):
            return False
        if (ways := WAYS_OF.get(capability)) is not None:
            return any(feature in self._features for feature in ways)
        needed = FEATURES_OF.get(capability)
        return needed is not None and all(feature in self._features for feature in needed)


def _problem(feature: Feature, error: OSError) -> KernelSupport:
    if error.errno in (errno.EPERM, errno.EACCES):
        if is_in_user_namespace():
            return KernelSupport(
                "the kernel permits no BPF programs to processes in a user namespace",
                "run dprobes as root of the machine; a container must not have its own user namespace",
            )
        return KernelSupport(
            "the kernel does not permit BPF programs to this process",
            "run dprobes as root; in a container, allow the bpf(2) and perf_event_open(2) system calls",
        )
    reason = reason_of(error)
    return KernelSupport(f"this kernel has no {feature.value} ({reason})", "Linux 5.17 and newer has what is needed")


def abilities_of(features: Features, program: Program) -> Abilities:
    """Return the kernel features that the compiler may use in a program's handlers, with the best form of loops."""
    rows = [instruction.row for code in program.bodies() for instruction in code.instructions]
    writes, in_kernel = any(row.writes for row in rows), space_of(program) is Space.KERNEL
    verifies = any(row.operator == "vfyrw" for row in rows)
    asks_for_entries = any(row.syntax in (ELAPSED, ENTRY, COUNTED) for row in rows)
    loops, iterator = _loops(features)
    return Abilities(
        loops=loops,
        sleepable=Feature.SLEEPABLE_UPROBE in features,
        writes_memory=writes and Feature.WRITE_USER in features,
        writes_registers=writes and Feature.WRITE_REGISTERS in features,
        iterator=iterator,
        vma=_vma_layout(features) if verifies else None,
        function_ip=Feature.FUNC_IP in features,
        overrides_returns=in_kernel
        and any(row.syntax == "skip" for row in rows),  # others are skipped by other engines
        nesting=_nesting_layout(features) if asks_for_entries else None,
        stack=_stack_layout(features) if takes_user_stacks(program) else None,
        user=os.geteuid(),
        paging=None if in_kernel else _paging_layout(features),
        counters=_counter_layout(features, counters_read(program)),
    )


_TASK_MEMBERS = {
    "page-faults": ("min_flt", "maj_flt"),
    "minor-faults": ("min_flt",),
    "major-faults": ("maj_flt",),
    "context-switches": ("nvcsw", "nivcsw"),
    "cpu-migrations": ("se.nr_migrations",),
}
"""Members of ``task_struct`` whose sum is a counter, 64 bits each. getrusage(2) reports the first four counters."""


def _counter_layout(features: Features, names: tuple[str, ...]) -> CounterLayout | None:
    """Return the sources of the counters that a program reads, or None if it reads none, or the kernel has no BTF."""
    if not names or Feature.BTF not in features:
        return None
    at = features.types.member_offset
    members = {
        counter_number(name): tuple(at("task_struct", member) for member in _TASK_MEMBERS[name])
        for name in names
        if name in _TASK_MEMBERS
    }
    return CounterLayout(members, tuple(counter_number(name) for name in names if name not in _TASK_MEMBERS))


def _loops(features: Features) -> tuple[LoopForm, tuple[int, int, int]]:
    """Return the best form of loops on this kernel, and the BTF ids of the kfuncs that it needs, or zeros."""
    if Feature.MAY_GOTO in features:
        return LoopForm.MAY_GOTO, (0, 0, 0)
    if Feature.ITERATORS not in features:
        return LoopForm.CALLBACK, (0, 0, 0)
    new, following, end = (features.types.find(Kind.FUNC, f"bpf_iter_num_{what}") for what in _ITERATOR)
    return LoopForm.ITERATOR, (new, following, end)


def _stack_layout(features: Features) -> StackLayout | None:
    at = features.types.member_offset
    if Feature.BTF in features:
        with contextlib.suppress(TargetError):
            base = at("task_struct", "thread") + at("thread_struct", "fsbase")
            return StackLayout(mm=at("task_struct", "mm"), base=base, bottom=at("mm_struct", "start_stack"))
    return None


def _nesting_layout(features: Features) -> NestingLayout | None:
    at = features.types.member_offset
    if Feature.BTF in features:
        with contextlib.suppress(TargetError):
            return NestingLayout(
                mm=at("task_struct", "mm"),
                area=at("mm_struct", "uprobes_state") + at("uprobes_state", "xol_area"),
                trampoline=at("xol_area", "vaddr"),
                task=at("task_struct", "utask"),
                depth=at("uprobe_task", "depth"),
            )
    return None


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
