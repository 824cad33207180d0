"""
Where a variable is, or what it is, as a tree of what has to be computed at the hit.

Nothing here is of a process: registers and memory are named, not read. Numbers are words that wrap, without a sign;
operators whose names end with ``s`` take them as signed ones.
"""

from __future__ import annotations

from dataclasses import field

from dprobes.lazydataclass import dataclass

__all__ = [
    "SIZE_MAX",
    "Choice",
    "Computed",
    "Extended",
    "FrameAddressOf",
    "InMemory",
    "InRegister",
    "Known",
    "LinkAddress",
    "Loaded",
    "Location",
    "Node",
    "Number",
    "Operation",
    "Piece",
    "Pieces",
    "RegisterContent",
    "Unavailable",
    "size_of_tree",
]

SIZE_MAX = 64
"""Nodes of a tree; compilers make some ten."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: int


@dataclass(frozen=True, slots=True)
class RegisterContent:
    """What is in a register, by DWARF's number."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The run-time address of what has this link address."""

    address: int


@dataclass(frozen=True, slots=True)
class FrameAddressOf:
    """The canonical frame address at an instruction: what the unwind table of the function says."""

    address: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """So many bytes of memory, with zeros above them."""

    address: Node
    size: int
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of C on one or two nodes: ``+ - * / % & | ^ << >> ~ neg``, ``/s %s >>s``, and ``== <s`` …."""

    operator: str
    left: Node
    right: Node | None = None
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Extended:
    """The low bytes of a node, with zeros or copies of their sign above them."""

    node: Node
    size: int
    is_signed: bool
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """One node if a condition is not 0, else another one."""

    condition: Node
    chosen: Node
    otherwise: Node
    nodes: int = field(default=0, compare=False)


Node = Number | RegisterContent | LinkAddress | FrameAddressOf | Loaded | Operation | Extended | Choice


def size_of_tree(*nodes: Node | None) -> int:
    """Return how many nodes there are."""
    return sum(getattr(node, "nodes", 0) or 1 for node in nodes if node is not None)


@dataclass(frozen=True, slots=True)
class InMemory:
    """The variable is in memory at an address."""

    address: Node


@dataclass(frozen=True, slots=True)
class InRegister:
    """The variable is in a register."""

    number: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The variable is nowhere, but its value is known."""

    value: Node


@dataclass(frozen=True, slots=True)
class Known:
    """The variable is nowhere, but its bytes are known."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The variable is nowhere, for a reason."""

    reason: str
    is_at_entry: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a variable: ``size`` bytes."""

    location: Location
    size: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The variable is in parts, in order."""

    pieces: tuple[Piece, ...]


Location = InMemory | InRegister | Computed | Known | Unavailable | Pieces
