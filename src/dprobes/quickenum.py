"""
Enumerations that cost little to import: they are made in the way in which the standard library makes its own.

``class X(enum.Enum)`` gives each member through a descriptor of its own, which takes 5 µs; a start has five hundred of
them. ``enum._simple_enum``, by which the modules of the standard library have been imported more quickly since Python
3.11, makes equal classes in less than half of the time. Where it is missing, they are made as usual.

The descriptors that it leaves call a function written in Python at each use of a member, as does ``value``. So members
are put into their classes as they are, and ``name`` and ``value`` are plain properties.
"""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enum import Enum, IntEnum, IntFlag

__all__ = ["Enum", "IntEnum", "IntFlag"]

_quickly: Any = getattr(enum, "_simple_enum", None)
_GETTERS = {"name": property(attrgetter("_name_")), "value": property(attrgetter("_value_"))}


class _Maker(type):
    """Make an enumeration of each class that is derived from one of ours."""

    _base: type[enum.Enum]

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, namespace)
        (own,) = bases
        base = own._base  # type: ignore[attr-defined]  # noqa: SLF001 - our own
        plain = type(name, (), namespace)
        made = _quickly(base)(plain)
        for member in made.__members__:
            type.__setattr__(made, member, made.__members__[member])
        for attribute, getter in _GETTERS.items():
            if attribute not in made.__members__:
                type.__setattr__(made, attribute, getter)
        return made


def _maker(base: type[enum.Enum]) -> Any:
    return base if _quickly is None else _Maker(base.__name__, (), {"_base": base})


if not TYPE_CHECKING:
    Enum, IntEnum, IntFlag = _maker(enum.Enum), _maker(enum.IntEnum), _maker(enum.IntFlag)
