"""
Machine code that is assembled once, and copied to many addresses with different numbers in it.

::

    assembler ─► template: bytes, distances to fixed addresses, fields ─► copy: bytes for one address and its numbers

A *field* is a number in an instruction that depends on a variable, such as the number of a probepoint. An assembler
notes the fields of numbers that are ``VaryingNumber``. The form of an instruction depends on its number, so a field has
the range of numbers for which the form is the same; a copy outside of that range needs another template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

__all__ = ["CodeTemplate", "Field", "Varying", "VaryingNumber"]

_DISTANCE_SIZE = 4


class Varying(NamedTuple):
    """
    Dependence of a number on the variable with the index ``variable``, by which it grows ``growth`` times.

    The variable is ``now`` in the code that is assembled.
    """

    variable: int
    growth: int
    now: int

    def with_value(self, number: int) -> VaryingNumber:
        """Return ``number`` as an integer that varies: it is ``number`` if the variable has its present value."""
        return VaryingNumber.of(number, self.variable, self.growth, number - self.growth * self.now)


class VaryingNumber(int):
    """Number that is ``base`` plus ``growth`` times the variable with the index ``variable``."""

    variable: int
    growth: int
    base: int

    @classmethod
    def of(cls, number: int, variable: int, growth: int, base: int) -> Self:
        """
        Return ``number`` as an integer with the rule by which it varies: ``base`` plus ``growth`` times a variable.

        ``variable`` is the index of the variable.
        """
        made = cls(number)
        made.variable, made.growth, made.base = variable, growth, base
        return made


class Field(NamedTuple):
    """
    Number of ``size`` bytes at ``place`` in code: ``base`` plus ``growth`` times a variable.

    The code is the same for numbers from ``first`` to ``last``. A field of size 0 stands for an instruction whose form
    implies its number.
    """

    place: int
    size: int
    variable: int
    base: int
    growth: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class CodeTemplate:
    """
    Code whose copies differ in ``fields``, and in ``distances``: (place of 32 bits, target address) each.

    ``jumps`` are pairs of the place of a 32-bit distance and the place in the code that it leads to. ``marks`` are
    further places in the code.
    """

    code: bytes
    fields: tuple[Field, ...] = ()
    distances: tuple[tuple[int, int], ...] = ()
    jumps: tuple[tuple[int, int], ...] = ()
    marks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.code)

    def copy_at(self, address: int, values: Sequence[int]) -> bytearray | None:
        """
        Return the code for an address, with the values of all variables; None if a field has another form.

        Raise ``OverflowError`` if a target of ``distances`` is too far away.
        """
        code = bytearray(self.code)
        for place, size, variable, base, growth, first, last in self.fields:
            number = base + growth * values[variable]
            if not first <= number <= last:
                return None
            code[place : place + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
        for place, target in self.distances:
            end = place + _DISTANCE_SIZE
            code[place:end] = (target - address - end).to_bytes(_DISTANCE_SIZE, "little", signed=True)
        return code

    def has_form(self, values: Sequence[int]) -> bool:
        """Return True if each field can encode its number for these values of the variables."""
        return all(
            first <= base + growth * values[variable] <= last
            for _, _, variable, base, growth, first, last in self.fields
        )

    def with_part(self, place: int, size: int, part: CodeTemplate) -> CodeTemplate:
        """
        Return the template with ``part`` instead of the ``size`` bytes at ``place``, which have no fields.

        The marks of the part follow those of this template.
        """
        shift = len(part) - size
        last = place + size

        def moved(at: int) -> int:
            return at + shift if at >= last else at

        code = bytearray(self.code[:place] + part.code + self.code[last:])
        jumps = []
        for at, to in self.jumps:
            start, target = moved(at), moved(to)
            end = start + _DISTANCE_SIZE
            code[start:end] = (target - end).to_bytes(_DISTANCE_SIZE, "little", signed=True)
            jumps.append((start, target))
        return CodeTemplate(
            bytes(code),
            (
                *(field._replace(place=moved(field.place)) for field in self.fields),
                *(field._replace(place=field.place + place) for field in part.fields),
            ),
            (*((moved(at), to) for at, to in self.distances), *((at + place, to) for at, to in part.distances)),
            (*jumps, *((at + place, to + place) for at, to in part.jumps)),
            (*(moved(mark) for mark in self.marks), *(mark + place for mark in part.marks)),
        )
