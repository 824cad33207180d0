"""The parts of a program with their types: functions, probes, and blocks of the tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.dpc.syntax import programtree
    from dprobes.dpc.typedtree import typed, typedstatement
    from dprobes.dpc.typedtree.logpaths import LogPaths
    from dprobes.dpc.typedtree.scope import FunctionSignature

__all__ = ["TypedBlock", "TypedFunction", "TypedProbe"]


@dataclass(frozen=True, slots=True)
class TypedFunction:
    """A function of the program with its types; ``slots`` counts the variables of its blocks."""

    signature: FunctionSignature
    body: typedstatement.Statement
    slots: int


@dataclass(frozen=True, slots=True)
class TypedProbe:
    """A probe with its types ``at`` some of its points, and what it may print."""

    probe: programtree.Probe
    at: tuple[programtree.Point, ...]
    condition: typed.Value | None
    body: typedstatement.Statement
    slots: int
    paths: LogPaths


@dataclass(frozen=True, slots=True)
class TypedBlock:
    """A block of the tool with its types; ``slots`` counts its variables."""

    block: programtree.ToolBlock
    body: typedstatement.Statement
    slots: int
