"""
The nodes of syntax trees: traversal and comparison need only the declared fields.

A node's children are the nodes in its fields, alone or in tuples and lists, in the order of the fields. As in Python's
``ast.AST``, one constructor serves all nodes: code generated for each of a hundred classes would delay every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Node"]


@dataclass_transform(frozen_default=True)
class Node:
    """A node of a tree; each derived class declares the fields of its nodes, which cannot be changed."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    """The names of the fields, in the order of the constructor's arguments."""

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[misc]  # not assigned to elsewhere

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = dict(zip(self.__match_args__, values, strict=False))
        if len(fields) < len(values) or not named.keys().isdisjoint(fields):
            raise TypeError(f"{type(self).__name__}() has too many arguments")
        fields.update(named)
        if missing := [name for name in self.__match_args__ if name not in fields and not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__}() needs {', '.join(missing)}")
        if unknown := fields.keys() - set(self.__match_args__):
            raise TypeError(f"{type(self).__name__}() has no {', '.join(sorted(unknown))}")
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to '{name}': a node is immutable")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        values = zip(self.__match_args__, self._values(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values)})"

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def replaced(self, **changes: Any) -> Self:
        """Return a copy of the node with the fields in ``changes`` replaced."""
        return type(self)(**{**self.__dict__, **changes})

    def children(self) -> Iterator[Node]:
        """Iterate over the nodes that are values of this node's fields, or elements of these values."""
        for value in self._values():
            inner = value if isinstance(value, tuple | list) else (value,)
            yield from (each for each in inner if isinstance(each, Node))

    def walk(self) -> Iterator[Node]:
        """Iterate over this node and all its descendants, in the order of the fields, without a limit of depth."""
        left: list[Node] = [self]
        while left:
            each = left.pop()
            yield each
            left += reversed([*each.children()])
