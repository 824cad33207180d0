"""Machine code as it comes from a generator, and what it finds around it in the probed process."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Helper
    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.routines.handler_ring import RingShape

__all__ = [
    "CodeSwitch",
    "Fixup",
    "MapPlace",
    "MapShape",
    "NativeCode",
    "Part",
    "ProcessFacts",
    "Runtime",
    "Surroundings",
]


class Fixup(NamedTuple):
    """
    An instruction that may fault, and where the thread goes on if it does; both are addresses.

    So a load of memory that may not be there costs nothing as long as it is, as with the kernel's exception table.
    """

    instruction: int
    target: int


class MapShape(enum.Enum):
    """What a map is made of."""

    VALUES = "values"
    """Values of one size in a row: an array."""
    HASH = "hash"
    """A hash table (``shared_hash_table``)."""
    RINGS = "rings"
    """A ring for each CPU (``handler_ring``)."""


class MapPlace(NamedTuple):
    """
    A map in the memory that the probed process shares with the tool.

    Of VALUES, ``stride`` is the distance of one to the next in bytes.
    """

    address: int
    shape: MapShape = MapShape.VALUES
    stride: int = 0


class CodeSwitch(NamedTuple):
    """
    An instruction that does nothing, and ``off`` in its place, which leaves out what follows up to ``end``.

    What runs there is for handlers alone, the ``parts`` with these numbers.
    """

    address: int
    on: bytes
    off: bytes
    end: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Machine code that runs at ``address``."""

    address: int
    code: bytes
    fixups: tuple[Fixup, ...] = ()
    switches: tuple[CodeSwitch, ...] = ()

    @property
    def end(self) -> int:
        """The address after it."""
        return self.address + len(self.code)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    What the code of a handler finds around it.

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


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """
    What routines have to know of a process: where its pages are (``native.process_page``).

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
    """The code of the routines that handlers of a process call, and the addresses at which they begin."""

    code: NativeCode
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
