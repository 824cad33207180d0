"""What users say about the eBPF engine alone, and what an engine gives to each of its sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.attach.site_planner import Planner
    from dprobes.engines.ebpf.kernel.kernel_features import Features

__all__ = ["RING_SIZE", "EbpfOptions", "Settings"]

RING_SIZE = 16 << 20
"""Bytes of records that wait to be taken, if nothing else is said."""


@dataclass(frozen=True, slots=True)
class EbpfOptions:
    """
    The options of the eBPF engine.

    ``pid_namespace`` gives process ids as the namespace of the processes numbers them. ``exact`` forbids to place a
    breakpoint at a cheaper neighbour. ``ring_size`` is in bytes.
    """

    pid_namespace: bool = False
    exact: bool = False
    ring_size: int = RING_SIZE


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
