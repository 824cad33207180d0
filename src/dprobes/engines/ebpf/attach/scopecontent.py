"""How a scope is filled: with a process, and with what it has started so far."""

from __future__ import annotations

import contextlib
import struct

from dprobes.engines.linux.procfs import children_of, thread_state, threads_of

# Nothing that takes long is imported here: no typing.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class ScopeMap(Protocol):
        """The map of the processes in scope; their ids are keys and values."""

        def __contains__(self, key: bytes) -> bool: ...

        def __setitem__(self, key: bytes, value: bytes) -> None: ...

        def discard(self, key: bytes) -> bool:
            """Delete a key; return whether it was there."""


__all__ = ["KEY", "descendants", "plant", "put"]

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
    scope[key] = key
    # One that ended before had no key that its end could take away.
    return -1 if not _has_living_thread(pid) and scope.discard(key) else 0


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
