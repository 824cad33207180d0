"""Machine code from a generator, and its environment in the probed process."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Helper
    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.code_template import Varying
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
    The address of an instruction that may fault, and the address at which the thread continues after the fault.

    As with the kernel's exception table, an access to memory that may be unmapped needs no test before it.
    """

    instruction: int
    target: int


class MapShape(enum.Enum):
    """Data structure of a map of eBPF in a process's memory."""

    VALUES = "values"
    """An array of values of one size."""
    HASH = "hash"
    """A hash table (``shared_hash_table``)."""
    RINGS = "rings"
    """A ring for each CPU (``handler_ring``)."""


class MapPlace(NamedTuple):
    """
    A map in the memory that the probed process shares with the tool.

    ``stride`` is the distance in bytes between two values of VALUES; 0 for other shapes.
    """

    address: int
    shape: MapShape = MapShape.VALUES
    stride: int = 0


class CodeSwitch(NamedTuple):
    """
    A switch at ``address``: a NOP with the bytes ``on``, which the jump ``off`` to ``end`` can replace.

    The jump disables the code before ``end``, which serves only the handlers with the numbers ``parts``.
    """

    address: int
    on: bytes
    off: bytes
    end: int
    parts: tuple[int, ...]


class NativeCode(NamedTuple):
    """Machine code to be executed at ``address``; it may depend on its position."""

    address: int
    code: bytes
    fixups: tuple[Fixup, ...] = ()
    switches: tuple[CodeSwitch, ...] = ()

    @property
    def end(self) -> int:
        """Address of the first byte after the code."""
        return self.address + len(self.code)


class Surroundings(NamedTuple):
    """
    The environment of a handler's code.

    ``maps`` are the places of maps in the process. ``routines`` are the addresses of the routines for helpers,
    ``map_routines`` those of routines for one map; a direct call must reach them. ``has_rdpid`` is true if the
    processor has RDPID (CPUID 7, ecx bit 22); ``cpu_place`` is as in ``ProcessFacts``. With ``rings``, the shape of the
    rings, inline code writes entries of a known size. ``life_mark`` is the address of the life mark
    (``native.process_page``): handlers do nothing once it shows that the tool has ended; None: they do not test it.
    """

    maps: Mapping[MapName, MapPlace]
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
    has_rdpid: bool = True
    rings: RingShape | None = None
    life_mark: int | None = None
    cpu_place: int | None = None


class Part(NamedTuple):
    """
    One of several handlers at one instruction, with the environment of its code.

    ``varying`` are the immediates that differ between handlers with the same code, by the indices of instructions.
    """

    assembled: Assembled
    around: Surroundings
    varying: Mapping[int, Varying] = MappingProxyType({})


class ProcessFacts(NamedTuple):
    """
    Properties of a process that routines need, and the addresses of its pages (``native.process_page``).

    ``tid_place`` is the offset of the thread id in the C library's data, and ``cpu_place`` that of ``cpu_id`` in struct
    rseq. Both are in bytes from the thread pointer; None: unknown. x86-64 does not use ``cpu_place``: with
    ``has_rdpid`` it reads the CPU's number by RDPID, else by LSL. ``life_mark`` is an address; None: there is none.
    ``first_stack`` is the address after the main thread's stack; None: unknown.
    """

    process_page: int
    clock_page: int
    tid_place: int | None = None
    has_rdpid: bool = True
    cpu_place: int | None = None
    life_mark: int | None = None
    first_stack: int | None = None


class Runtime(NamedTuple):
    """
    Code of the routines that handlers of a process call.

    ``routines`` and ``map_routines`` have the address of each.
    """

    code: NativeCode
    routines: Mapping[Helper, int]
    map_routines: Mapping[tuple[MapName, Helper], int]
