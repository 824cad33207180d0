"""Availability of the engine for ``auto``: a check that costs little if privileges are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.engine_registry import KernelSupport
from dprobes.platform.linux.procfs import missing_privilege

if TYPE_CHECKING:
    from dprobes.engines.engine_interface import MachineKnowledge

__all__ = ["support"]


def support(knowledge: MachineKnowledge) -> KernelSupport:
    """
    Return the kernel's support for the engine.

    Without privileges, no feature is tested, because all tests would fail.
    """
    if (missing := missing_privilege()) is not None:
        return KernelSupport(missing, "run dprobes as root")
    from dprobes.engines.ebpf.feature_support import kernel_support
    from dprobes.engines.ebpf.kernel.kernel_features import Features

    return kernel_support(knowledge.recall(Features))
