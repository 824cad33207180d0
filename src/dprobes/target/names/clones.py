"""Functions that compilers made of others, by their names: specialized copies ("clones"), and parts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.target.symbols import SymbolTable

__all__ = ["clones_among", "clones_in", "is_clone", "is_cold_part", "only_clones"]

_SUFFIXES = r"(?:\.(?:constprop|part|isra|cold|lto_priv|localalias|llvm|clone)(?:\.\d+)?)+"
"""What GCC and Clang append to the name of a function."""

_CLONE = lazy_pattern(rf"(?P<original>[A-Za-z_][\w$]*){_SUFFIXES}", re.ASCII)
_COLD = lazy_pattern(r".*\.cold(\.\d+)?")
_LISTED = 4


def is_clone(name: str) -> bool:
    """Return whether a name is that of a clone, or of a part of a function."""
    return _CLONE.fullmatch(name) is not None


def is_cold_part(name: str) -> bool:
    """Return whether a name is that of the code of a function that is rarely executed: it is jumped to, not called."""
    return _COLD.fullmatch(name) is not None


def clones_in(symbols: SymbolTable, original: str) -> list[str]:
    """Return the names of clones of a function in a table of symbols, as ``clones_among`` does."""
    return clones_among((symbol.name for symbol in symbols.functions_beginning(f"{original}.")), original)


def clones_among(names: Iterable[str], original: str) -> list[str]:
    """Return the names of clones of a function, in order, those of cold parts last."""
    found = {name for name in names if (match := _CLONE.fullmatch(name)) is not None and match["original"] == original}
    return sorted(found, key=lambda name: (is_cold_part(name), name))


def only_clones(where: str, name: str, clones: list[str]) -> TargetError:
    """Return the error for a function that is not ``where`` it was looked for, but clones of it are."""
    more = f" and {len(clones) - _LISTED} more" if len(clones) > _LISTED else ""
    listed = ", ".join(f"'{each}'" for each in clones[:_LISTED])
    called = [each for each in clones if not is_cold_part(each)]
    if not called:
        return TargetError(
            f"{where} has no symbol '{name}', but code that was taken out of it: {listed}{more}",
            hint="the function itself was inlined, or has no symbol; such code is jumped to in rare cases",
        )
    every = f", or the pattern '{name}.*' for all of them" if len(called) > 1 else ""
    return TargetError(
        f"{where} has no symbol '{name}', but what the compiler made of it: {listed}{more}",
        hint=f"write '{called[0]}'{every}; arguments that it does not need may be left out, and the others moved up",
    )
