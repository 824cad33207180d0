"""
Which engine a run takes where that is left to dprobes.

The eBPF engine, where it can do all that is asked for: its hits cost a tenth and stop nothing. Else ptrace, which needs
no privileges, but a process or command to start from. Nothing here imports an engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.engines.capabilities import ENGINES, Capability
from dprobes.engines.linux.procfs import process_field

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from dprobes.engines.capabilities import Requirement
    from dprobes.engines.interface import Scope

__all__ = ["FOUND_BY_TRYING", "USUAL_REASON", "Choice", "KernelSupport", "choose", "missing_privilege"]


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """
    Say what this kernel lets the eBPF engine do for this user.

    ``problem`` is a clause that says why it cannot work at all, ``remedy`` what to do about that; ``tree_problem`` one
    that says why it cannot follow the processes of a tree, ``tree_remedy`` where it could. ``capabilities`` is what it
    can besides its row in ``ENGINES``; each may be found out when it is asked for.
    """

    problem: str | None = None
    remedy: str | None = None
    tree_problem: str | None = None
    tree_remedy: str | None = None
    capabilities: Container[Capability] = frozenset()


USUAL_REASON = "handlers run in the kernel, and nothing in the program needs ptrace"
"""Why the eBPF engine is taken where nothing speaks against it: what a user need not hear."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Name an engine, and why it was taken."""

    engine: str
    reason: str


FOUND_BY_TRYING = frozenset({Capability.WRITE_MEMORY, Capability.WRITE_REGISTER, Capability.VERIFY_WRITE})
"""What the eBPF engine can on some kernels, besides its row in ``ENGINES``."""

_STANDS_BEFORE = {
    Capability.HAND_OVER: "leaves the probed instruction to the debugger only there",
    Capability.CORE_DUMP: "shows the state before the probed instruction only there",
    Capability.MODULE_WATCHPOINT: "sees accesses from the very start of a process only there",
}
"""
What both engines can, and ptrace better: in the kernel the probed instruction is finished before a thread stops, and a
module is watched where its own code begins.
"""


def choose(
    scope: Scope,
    needs: Iterable[Requirement],
    support: Callable[[], KernelSupport],
    *,
    traced_by: str | None = None,
) -> Choice:
    """
    Return the engine for a scope and what a program needs; ``support`` is asked only if it matters.

    ``traced_by`` names the process that traces the target already, which keeps ptrace away from it.
    """
    if not scope.is_tree:
        return Choice("ebpf", "only it probes processes that it did not start or attach to")
    needed = list(needs)
    for need in needed:
        if need.capability not in ENGINES["ptrace"] and need.capability in ENGINES["ebpf"]:
            return Choice("ebpf", f"'{need.what}' needs {need.capability.value}, which the ptrace engine lacks")
    if traced_by is not None:
        return Choice("ebpf", f"the process is traced by {traced_by} already")
    for need in needed:
        if need.capability in _STANDS_BEFORE:
            return Choice("ptrace", f"'{need.what}' {_STANDS_BEFORE[need.capability]}")
    for need in needed:
        if need.capability not in ENGINES["ebpf"] and not (
            need.capability in FOUND_BY_TRYING and need.capability in support().capabilities
        ):
            return Choice("ptrace", f"'{need.what}' needs {need.capability.value}, which the ebpf engine lacks")
    if (problem := support().problem) is not None:
        return Choice("ptrace", f"the ebpf engine cannot work here: {problem}")
    if (problem := support().tree_problem) is not None:
        return Choice("ptrace", f"the ebpf engine cannot follow processes here: {problem}")
    return Choice("ebpf", USUAL_REASON)


_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39  # capability(7)


def missing_privilege() -> str | None:
    """Return which capabilities this process lacks for BPF programs on uprobes, as a clause; None if it has them."""
    effective = int(process_field(os.getpid(), "CapEff") or "0", 16)
    if effective >> _CAP_SYS_ADMIN & 1:
        return None
    wanted = {"CAP_BPF": _CAP_BPF, "CAP_PERFMON": _CAP_PERFMON}
    missing = [name for name, bit in wanted.items() if not effective >> bit & 1]
    return f"this user lacks {' and '.join(missing)}" if missing else None
