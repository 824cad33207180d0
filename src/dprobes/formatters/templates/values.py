"""The values that templates take out of records."""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["AMOUNT", "ERROR_MAX", "Fault", "Value", "readable_number"]

ERROR_MAX = 4095
"""MAX_ERRNO: what the kernel returns from here up to -1 is an error (include/linux/err.h)."""

_AMOUNT_MAX = {4: 1 << 27, 8: 1 << 40}
"""Below this, numbers of so many bytes are amounts rather than addresses: 32-bit programs begin behind the first."""

_INT_END = 1 << 32

_SMALL = {4: _AMOUNT_MAX[4], 8: _INT_END - ERROR_MAX}
"""Below this they are nothing else."""

AMOUNT = min(_SMALL.values())
"""Below this a number of any size is an amount."""


@dataclass(frozen=True, slots=True)
class Fault:
    """
    Data that could not be read: the address where that failed, or a selector.

    With ``is_unseen`` it is of the entry of a call, of which only the return was seen.
    """

    address: int
    is_selector: bool = False
    is_unseen: bool = False

    def __str__(self) -> str:
        if self.is_unseen:
            return "<entry not seen>"
        return f"<{'selector ' if self.is_selector else ''}fault at {self.address:#x}>"


Value = int | str | bytes | tuple[int, ...] | Fault | None
"""The value of a field; None says that the data ended before it."""


def readable_number(number: int, size: int) -> str:
    """
    Return an unsigned number of ``size`` bytes as people take it: amounts in decimal, what looks like an address not.

    What may be an error, -4095 to -1, is negative; also as an ``int`` of 32 bits that stands in 8 bytes.
    """
    if size < 4 or number < _SMALL[size]:
        return str(number)
    if number >= (1 << 8 * size) - ERROR_MAX:
        return str(number - (1 << 8 * size))
    if number < _INT_END:
        return str(number - _INT_END) if size == 8 else f"{number:#x}"
    return str(number) if number < _AMOUNT_MAX[size] else f"{number:#x}"
