"""
Regular expressions that cost nothing to import: what ``re.compile`` compiles is made when it is used first.

To compile an expression takes 0.1 ms, and most of those that a start could need it does not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

__all__ = ["lazy_pattern"]


class _LazyPattern:
    """An expression that becomes a ``re.Pattern`` at its first use, and has that one's methods from then on."""

    def __init__(self, text: Any, flags: int = 0) -> None:
        self._source = (text, flags)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        compiled = re.compile(*self._source)  # noqa: TID251 - what this module does late
        value = getattr(compiled, name)
        self.__dict__[name] = value
        return value


if TYPE_CHECKING:
    lazy_pattern = re.compile  # noqa: TID251 - what type checkers know
else:
    lazy_pattern = _LazyPattern
