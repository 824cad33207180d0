"""The description of the probepoint that a record came from."""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DataReader", "Place", "routine_of"]

_NUMBER = r"0x[0-9a-f]+"
_DISTANCE = r" *[+-] *(0x[0-9a-f]+|[0-9]+)\Z"


@lru_cache(4096)
def routine_of(symbol: str) -> str:
    """Return the function in ``function+0x4``; nothing where there is only an offset in a file."""
    return "" if re.fullmatch(_NUMBER, symbol) else re.sub(_DISTANCE, "", symbol)


class DataReader(Protocol):
    """Know what the records of a program say (``LogRecord``, which knows this module)."""

    def values(self, record: Any, /) -> Mapping[str, object] | None:
        """Return the values of a record's data by their names; None if nothing is known of it."""

    def function(self, record: Any, /) -> str:
        """Return the function that a record with a place is of; nothing if nobody knows."""


@dataclass(frozen=True, slots=True)
class Place:
    """
    Name a probe for people: its module, and the function and offset where it is.

    ``function`` is not empty where the probe stands for many functions, so that a record must say which. ``placed`` is
    the file offset of the breakpoint, if that is not at the place that was written. ``at_return`` says that it is the
    return of the function that is probed, ``is_paired`` that the program probes both its entry and its return.
    ``is_code`` says that hits are at ``symbol``; ``99hz`` of a sampler and the variable of a watchpoint are no code.
    ``reader`` is there where somebody has given the records' data names; places are the same whether or not.
    """

    module: str
    symbol: str
    function: str = ""
    placed: int | None = None
    at_return: bool = False
    is_paired: bool = False
    is_code: bool = True
    reader: DataReader | None = field(default=None, compare=False, repr=False)

    @property
    def routine(self) -> str:
        """The function that the probepoint is in, as far as the program or its symbols say; empty if they do not."""
        return self.function or (routine_of(self.symbol) if self.is_code else "")

    @property
    def is_at_ip(self) -> bool:
        """Whether the ip in a record is the address of ``symbol``."""
        return self.is_code and not self.at_return
