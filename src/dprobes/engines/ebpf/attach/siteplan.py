"""The plan of a file: its probepoints, and the places where breakpoints stand for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.bpf.lower.request import Placement
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule

__all__ = ["DEBUG_REGISTER", "FilePlan", "Site"]

DEBUG_REGISTER = "debug register"
"""What hits a watchpoint, in the words of the summary."""


@dataclass(frozen=True, slots=True)
class Site:
    """
    Name one place of a breakpoint.

    ``offset`` is that in the file, ``moved`` how far it is from the probepoint's written place. ``return_bytes`` is
    what the return instruction at a RET_SITE takes from the stack besides the return address. ``executed`` says for
    people how the kernel carries the instruction out. ``may_fault`` says that the instruction may raise a fatal signal.
    ``counter`` is the file offset of the semaphore of a USDT probe, 0 for none.
    ``anchor`` is what the kernel is to find the place by whenever a module of its own is loaded: ``SYMBOL+DISTANCE``.
    ``arguments`` is how many words the function at a trampoline takes in registers.
    """

    offset: int
    placement: Placement
    executed: str
    may_fault: bool
    moved: int = 0
    return_bytes: int = 0
    anchor: str = ""
    arguments: int = 0
    counter: int = 0
    is_entry: bool = False
    """Whether no handler is here, but what keeps the entry of a call for the handler of its return."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """
    Hold the probepoints of a file that get a breakpoint, each with its sites, and those that get none.

    A probepoint without sites is one of which the program's file says so already (its ``state``).
    """

    resolved: ResolvedModule
    probes: tuple[tuple[Probepoint, tuple[Site, ...]], ...]
    left_out: tuple[LeftOutProbe, ...]
