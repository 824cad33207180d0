"""
The tokens of DProbes C, from preprocessed text.

Names of places (``libc.so.6:SSL_*``) are no tokens of C: where one may stand, the parser asks for a *place word*
instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.clike.token import TextTokens
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed

__all__ = ["TokenStream"]

_TOKEN = lazy_pattern(
    r"""(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[A-Za-z0-9_.])*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.[0-7A-Fa-f]*)')
      | (?P<table>@[A-Za-z_]?[A-Za-z0-9_]*)
      | (?P<punctuation><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|::
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)
_PLACE_WORD = lazy_pattern(r'(?:"[^"\n]*"|[^\s(){},;"])*')


class TokenStream(TextTokens):
    """Give the tokens of a program."""

    def __init__(self, text: Preprocessed, diagnostics: Diagnostics) -> None:
        super().__init__(text.text, _TOKEN, text.span, diagnostics, "the end of the program")

    def take_place_word(self) -> Token:
        """Take what stands up to a blank, a bracket, a comma or a semicolon as one word, which may be empty."""
        word = self.take_match(_PLACE_WORD)
        assert word is not None
        return word

    def written(self, start: int, end: int) -> str:
        """Return a piece of the text as written, with macros expanded, and blanks reduced to one."""
        return " ".join(self.text[start:end].split())
