"""
Preprocessed text to statements of tokens.

A statement ends with its line, or with ``;`` (ours: so that a macro, which expands to one line, can hold several
statements). This module knows nothing of what the words mean.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.quickenum import Enum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.preprocessor import Preprocessed
    from dprobes.source import Span

__all__ = ["Lexer", "Statement", "TokenKind", "WordToken"]


class TokenKind(Enum):
    """Classify a token."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    CHARACTER = "character"
    PUNCTUATION = "punctuation"


@dataclass(frozen=True, slots=True)
class WordToken:
    """Hold one token: its text as written and its place in the preprocessed text."""

    kind: TokenKind
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """The text in lower case: the language ignores case."""
        return self.text.lower()

    def is_punctuation(self, text: str) -> bool:
        """Return whether the token is this punctuation mark."""
        return self.kind is TokenKind.PUNCTUATION and self.text == text


Statement = list[WordToken]

# A name may hold the characters of ELF symbols: '.' (foo.cold), '$', and '@' (memcpy@GLIBC_2.14).
_TOKEN = lazy_pattern(
    r"""(?P<blank>[ \t\r\f\v]+)
      | (?P<end>[\n;])
      | (?P<name>[A-Za-z_$.][A-Za-z0-9_$.@]*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.)')
      | (?P<punctuation><<|>>|[=:,()+\-*/%&|^~<>?!\[\]#{}@])
      | (?P<bad>[^\n])""",
    re.VERBOSE,
)

_KINDS = {kind.value: kind for kind in TokenKind}

MAX_WORDS = 10_000
"""How many tokens a statement may have: a line of megabytes is no probe program."""


class Lexer:
    """Split a preprocessed text into statements; ``report`` is told of characters that no token starts with."""

    def __init__(self, text: Preprocessed, report: Callable[[Span, str], None]) -> None:
        self._preprocessed = text
        self._report = report

    def span(self, first: WordToken, last: WordToken | None = None) -> Span:
        """Return the place in the user's files of the tokens ``first`` to ``last``."""
        return self._preprocessed.span(first.start, (last or first).end)

    def written(self, first: WordToken, last: WordToken) -> str:
        """Return the tokens ``first`` to ``last`` as written, macros expanded and white space reduced to a blank."""
        return " ".join(self._preprocessed.text[first.start : last.end].split())

    def start_span(self) -> Span:
        """Return the place of the first character."""
        return self._preprocessed.span(0, 0)

    def end_span(self) -> Span:
        """Return the place just behind the last character."""
        end = len(self._preprocessed.text)
        return self._preprocessed.span(end, end)

    def statements(self) -> Iterator[Statement]:
        """Iterate over the statements; empty ones are left out, and so is one that is in error here."""
        statement: Statement = []
        bad = False
        for match in _TOKEN.finditer(self._preprocessed.text):
            group = match.lastgroup
            if group == "blank":
                continue
            if group == "end":
                if statement and not bad:
                    yield statement
                statement, bad = [], False
            elif group == "bad":
                if not bad:  # one error a statement is enough
                    self._report_bad(match.start(), match.group())
                bad = True
            elif len(statement) == MAX_WORDS:
                if not bad:
                    self._report(self.span(statement[0]), f"a statement of more than {MAX_WORDS} words")
                bad = True
            else:
                assert group is not None
                statement.append(WordToken(_KINDS[group], match.group(), match.start(), match.end()))
        if statement and not bad:
            yield statement

    def _report_bad(self, start: int, character: str) -> None:
        span = self._preprocessed.span(start, start + 1)
        if character in "\"'":
            self._report(span, f"a {character} without its partner on the same line")
        else:
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            self._report(span, f"unexpected character {shown}")
