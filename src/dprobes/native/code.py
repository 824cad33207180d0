"""Code for a processor, as it comes from a generator: bytes for one address, and what may fault in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.isa import Helper
    from dprobes.bpf.layout import MapName
    from dprobes.native.faults import Fixup
    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.ring import RingShape

__all__ = ["CodeSwitch", "NativeCode", "Part", "Surroundings"]


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
    there any more (``native.lifemark``).
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
