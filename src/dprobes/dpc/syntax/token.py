"""
The tokens of DProbes C, from preprocessed text. A name of the module may have its scopes: ``shop::Cart`` is one token.

A name that C cannot write, such as ``Box<int>::last``, stands in backquotes. Names of places (``libc.so.6:SSL_*``) are
no tokens of C: where one may stand, the parser asks for a *place word* instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.clike.token import TextTokens, Token, TokenKind
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed

__all__ = ["TokenStream", "scoped_parts"]

_TOKEN = lazy_pattern(
    r"""(?P<name>[A-Za-z_$][A-Za-z0-9_$]*(?:::[A-Za-z_$][A-Za-z0-9_$]*)*|`[^`\s][^`\n]*`)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[A-Za-z0-9_.])*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.[0-7A-Fa-f]*)')
      | (?P<table>@[A-Za-z_]?[A-Za-z0-9_]*)
      | (?P<punctuation><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|::
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)
_PLACE_WORD = lazy_pattern(r'(?:"(?:[^"\\\n]|\\.)*"|`[^`"\\\n]*`|[^\s(){},;"`])*')
_QUOTED = lazy_pattern(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')


class TokenStream(TextTokens):
    """Give the tokens of a program."""

    def __init__(self, text: Preprocessed, diagnostics: Diagnostics) -> None:
        super().__init__(text.text, _TOKEN, text.span, diagnostics, "the end of the program")

    def _scan(self) -> Token:
        token = super()._scan()
        if token.kind is TokenKind.NAME and token.text.startswith("`"):
            return Token(token.kind, token.text.strip("` "), token.start, token.end)
        return token

    def take_place_word(self) -> Token:
        """Take what stands up to a blank, a bracket, a comma or a semicolon as one word, which may be empty."""
        word = self.take_match(_PLACE_WORD)
        assert word is not None
        # In a place backquotes are quotes.
        text = _QUOTED.sub(lambda match: f'"{match[0][1:-1]}"', word.text)
        return Token(word.kind, text, word.start, word.end)

    def written(self, start: int, end: int) -> str:
        """Return a piece of the text as written, with macros expanded, and blanks reduced to one."""
        return " ".join(self.text[start:end].split())


def scoped_parts(name: str) -> list[str]:
    """Return the scopes of a name and the name itself; what stands in the brackets of a template parts nothing."""
    parts, start, depth = [], 0, 0
    for place, character in enumerate(name):
        if character in "<([{":
            depth += 1
        elif character in ">)]}":
            depth -= 1
        elif not depth and name.startswith("::", place):
            parts.append(name[start:place])
            start = place + 2
    return [*parts, name[start:]]
