"""
The routines that handlers of a process call: one piece of code, to which all of them are near.

::

    routines for memory and identities │ those of ``native.routines``, for each shape of a map
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dprobes.bpf.asm.isa import Helper
from dprobes.lazydataclass import dataclass
from dprobes.native.code import NativeCode, Surroundings
from dprobes.native.routines.hashtable import hash_routine
from dprobes.native.routines.ring import output_routine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.layout import MapName
    from dprobes.native.faults import Fixup
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.native.routines.ring import RingShape

__all__ = ["ProcessFacts", "RoutineWriters", "Runtime", "written_runtime"]

_HASH_HELPERS = (Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """
    Say what routines have to know of a process: where its pages are (``native.processpage``, ``native.lifemark``).

    ``tid_place`` is where its C library has the thread id, and ``cpu_place`` where that has the number of the CPU
    (``cpu_id`` of struct rseq), in bytes from the thread pointer; None: nobody knows. With ``has_rdpid`` an x86-64
    processor has the instruction, and needs no ``cpu_place``. ``first_stack`` is where the stack ends that the
    process began with.
    """

    process_page: int
    clock_page: int
    tid_place: int | None = None
    has_rdpid: bool = True
    cpu_place: int | None = None
    life_mark: int | None = None
    first_stack: int | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Hold the code of the routines, and the addresses at which they begin."""

    code: NativeCode
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]


class CodeSpace(Protocol):
    """Where code is collected: an assembler."""

    @property
    def address(self) -> int:
        """The address of the first instruction."""

    @property
    def here(self) -> int:
        """The address of the next instruction."""

    def assemble(self) -> bytes:
        """Return the code."""


_Asm = TypeVar("_Asm", bound=CodeSpace)


@dataclass(frozen=True, slots=True)
class RoutineWriters(Generic[_Asm]):
    """
    Hold what writes the routines for a processor.

    ``memory`` are those that may fault, and ``calls`` those that are told nothing. ``ids`` and ``clock`` are told where
    pages are, and ``stack_end`` where the first stack begins. ``routine`` writes what is eBPF.
    """

    memory: Mapping[Helper, Callable[[_Asm], list[Fixup]]]
    calls: Mapping[Helper, Callable[[_Asm], None]]
    ids: Callable[[_Asm, int, int | None], None]
    clock: Callable[[_Asm, int], None]
    stack_end: Callable[[_Asm, int | None], list[Fixup]]
    routine: Callable[[_Asm, Assembled, Surroundings], int]


def written_runtime(
    asm: _Asm,
    writers: RoutineWriters[_Asm],
    facts: ProcessFacts,
    rings: RingShape,
    tables: Mapping[MapName, TableShape],
) -> Runtime:
    """Write the routines, and return them."""
    fixups: list[Fixup] = []
    routines: dict[Helper, int] = {}
    for helper, write in writers.memory.items():
        routines[helper] = asm.here
        fixups += write(asm)
    routines[Helper.GET_CURRENT_PID_TGID] = asm.here
    writers.ids(asm, facts.process_page, facts.tid_place)
    routines[Helper.KTIME_GET_NS] = asm.here
    writers.clock(asm, facts.clock_page)
    routines[Helper.GET_CURRENT_TASK] = asm.here
    fixups += writers.stack_end(asm, facts.first_stack)
    for helper, write_call in writers.calls.items():
        routines[helper] = asm.here
        write_call(asm)
    around = Surroundings({}, routines, {}, facts.has_rdpid, cpu_place=facts.cpu_place)
    routines[Helper.RINGBUF_OUTPUT] = writers.routine(asm, output_routine(rings), around)
    by_shape: dict[tuple[TableShape, Helper], int] = {}
    map_routines = {}
    for name, shape in tables.items():
        for helper in _HASH_HELPERS:
            if (shape, helper) not in by_shape:
                by_shape[shape, helper] = writers.routine(asm, hash_routine(helper, shape), around)
            map_routines[name, helper] = by_shape[shape, helper]
    return Runtime(NativeCode(asm.address, asm.assemble(), tuple(fixups)), routines, map_routines)
