"""
Named tuples that cost little to import: what ``typing.NamedTuple`` compiles for each class is made when it is used.

The standard library compiles a ``__new__`` for each class, which takes 0.1 ms; a start has sixty of them. Here it is
compiled for classes of more than a few instances. Instances behave alike: they are tuples, with ``_replace``,
``_asdict``, ``_make``, patterns and pickles. Annotations must be strings.
"""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined] # how the standard library's give their fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import NamedTuple, Self  # noqa: TID251 - what type checkers know

__all__ = ["NamedTuple"]

_FEW = 6
"""Instances of a class that are made without a compiled ``__new__``: most classes of a start have no more."""

_new: Callable[..., Any] = tuple.__new__


class _Tuple(tuple[Any, ...]):
    """What all named tuples have in common."""

    __slots__ = ()

    _fields: tuple[str, ...] = ()
    _field_defaults: Mapping[str, object] = {}

    @classmethod
    def _make(cls, values: Iterable[object]) -> Self:
        made: Self = _new(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, /, **changes: object) -> Self:
        made = self._make(map(changes.pop, self._fields, self))
        if changes:
            raise ValueError(f"Got unexpected field names: {list(changes)!r}")
        return made

    def _asdict(self) -> dict[str, object]:
        return dict(zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{self.__class__.__name__}({fields})"

    def __getnewargs__(self) -> tuple[object, ...]:
        return tuple(self)


class _Maker(type):
    """Make a named tuple of each class that is derived from ``NamedTuple``."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """Return the class, which has another base and no metaclass."""
        fields = tuple(namespace.get("__annotations__", ()))
        defaults = {field: namespace.pop(field) for field in fields if field in namespace}
        assert fields[len(fields) - len(defaults) :] == tuple(defaults), f"a field of '{name}' lacks a default"
        namespace |= {field: _tuplegetter(place, f"Field number {place}") for place, field in enumerate(fields)}
        namespace |= {"__slots__": (), "_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
        if "__new__" not in namespace:
            namespace["__new__"] = _lazy_new(fields, defaults)
        return type(name, tuple(_Tuple if type(base) is _Maker else base for base in bases), namespace)


def _lazy_new(fields: tuple[str, ...], defaults: Mapping[str, object]) -> Callable[..., Any]:
    remaining, count = _FEW, len(fields)

    def __new__(cls: type, /, *arguments: object, **keywords: object) -> object:  # noqa: N807
        nonlocal remaining
        remaining -= 1
        if remaining >= 0:
            if len(arguments) == count and not keywords:
                return _new(cls, arguments)
            given = {**defaults, **dict(zip(fields, arguments, strict=False)), **keywords}
            if len(given) == count and len(arguments) <= count and keywords.keys().isdisjoint(fields[: len(arguments)]):
                return _new(cls, itemgetter(*fields)(given) if count > 1 else given.values())
        owner = next(base for base in cls.__mro__ if base.__dict__.get("__new__") is holder)
        made = _compiled(fields, defaults)
        made.__qualname__ = f"{owner.__qualname__}.__new__"
        owner.__new__ = made  # type: ignore[method-assign]
        return made(cls, *arguments, **keywords)

    holder = staticmethod(__new__)
    return holder


def _compiled(fields: tuple[str, ...], defaults: Mapping[str, object]) -> Callable[..., Any]:
    """Compile the ``__new__`` of a class."""
    values = ", ".join(fields)
    text = f"lambda _cls, {values}: _new(_cls, ({values}{',' if fields else ''}))"
    made: Callable[..., Any] = eval(text, {"_new": _new})  # noqa: S307 - our own text
    made.__name__ = "__new__"
    made.__defaults__ = tuple(defaults.values())
    return made


if not TYPE_CHECKING:
    NamedTuple = type.__new__(_Maker, "NamedTuple", (), {})
