"""What routines have to know of a process, and where they are: the same for all processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.asm.isa import Helper
    from dprobes.bpf.layout import MapName
    from dprobes.native.code import NativeCode

__all__ = ["ProcessFacts", "Runtime"]


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """
    Say what routines have to know of a process: where its pages are (``native.processpage``, ``native.lifemark``).

    ``tid_place`` is where its C library has the thread id, and ``cpu_place`` where that has the number of the CPU
    (``cpu_id`` of struct rseq), in bytes from the thread pointer; None: nobody knows. With ``has_rdpid`` an x86-64
    processor has the instruction, and needs no ``cpu_place``.
    """

    process_page: int
    clock_page: int
    tid_place: int | None = None
    has_rdpid: bool = True
    cpu_place: int | None = None
    life_mark: int | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Hold the code of the routines, and the addresses at which they begin."""

    code: NativeCode
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
