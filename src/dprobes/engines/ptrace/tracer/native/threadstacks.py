"""
What is on the stacks of threads: from their stack pointers to the ends of the mappings.

Where a signal has interrupted a thread on another stack, the frame of that signal says where, and from there on that
one is looked at as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.target.processmaps import Mapping

__all__ = ["stacks_from"]

_STACK_MAX = 16 << 20
_WORD = 8
_SELECTORS = bytes.fromhex("3300 0000 0000 2b00")
"""What a signal frame holds behind flags: cs, gs, fs and ss (``struct sigcontext_64``)."""
_SP_BEFORE = 24
"""How far before these the stack pointer is that the signal has interrupted."""


def stacks_from(space: AddressSpace, mappings: Sequence[Mapping], pointers: Iterable[int]) -> list[bytes] | None:
    """Return what is on stacks, each from a word on; None if one is too large, or cannot be read."""
    found: list[bytes] = []
    waiting = list(pointers)
    seen: dict[int, int] = {}
    while waiting:
        pointer = waiting.pop() & -_WORD
        stack = _mapping_of(mappings, pointer)
        if stack is None or stack.end - pointer > _STACK_MAX:
            return None
        end = seen.get(stack.start, stack.end)
        if pointer >= end:
            continue
        try:
            data = space.read(pointer, end - pointer)
        except OSError:
            return None
        seen[stack.start] = pointer
        found.append(data)
        waiting += (sp for sp in _interrupted(data) if (place := _mapping_of(mappings, sp)) and place is not stack)
    return found


def _mapping_of(mappings: Sequence[Mapping], address: int) -> Mapping | None:
    return next((mapping for mapping in mappings if mapping.start <= address < mapping.end), None)


def _interrupted(data: bytes) -> Iterator[int]:
    """Give the stack pointers in what looks like frames of signals."""
    place = data.find(_SELECTORS)
    while place >= 0:
        if place >= _SP_BEFORE and not place % _WORD:
            yield int.from_bytes(data[place - _SP_BEFORE : place - _SP_BEFORE + _WORD], "little")
        place = data.find(_SELECTORS, place + 1)
