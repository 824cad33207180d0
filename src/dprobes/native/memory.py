"""
Where the maps of a handler are in the memory that the probed process shares with us.

eBPF names maps, and the kernel gives them addresses; here they are parts of one mapping, whose place is known before
code is generated.
"""

from __future__ import annotations

import enum

from dprobes.lazynamedtuple import NamedTuple

__all__ = ["MapPlace", "MapShape"]


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
