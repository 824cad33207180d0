"""How the name of a symbol of the module is written as the operand of ``push``: other words mean something there."""

from __future__ import annotations

from functools import cache

from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.isa import ALIASES, ROWS

__all__ = ["symbol_operand"]

_NUMBERED = lazy_pattern(r"[a-z]{1,5}[0-9]{1,3}\Z")
"""What registers of all processors are like that have numbers."""


def symbol_operand(name: str) -> str:
    """Return a symbol's name for ``push``: in quotes with scopes, in parentheses if ``push`` may know the word."""
    if "::" in name:
        return f'"{name}"'
    word = name.lower()
    return f"({name})" if word in _known_words() or _NUMBERED.match(word) else name


@cache
def _known_words() -> frozenset[str]:
    from dprobes.arch import host_architecture

    syntaxes = [row.syntax for row in ROWS] + [alias.syntax for alias in ALIASES]
    words = {syntax.split()[1].rstrip(",") for syntax in syntaxes if syntax.startswith("push ")}
    return frozenset((*words, *host_architecture().register_names))
