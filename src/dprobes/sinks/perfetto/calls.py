"""
Which call a return ends: the calls that a thread is in, where a program probes entries and returns alike.

A stack grows down. So a call has ended whose return address was below where the stack pointer is now: its return was
not seen because a record was lost, or because ``longjmp`` went past it. One whose return address is at the stack
pointer when a function is entered may have called that as its last act, and return together with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord
    from dprobes.record.probeinfo import Place

__all__ = ["CallStack"]

_SAME_STACK = 8 << 20
"""Bytes: what is farther away is another stack, as a coroutine's, and tells nothing of the calls on this one."""


class _Call(NamedTuple):
    module: str
    symbol: str
    sp: int | None


class CallStack:
    """Hold the calls of one thread that have not returned yet."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._returned: int | None = None
        """The stack pointer after the return that was seen last, if nothing was entered since."""

    def enter(self, place: Place, record: LogRecord) -> int:
        """Note a call; return how many others have ended unseen before."""
        ended = 0
        while self._calls and any(_is_above(sp, self._calls[-1].sp) for sp in (record.sp, self._returned)):
            self._calls.pop()
            ended += 1
        self._returned = None
        self._calls.append(_Call(place.module, place.symbol, record.sp))
        return ended

    def leave(self, place: Place, record: LogRecord) -> int | None:
        """Note a return; return how many calls end with the one that it is of, or None if that was not seen."""
        self._returned = record.sp
        index = self._index_of(place, record)
        if index is None:
            return None
        ended = len(self._calls) - index
        del self._calls[index:]
        return ended

    def _index_of(self, place: Place, record: LogRecord) -> int | None:
        """Return which call a return is of: the one at that stack pointer, or else the last one of the function."""
        found = None
        for index in range(len(self._calls) - 1, -1, -1):
            module, symbol, sp = self._calls[index]
            if symbol == place.symbol and module == place.module:
                if sp is None or record.sp is None or sp + record.word_size == record.sp:
                    return index
                found = index if found is None else found
        return found


def _is_above(sp: int | None, other: int | None) -> bool:
    return sp is not None and other is not None and 0 < sp - other < _SAME_STACK
