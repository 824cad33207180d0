"""The limits of a probe definition: passcount, maxhits, and what becomes of a record if the instruction faults."""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["ProbeLimits"]


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """
    What a probe definition says of whether a hit runs its handler and keeps its record.

    ``keep_ip`` says that its records carry the instruction pointer even if nobody asked for that.
    """

    passcount: int
    maxhits: int
    keep_on_fault: bool
    keep_ip: bool
