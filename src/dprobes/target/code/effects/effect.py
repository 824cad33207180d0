"""What one instruction does to registers and memory, all of it from the values that there were before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NOTHING", "Effect", "Load", "Store", "Sum", "signed"]


class Sum(NamedTuple):
    """A register becomes another one, or 0 where ``base`` is "", plus a number; one called "" is none."""

    register: str
    base: str
    addend: int


class Store(NamedTuple):
    """A register, or 0 where it is "", is stored at another one plus a number: its ``size`` lowest bytes."""

    register: str
    base: str
    displacement: int
    size: int


class Load(NamedTuple):
    """A register becomes what is at another one plus a number; one called "" is none."""

    register: str
    base: str
    displacement: int
    size: int
    is_signed: bool = False


class Effect(NamedTuple):
    """What an instruction does before the next one follows."""

    sums: Sequence[Sum] = ()
    stores: Sequence[Store] = ()
    loads: Sequence[Load] = ()


NOTHING = Effect()


def signed(value: int, bits: int) -> int:
    """Return the number whose two's complement is in the lowest bits of a value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value
