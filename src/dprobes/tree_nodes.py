"""
The nodes of languages' trees: traversal and comparison need only the declared fields.

A node is a frozen dataclass. Its children are the nodes in its fields, alone or in tuples, in the order of the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Node"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Node:
    """A node of a tree; each derived class is a frozen dataclass of the fields that it declares."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    """The names of the fields, as in every dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def children(self) -> Iterator[Node]:
        """Iterate over the nodes in this node's fields."""
        for name in self.__match_args__:
            value = getattr(self, name)
            yield from (inner for inner in (value if isinstance(value, tuple) else (value,)) if isinstance(inner, Node))

    def walk(self) -> Iterator[Node]:
        """Iterate over this node and all its descendants, in the order of the fields, without a limit of depth."""
        left: list[Node] = [self]
        while left:
            each = left.pop()
            yield each
            left += reversed([*each.children()])
