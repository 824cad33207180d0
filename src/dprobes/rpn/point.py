"""The properties of a probepoint that its handler uses, in every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.rpn.isa import DEFAULT_EXCEPTION_MASK, EX_LOGMAX, HEAPMAX, JMPMAX, LOGMAX

if TYPE_CHECKING:
    from dprobes.arch.arguments import Argument
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """Hold what a machine needs to know of the probepoint; ``offset`` is that in the module."""

    module: str = ""
    offset: int = 0
    program_id: int = 0
    major: int = 0
    minor: int = 0
    jmpmax: int = JMPMAX
    logmax: int = LOGMAX
    ex_logmax: int = EX_LOGMAX
    heap: int = HEAPMAX
    exception_mask: int = DEFAULT_EXCEPTION_MASK
    autostacktrace: bool = False
    arguments: tuple[Argument, ...] = ()
    """Where the arguments of a USDT probe are."""

    @classmethod
    def of(
        cls, program: Program, definition: ProbeDefinition, offset: int, arguments: tuple[Argument, ...] = ()
    ) -> Point:
        """Return the point of a definition that was resolved to ``offset`` in the module."""
        return cls(
            module=program.name,
            offset=offset,
            program_id=program.id,
            major=program.major,
            minor=definition.minor,
            jmpmax=program.jmpmax,
            logmax=program.logmax,
            ex_logmax=program.ex_logmax,
            heap=program.heap_size(definition),
            exception_mask=definition.exception_mask,
            autostacktrace=program.autostacktrace,
            arguments=arguments,
        )
