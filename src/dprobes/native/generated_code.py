"""Machine code from a generator, and its environment in the probed process."""

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
    An instruction that may fault, and the place where the thread continues if it does; both are addresses.

    So a load of memory that may be unmapped costs nothing unless it faults, as with the kernel's exception table.
    """

    instruction: int
    target: int


class MapShape(enum.Enum):
    """The structures of maps."""

    VALUES = "values"
    """Values of one size in a row: an array."""
    HASH = "hash"
    """A hash table (``shared_hash_table``)."""
    RINGS = "rings"
    """A ring for each CPU (``handler_ring``)."""


class MapPlace(NamedTuple):
    """
    A map in the memory that the probed process shares with the tool.

    ``stride`` is the distance in bytes between two values, for VALUES.
    """

    address: int
    shape: MapShape = MapShape.VALUES
    stride: int = 0


class CodeSwitch(NamedTuple):
    """
    A switch: an instruction that does nothing; the jump ``off`` replaces it to leave out the code up to ``end``.

    That code serves only the handlers of the ``parts`` with these numbers.
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
        """The address after the code."""
        return self.address + len(self.code)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    The environment of a handler's code.

    ``maps`` are the places of maps in the process. ``routines`` are the routines for calls of helpers, ``map_routines``
    those for helpers that take a map: addresses within reach of the code. ``has_rdpid`` is true if the processor has
    the instruction (CPUID 7, ecx bit 22); ``cpu_place`` is as in ``ProcessFacts``. With ``rings``, the shape of the
    rings, entries of a known size are written without a call. Handlers do nothing once the ``life_mark`` shows that the
    tool has ended (``native.process_page``).
    """

    maps: Mapping[MapName, MapPlace]
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
    has_rdpid: bool = True
    rings: RingShape | None = None
    life_mark: int | None = None
    cpu_place: int | None = None


class Part(NamedTuple):
    """One of several handlers at one instruction, with the environment of its code."""

    assembled: Assembled
    around: Surroundings


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """
    Properties of a process that routines need, and the addresses of its pages (``native.process_page``).

    ``tid_place`` is the place of the thread id in the C library's data, and ``cpu_place`` that of the CPU's number
    (``cpu_id`` of struct rseq). Both are in bytes from the thread pointer; None: unknown. With ``has_rdpid`` an x86-64
    processor has the instruction, and needs no ``cpu_place``. ``first_stack`` is the end of the stack that the process
    began with.
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
