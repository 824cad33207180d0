"""What an engine gives to each of its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.attach.planner import Planner
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """
    How an engine was made, and what its sessions share.

    ``pid_namespace`` gives process ids as the namespace of the processes numbers them. ``ring_size`` is in bytes, a
    power of two. ``replaceable`` programs can be replaced by others (``Job.replaces``), which costs each hit a
    nanosecond. ``overhead`` is that of ``EngineOptions``.
    """

    features: Features
    planner: Planner
    debugger: Sequence[str] | None
    core_directory: str
    pid_namespace: bool
    ring_size: int
    replaceable: bool
    overhead: float | None = None
