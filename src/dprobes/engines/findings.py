"""What ``doctor`` finds out about a machine: one answer for each thing that was tried."""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Say whether ``what`` works, why or how (``detail``), and what to do if it does not (``remedy``)."""

    what: str
    works: bool
    detail: str = ""
    remedy: str = ""
    essential: bool = False
