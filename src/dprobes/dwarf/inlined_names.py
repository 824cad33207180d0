"""The names of inlined calls for frames of call stacks, from debug information, within a limit of time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dprobes.errors import TargetError
from dprobes.target.code_names import InlinedCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.target.probed_module import Module

__all__ = ["InlinedNames"]

_SECONDS = 3.0
"""Maximum total time in seconds for reading a module's debug information, because records wait meanwhile."""

_CALLS_MAX = 4096
"""Number of pieces of inlined calls in one function after which the search ends."""


@dataclass(slots=True)
class _Known:
    """A module's debug information, None if it has none, with the seconds that reading it has taken so far."""

    file: DebugFile | None
    seconds: float


class InlinedNames:
    """A finder of inlined calls in the functions of modules (``code_names.InliningFinder``)."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        """Limit the total time for reading each module's debug information to ``seconds``."""
        self._seconds = seconds
        self._modules: WeakKeyDictionary[Module, _Known] = WeakKeyDictionary()

    def inlined_in(
        self, module: Module, start: int, end: int, name_of: Callable[[str], str]
    ) -> tuple[InlinedCode, ...]:
        """
        Return the pieces of inlined calls in a range of bytes of a module's file, each before those nested in it.

        The result is empty if the debug information is damaged, or has taken too much time already. ``name_of``
        demangles a symbol's name.
        """
        began = time.perf_counter()
        try:
            known = self._modules.get(module)
            if known is None:
                known = self._modules[module] = _Known(_open(module), 0.0)
            if known.file is None or known.seconds > self._seconds:
                return ()
            return tuple(_pieces(known.file, module, start, end, name_of))
        except TargetError:
            return ()
        finally:
            if (known := self._modules.get(module)) is not None:
                known.seconds += time.perf_counter() - began


def _open(module: Module) -> DebugFile | None:
    from dprobes.dwarf.debug_file import debug_file_of

    try:
        return debug_file_of(module.elf)
    except TargetError:
        return None


def _pieces(
    file: DebugFile, module: Module, start: int, end: int, name_of: Callable[[str], str]
) -> Iterator[InlinedCode]:
    from dprobes.dwarf.address_lists import ranges_of
    from dprobes.dwarf.entry_search import function_at, inlined_calls_in

    link_address = module.elf.link_address(start)
    function = function_at(file, link_address) if link_address is not None else None
    if function is None or link_address is None:
        return
    distance = link_address - start
    found = 0
    for call in inlined_calls_in(function):
        ranges = ranges_of(call.entry)
        if not ranges:
            continue
        name = name_of(call.name)
        for low, high in ranges:
            if start <= low - distance < end:
                yield InlinedCode(low - distance, high - distance, name)
                found += 1
        if found > _CALLS_MAX:
            return
