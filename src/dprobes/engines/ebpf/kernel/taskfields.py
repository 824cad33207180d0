"""Whether programs can read of the running thread what records say of it, and where that is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Helper, Register, Size
from dprobes.bpf.lower.request import TaskLayout
from dprobes.engines.ebpf.kernel.bootcache import KeptAnswers
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.linux.bpfcalls import ProgramFlag, ProgramType
from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = ["task_layout"]


def task_layout(features: Features) -> TaskLayout | None:
    """Return where programs find what records say of a thread; None where they cannot read it."""
    # Those that are given to bpf_find_vma come from the same helper.
    if Feature.FIND_VMA not in features or Feature.BTF not in features or not features.remembered(_is_readable):
        return None
    return _layout(features.types)


def _layout(types: KernelTypes) -> TaskLayout:
    return TaskLayout(
        tid=types.member_offset("task_struct", "pid"),
        pid=types.member_offset("task_struct", "tgid"),
        name=types.member_offset("task_struct", "comm"),
        cred=types.member_offset("task_struct", "cred"),
        uid=types.member_offset("cred", "uid"),
    )


def _is_readable(features: Features) -> bool:
    """Return whether the verifier lets programs of both kinds read these fields; that is known until the next boot."""
    kinds = [ProgramFlag.NONE]
    if Feature.SLEEPABLE_UPROBE in features:
        kinds.append(ProgramFlag.SLEEPABLE)
    kept, key = KeptAnswers("task-fields"), f"readable by {len(kinds)}"
    if (known := kept.get(key)) is None:
        known = int(_are_loaded(features.types, kinds))
        kept.add(key, known)
    return bool(known)


def _are_loaded(types: KernelTypes, kinds: Iterable[ProgramFlag]) -> bool:
    try:
        task = _layout(types)
        for flags in kinds:
            os.close(load(_reader(task).assemble(), {}, ProgramType.KPROBE, flags=flags))
    except (DprobesError, OSError):
        return False
    return True


def _reader(task: TaskLayout) -> Assembler:
    asm, read, found = Assembler(), Register.R1, Register.R0
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    for place in (task.tid, task.pid):
        asm.load(read, found, place, Size.W)
    asm.load(read, found, task.name + 1, Size.B)
    asm.load(read, found, task.cred)
    asm.load(read, read, task.uid, Size.W)
    asm.mov(found, 0)
    asm.exit()
    return asm
