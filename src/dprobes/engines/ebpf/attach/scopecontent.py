"""How a scope is filled: with a process, and with what it has started so far."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.layout import SCOPE_VALUE
from dprobes.engines.linux.procfs import children_of, thread_state, threads_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KEY", "descendants", "plant", "put", "withdraw"]


class ScopeMap(Protocol):
    """The map of the processes in scope; their ids are keys."""

    def __contains__(self, key: bytes) -> bool: ...

    def __getitem__(self, key: bytes) -> bytes: ...

    def __setitem__(self, key: bytes, value: bytes) -> None: ...

    def discard(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""


KEY = struct.Struct("=I")
_ENDED = ("Z", "X")


def plant(scope: ScopeMap, set_alive: Callable[[int], None], pid: int, *, follow: bool) -> int:
    """
    Put a process in an empty scope, and with ``follow`` what it has started; OSError as the kernel answers.

    ``set_alive`` says how many there are. Return how many more there are than that, or fewer.
    """
    wanted = [pid, *(descendants(pid) if follow else ())]
    # Nobody else counts while the map is empty.
    set_alive(len(wanted))
    extra = sum(put(scope, each) for each in wanted)
    # Those that were started meanwhile, by processes that were not in scope yet.
    for each in descendants(pid) if follow else ():
        if KEY.pack(each) not in scope and thread_state(each) not in _ENDED:
            extra += 1 + put(scope, each)
    return extra


def put(scope: ScopeMap, pid: int, number: int | None = None) -> int:
    """Put a process in scope, by another number if one is given; return -1 if it has ended already, else 0."""
    key = KEY.pack(pid if number is None else number)
    scope[key] = bytes(SCOPE_VALUE.size)
    # One that ended before had no key when it did.
    return 0 if _has_living_thread(pid) else withdraw(scope, key)


def withdraw(scope: ScopeMap, key: bytes) -> int:
    """Delete the key of a process whose end no program has counted; return -1 if it was there, else 0."""
    try:
        _, _, has_ended = SCOPE_VALUE.unpack(scope[key])
    except KeyError:
        return 0
    return -1 if not has_ended and scope.discard(key) else 0


def _has_living_thread(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(thread_state(tid) not in _ENDED for tid in threads_of(pid))
    return False


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have, and so on."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            children = [child for tid in threads_of(parent) for child in children_of(parent, tid)]
            found += children
            waiting += children
    return found
