"""
What a hit costs besides its handler, by the way in which it comes about.

A handler cannot see that: the trap is over before it begins, or comes after its end. The figures are those of
docs/engines.md, and for the kernel of a machine of today; on slower ones hits cost more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.attach.siteplan import DEBUG_REGISTER
from dprobes.target.code.uprobes import UprobeClass

if TYPE_CHECKING:
    from dprobes.engines.ebpf.attach.siteplan import Site

__all__ = ["hit_cost"]

_STEPPED = 12_000
_EMULATED = 500
_DEBUG_EXCEPTION = 10_000

_COSTS = {
    Placement.URETPROBE: 1_200,
    Placement.EVENT: 2_000,
    Placement.KPROBE: 800,
    Placement.KRETPROBE: 1_200,
    Placement.ENTRY: 200,
    Placement.ENTRY_RETURN: 400,
    Placement.FENTRY: 100,
    Placement.FEXIT: 100,
    Placement.MODIFY_RETURN: 100,
    Placement.TRACEPOINT: 100,
}
"""Nanoseconds."""


def hit_cost(site: Site) -> int:
    """Return the nanoseconds that a hit at a site takes besides its handler."""
    if site.executed == DEBUG_REGISTER:
        return _DEBUG_EXCEPTION
    if (cost := _COSTS.get(site.placement)) is not None:
        return cost
    return _STEPPED if site.executed == UprobeClass.STEPPED.value else _EMULATED
