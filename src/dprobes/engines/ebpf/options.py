"""What users say about the eBPF engine alone."""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["RING_SIZE", "EbpfOptions"]

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
