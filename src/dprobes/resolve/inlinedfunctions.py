"""What to say of a function that has no symbol because all of its calls were inlined: where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.names.clones import clones_in

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.target.location import Module

__all__ = ["inlined_places", "told_of_inlining"]

_LISTED = 4


def told_of_inlining(module: Module, name: str, error: TargetError) -> TargetError:
    """Return an error that says where a function was inlined; the ``error`` that there is if it was not."""
    if module.symbols.lookup(name) or module.symbols.imports(name):
        return error
    try:
        places = inlined_places(module, name)
    except TargetError:
        return error  # the debug information is damaged: nothing is known of the function
    if not places:
        return error
    clones = clones_in(module.symbols, name)
    made = f"; the compiler has also made {_listed([repr(each) for each in clones])} of it" if clones else ""
    return TargetError(
        f"'{name}' is no symbol of '{module.path}': its calls were inlined, at {_listed(places)}{made}",
        hint=f"write 'offset = {places[0]}', or in DProbes C 'inline {_written(module.path)}:{name}' for all of them",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def inlined_places(module: Module, name: str) -> list[str]:
    """Return where calls of a function were inlined; raise ``TargetError`` if the debug information is damaged."""
    from dprobes.dwarf.debugfile import debug_file_of
    from dprobes.dwarf.inlinedcalls import inlined_calls_of

    debug = debug_file_of(module.elf)
    if debug is None:
        return []
    addresses = {call.first_address for call in inlined_calls_of(debug, name)}
    found = []
    for address in sorted(each for each in addresses if each is not None):
        symbol = module.symbol_at(module.file_offset(address))
        if symbol is not None:
            function, distance = symbol
            found.append(f"{function}+{distance:#x}" if distance else function)
    return found


def _written(path: Path) -> str:
    """Return a path as a place of a program in C has it."""
    return str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else f'"{path}"'
