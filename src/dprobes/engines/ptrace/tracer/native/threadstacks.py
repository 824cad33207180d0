"""
What contexts a process may come back to: those on the stacks of threads, and those that it has saved elsewhere.

Stacks are looked through from the stack pointers to the ends of the mappings. Where a signal has interrupted a thread
on another stack, the frame of that signal says where, and from there on that one is looked at as well. A program that
switches between contexts by itself keeps them anywhere in its memory (``saved_parts``).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from io import FileIO

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.target.processmaps import Mapping

__all__ = ["saved_parts", "stacks_from"]

_STACK_MAX = 16 << 20
_FRAMES_MAX = 256
"""How many frames of signals may be on a stack: a program can fill it with what looks like some."""
_SAVED_MAX = 64 << 20
"""Bytes of memory in use that are looked through for saved contexts: it takes a quarter of a second."""
_MAPPED_MAX = 16 << 30
"""Bytes of mappings of which the kernel is asked what is in use."""
_WRITABLE_MAX = 1 << 13
"""Mappings of which the kernel is asked that: two system calls each."""
_RUN_MAX = 1 << 20
_RED_ZONE = 128
_PRESENT = 1 << 63 | 1 << 62
"""A page is there, or in the swap (Documentation/admin-guide/mm/pagemap.rst)."""
_WORD = 8
_SELECTORS = bytes.fromhex("3300 0000 0000 2b00")
"""What a signal frame holds behind flags: cs, gs, fs and ss (``struct sigcontext_64``)."""
_SP_BEFORE = 24
"""How far before these the stack pointer is that the signal has interrupted."""


def stacks_from(
    space: AddressSpace, mapping_at: Callable[[int], Mapping | None], pointers: Iterable[int]
) -> list[bytes] | None:
    """
    Return what is on stacks, each from a word on; None if one is too large, or cannot be read.

    ``mapping_at`` returns what is mapped at an address.
    """
    found: list[bytes] = []
    waiting = list(pointers)
    seen: dict[int, int] = {}
    while waiting:
        pointer = waiting.pop() & -_WORD
        stack = mapping_at(pointer)
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
        pointers = set(islice(_interrupted(data), _FRAMES_MAX + 1))
        if len(pointers) > _FRAMES_MAX:
            return None
        waiting += (sp for sp in pointers if (place := mapping_at(sp)) and place.start != stack.start)
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


def saved_parts(
    space: AddressSpace, tid: int, mappings: Sequence[Mapping], pointers: Iterable[int], limit: int = _SAVED_MAX
) -> Iterator[bytes] | None:
    """
    Return all that the program may have written to, in parts; None if that is more than ``limit`` bytes.

    What of it is ours is left out, and what is below the stack ``pointers`` of threads. Raise OSError if it cannot be
    read.
    """
    ours = space.patches.ranges()
    tops = {stack.start: pointer for pointer in pointers if (stack := _mapping_of(mappings, pointer)) is not None}
    writable = [mapping for mapping in mappings if mapping.permissions.startswith("rw")]
    if len(writable) > _WRITABLE_MAX or sum(mapping.end - mapping.start for mapping in writable) > _MAPPED_MAX:
        return None
    runs: list[tuple[int, int]] = []
    with open(f"/proc/{tid}/pagemap", "rb", buffering=0) as pagemap:
        for mapping in writable:
            if not any(start <= mapping.start < end for start, end in ours):
                live = (tops.get(mapping.start, mapping.start + _RED_ZONE) - _RED_ZONE) & -_WORD
                runs += [(max(start, live), end) for start, end in _used_runs(pagemap, mapping) if end > live]
    if sum(end - start for start, end in runs) > limit:
        return None
    return (space.read(start, end - start) for start, end in runs)


def _used_runs(pagemap: FileIO, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Iterate over the resident parts of a mapping."""
    pagemap.seek(mapping.start // PAGE_SIZE * _WORD)
    data = pagemap.read((mapping.end - mapping.start) // PAGE_SIZE * _WORD)
    start = None
    for number, entry in enumerate(memoryview(data).cast("Q")):
        place = mapping.start + number * PAGE_SIZE
        if not entry & _PRESENT:
            if start is not None:
                yield start, place
            start = None
        elif start is None:
            start = place
        elif place - start >= _RUN_MAX:
            yield start, place
            start = place
    if start is not None:
        yield start, mapping.start + len(data) // _WORD * PAGE_SIZE
