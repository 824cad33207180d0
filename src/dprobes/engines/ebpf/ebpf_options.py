"""Options of the eBPF engine, and the settings that an engine shares with its sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.attach.site_planner import Planner
    from dprobes.engines.ebpf.kernel.kernel_features import Features

__all__ = ["RING_SIZE", "EbpfOptions", "Settings"]

RING_SIZE = 16 << 20
"""Default size of the ring in bytes."""


@dataclass(frozen=True, slots=True)
class EbpfOptions:
    """
    Options of the eBPF engine.

    With ``pid_namespace``, process ids in records are ids in the PID namespace of the probed processes. ``exact``
    forbids moving a uprobe to a neighboring instruction where a hit takes less time. ``ring_size`` is in bytes.
    """

    pid_namespace: bool = False
    exact: bool = False
    ring_size: int = RING_SIZE


class Settings(NamedTuple):
    """
    Settings of an engine, which its sessions share.

    With ``pid_namespace``, process ids in records are ids in the PID namespace of the probed processes. ``ring_size``
    is in bytes, a power of two. A ``replaceable`` program can be replaced by another one (``Job.replaces``), which
    costs each hit a nanosecond. ``overhead`` is as in ``EngineOptions``.
    """

    features: Features
    planner: Planner
    debugger: Sequence[str] | None
    core_directory: str
    pid_namespace: bool
    ring_size: int
    replaceable: bool
    overhead: float | None = None
