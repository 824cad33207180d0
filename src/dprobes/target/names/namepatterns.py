"""Shell patterns for names of functions: of linkers, or where scopes are written, as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.globs import compile_glob

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["name_matcher"]


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """
    Return what says whether a linker's name matches a pattern; upper and lower case differ.

    A pattern with ``::`` is one of readable names: a name matches it with its parameters, or without.
    """
    expression = compile_glob(pattern)
    if "::" not in pattern:
        return lambda name: expression.match(name) is not None
    from dprobes.target.names.demangled import Demangler
    from dprobes.target.names.readablenames import readable_parts

    demangler = Demangler()

    def matches(name: str) -> bool:
        readable = demangler.name_of(name)
        if readable == name:
            return expression.match(name) is not None
        path, parameters = readable_parts(readable)
        return any(expression.match(text) for text in (path, path + parameters))

    return matches
