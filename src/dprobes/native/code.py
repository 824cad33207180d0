"""Code for a processor, as it comes from a generator: bytes for one address, and what may fault in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.asm.isa import Helper
    from dprobes.bpf.layout import MapName
    from dprobes.native.faults import Fixup
    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.ring import RingShape

__all__ = ["NativeCode", "Surroundings"]


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Hold machine code that runs at ``address``."""

    address: int
    code: bytes
    fixups: tuple[Fixup, ...] = ()

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
