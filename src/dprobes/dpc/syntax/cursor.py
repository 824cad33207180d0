"""The walk of the parser of DProbes C through its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.clike.cursor import TokenCursor
from dprobes.dpc.syntax.token import TokenStream

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics

__all__ = ["Cursor"]

_DEPTH_MAX = 100
"""How deep expressions, statements and types may be nested."""


class Cursor(TokenCursor[TokenStream]):
    """Walk through the tokens of a program."""

    def __init__(self, tokens: TokenStream, diagnostics: Diagnostics) -> None:
        super().__init__(tokens, diagnostics, _DEPTH_MAX)
        self.typedefs: set[str] = set()
        """Names that ``typedef`` has declared: with them a parenthesis is a cast."""
