"""The tree of a whole program: its declarations and functions, and the points with their blocks."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.quickenum import Enum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.syntax import tree
    from dprobes.source import Span

__all__ = [
    "PERIOD_MAX",
    "PERIOD_MIN",
    "Attribute",
    "BlockKind",
    "Function",
    "Parameter",
    "Point",
    "PointKind",
    "Probe",
    "ProgramTree",
    "ToolBlock",
]


PERIOD_MIN, PERIOD_MAX = 10_000_000, 86_400_000_000_000
"""How many nanoseconds there are between two executions of a block, from 10ms to one day."""


class PointKind(Enum):
    """Say what a point before a block is."""

    CODE = "code"
    INLINE = "inline"
    WATCH = "watch"
    SAMPLE = "sample"
    USDT = "usdt"
    TRACEPOINT = "tracepoint"
    SYSTEM_CALL = "syscall"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a point or a function; ``type`` is None where only its name is given."""

    name: str
    type: tree.TypeName | None
    span: Span


@dataclass(frozen=True, slots=True)
class Point:
    """
    A place before a block.

    ``module`` is empty where the program or the command line says it; ``place`` is what stands behind its colon.
    ``number`` is a frequency, ``access`` that of a watchpoint, ``parameters`` is None
    where there are no parentheses.
    """

    kind: PointKind
    span: Span
    module: str = ""
    place: str = ""
    at_return: bool = False
    parameters: tuple[Parameter, ...] | None = None
    number: int = 0
    access: str = ""
    type: tree.TypeName | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A word in brackets before a point, with its value."""

    name: str
    value: int | str | None
    span: Span


@dataclass(frozen=True, slots=True)
class Probe:
    """
    Points, their condition, and the block that is executed there.

    ``line`` is the line of the source that the points are at, 0 if they are at none; ``order`` is where among probes it
    is written.
    """

    points: tuple[Point, ...]
    attributes: tuple[Attribute, ...]
    condition: tree.Expression | None
    body: tree.Block
    span: Span
    line: int = 0
    order: int = 0


class BlockKind(Enum):
    """Say when the tool executes a block of its own."""

    BEGIN = "begin"
    EVERY = "every"
    END = "end"


@dataclass(frozen=True, slots=True)
class ToolBlock:
    """A block that the tool executes; ``period`` is in nanoseconds, and how it is ``written`` stands in messages."""

    kind: BlockKind
    body: tree.Block
    span: Span
    written: str
    period: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the program."""

    name: str
    type: tree.TypeName
    parameters: tuple[Parameter, ...]
    body: tree.Block
    span: Span


@dataclass(frozen=True, slots=True)
class ProgramTree:
    """A whole program; ``module`` and ``attributes`` are those of its ``module`` statement."""

    module: str = ""
    attributes: tuple[Attribute, ...] = ()
    declarations: Sequence[tree.Declaration] = field(default=())
    functions: Sequence[Function] = field(default=())
    probes: Sequence[Probe] = field(default=())
    blocks: Sequence[ToolBlock] = field(default=())

    @property
    def parts(self) -> list[Probe | ToolBlock]:
        """Its probes and blocks in the order in which they are written."""
        return sorted((*self.probes, *self.blocks), key=lambda each: each.order)
