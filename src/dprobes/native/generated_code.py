"""
The routines that handlers of a process call: one piece of code, to which all of them are near.

::

    routines for memory and identities │ those of ``native.routines``, for each shape of a map
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from dprobes.bpf.bpf_instructions import Helper
from dprobes.native.routines.handler_ring import output_routine
from dprobes.native.routines.shared_hash_table import hash_routine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.routines.handler_ring import RingShape
    from dprobes.native.routines.shared_hash_table import TableShape

__all__ = [
    "CodeSwitch",
    "Fixup",
    "MapPlace",
    "MapShape",
    "NativeCode",
    "Part",
    "ProcessFacts",
    "RoutineWriters",
    "Runtime",
    "Surroundings",
    "written_runtime",
]

# Which instructions of generated code may fault, and where it goes on then.
#
# A load of memory that may not be there costs nothing as long as it is: whoever sees the fault looks for the
# instruction here, and lets the thread go on at its fix-up, as the kernel does with its own exception table.


class Fixup(NamedTuple):
    """An instruction that may fault, and where the thread goes on if it does; both are addresses."""

    instruction: int
    target: int


# Where the maps of a handler are in the memory that the probed process shares with us.
#
# eBPF names maps, and the kernel gives them addresses; here they are parts of one mapping, whose place is known before
# code is generated.


class MapShape(enum.Enum):
    """What a map is made of."""

    VALUES = "values"
    """Values of one size in a row: an array."""
    HASH = "hash"
    """A hash table (``native.hashtable``)."""
    RINGS = "rings"
    """A ring for each CPU (``native.rings``)."""


class MapPlace(NamedTuple):
    """A map at its address; of VALUES, ``stride`` is the distance of one to the next in bytes."""

    address: int
    shape: MapShape = MapShape.VALUES
    stride: int = 0


# Code for a processor, as it comes from a generator: bytes for one address, and what may fault in them.


class CodeSwitch(NamedTuple):
    """
    Say that the instruction at ``address`` does nothing, and that ``off`` in its place leaves out what follows.

    That is up to ``end``, and what runs there is for handlers alone, the ``parts`` with these numbers.
    """

    address: int
    on: bytes
    off: bytes
    end: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Hold machine code that runs at ``address``."""

    address: int
    code: bytes
    fixups: tuple[Fixup, ...] = ()
    switches: tuple[CodeSwitch, ...] = ()

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + len(self.code)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    Say what the code of a handler finds around it.

    ``maps`` are where they are in the process. ``routines`` are what calls of helpers become, and ``map_routines``
    those of helpers that take a map: addresses within reach of the code. With ``has_rdpid`` the processor has the
    instruction (CPUID 7, ecx bit 22); ``cpu_place`` is as in ``ProcessFacts``. Where the shape of ``rings`` is known,
    entries of a known size are written without a call. Handlers do nothing when the ``life_mark`` says that nobody is
    there any more (``native.process_page``).
    """

    maps: Mapping[MapName, MapPlace]
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
    has_rdpid: bool = True
    rings: RingShape | None = None
    life_mark: int | None = None
    cpu_place: int | None = None


class Part(NamedTuple):
    """A handler among others at one instruction, and what its code finds around it."""

    assembled: Assembled
    around: Surroundings


_HASH_HELPERS = (Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """
    Say what routines have to know of a process: where its pages are (``native.process_page``, ``native.process_page``).

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
