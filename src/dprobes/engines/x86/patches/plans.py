"""
What a plan says: by which method an instruction makes room for a jump, what is displaced, and where the jump may lead.

::

    method         bytes at the site                         what is displaced
    JUMP           e9 rel32 | rest of the instruction        the instruction, of five bytes or more
    PUN            e9 low | upper half of rel32 = what follows   the instruction, of any size
    WINDOW         e9 rel32 | rest of the last instruction   several instructions
    DEAD           e9 rel32, partly in dead bytes            the last instructions before bytes that nobody executes
    SHORT          eb rel8; e9 rel32 in dead bytes nearby    the instruction
    LEAD           as WINDOW, but from further ahead         some instructions before it, and the instruction

A *punned jump* shares its last bytes with what follows, which stays as it is: so the distance has given upper bytes,
and the trampoline must lie where they say. With prefixes in front that change nothing, other bytes are its upper ones.
A breakpoint on those bytes would lead it elsewhere: nobody may put one there, nor take another jump away.
"""

from __future__ import annotations

import enum
from itertools import accumulate

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

__all__ = ["CACHE_LINE", "JUMP_SIZE", "SHORT_JUMP_SIZE", "Method", "Plan", "Reach", "Refusal"]

JUMP_SIZE, SHORT_JUMP_SIZE = 5, 2
CACHE_LINE = 64
_PAGE = 4096


class Method(enum.Enum):
    """Say how the jump gets its bytes; the value completes "probed by a ..."."""

    JUMP = "jump"
    PUN = "punned jump"
    WINDOW = "jump over several instructions"
    DEAD = "jump into dead bytes behind it"
    SHORT = "short jump to dead bytes nearby"
    LEAD = "jump over what leads to it"

    @property
    def term(self) -> str:
        """What a summary says."""
        return _TERMS[self]


_TERMS = {
    Method.JUMP: "jump",
    Method.PUN: "punned jump",
    Method.WINDOW: "window",
    Method.DEAD: "dead bytes",
    Method.SHORT: "short jump",
    Method.LEAD: "window before it",
}


class Reach(NamedTuple):
    """Say that a jump behind that many ``prefixes`` leads to any address from ``first`` to ``last``."""

    prefixes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Say how the instruction at ``site`` is probed; all addresses are those of the process.

    The instructions with the bytes ``raw``, which have these ``sizes``, are displaced from ``start`` on: that is the
    site, or what follows the ``endbr64`` there, which stays, or what leads to the site. The first ``written`` bytes
    change. The jump lies there, or in ``padding``, and leads to where one of ``reaches`` says. A plan that
    ``emulates_call`` leaves no return address on a shadow stack.
    """

    method: Method
    site: int
    start: int
    raw: bytes
    sizes: tuple[int, ...]
    written: int
    reaches: tuple[Reach, ...]
    padding: int | None = None
    emulates_call: bool = False

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The addresses of the displaced instructions."""
        return tuple(accumulate(self.sizes[:-1], initial=self.start))

    @property
    def landings(self) -> tuple[int, ...]:
        """
        The bytes of the jump's distance, by their numbers, that are where displaced instructions begin.

        A context that was saved there before may be resumed at any time: so each must be an instruction that traps.
        """
        inner = (address - self.start - 1 for address in self.boundaries[1:])
        return tuple(place for place in inner if place < JUMP_SIZE - 1)

    @property
    def lead(self) -> int:
        """How many of the displaced bytes are executed before the probe is hit."""
        return max(0, self.site - self.start)

    def end(self, reach: Reach) -> int:
        """Return the end of the bytes that are the jump at the site: those behind the written ones must stay."""
        return self.start + (SHORT_JUMP_SIZE if self.padding is not None else reach.prefixes + JUMP_SIZE)

    @property
    def crosses_cache_line(self) -> bool:
        """Whether a processor may see a part of the change, so that all threads have to be stopped for it."""
        return self.start // CACHE_LINE != (self.start + self.written - 1) // CACHE_LINE

    @property
    def crosses_page(self) -> bool:
        """Whether the change is in two pages, and is half done if it is interrupted."""
        return self.start // _PAGE != (self.start + self.written - 1) // _PAGE


@dataclass(frozen=True, slots=True)
class Refusal:
    """Say why the instruction at ``site`` gets no jump, as a clause about ``it``."""

    site: int
    reason: str
