"""The tokens of a script of bpftrace, as the parser asks for them; names of probes are words of their own."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.source import Span

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["Token", "TokenKind", "TokenStream"]


class TokenKind(enum.Enum):
    """Classify a token."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    MAP = "map"
    VARIABLE = "variable"
    PARAMETER = "parameter"
    PUNCTUATION = "punctuation"
    POINT = "point"
    END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a token: its text as written and its place."""

    kind: TokenKind
    text: str
    start: int
    end: int

    @property
    def described(self) -> str:
        """The token in a message."""
        return "the end of the script" if self.kind is TokenKind.END else f"'{self.text}'"


_BLANK = lazy_pattern(r"\s*")
_TOKEN = lazy_pattern(
    r"""(?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<map>@[A-Za-z0-9_]*)
      | (?P<variable>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<parameter>\$[0-9#]+)
      | (?P<punctuation><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|\.\.
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)
_KINDS = {kind.value: kind for kind in TokenKind}

# A path has slashes; elsewhere a slash begins the condition behind a probe.
_POINT = lazy_pattern(
    r"""(?:uprobe|uretprobe|usdt|u|ur|U):(?:"[^"\n]*"|[^\s,{":])*(?::(?:"[^"\n]*"|[^\s,{"/])*)?
      | [A-Za-z_]\w*(?::(?:"[^"\n]*"|[^\s,{"/])*)*""",
    re.VERBOSE,
)


class TokenStream:
    """Give the tokens of a text, in which comments are blank; ``source`` is where they come from."""

    def __init__(self, source: SourceFile, text: str, diagnostics: Diagnostics) -> None:
        self._source = source
        self._text = text
        self._diagnostics = diagnostics
        self._position = 0
        self._ahead: list[Token] = []

    def peek(self, distance: int = 0) -> Token:
        """Return the next token, or one behind it, without taking it."""
        while len(self._ahead) <= distance:
            self._ahead.append(self._scan())
        return self._ahead[distance]

    def take(self) -> Token:
        """Take the next token; at the end it is END, as often as one likes."""
        token = self.peek()
        if token.kind is not TokenKind.END:
            self._ahead.pop(0)
        return token

    def take_point(self) -> Token | None:
        """Take the name of a probe; None if none comes next."""
        start = self.peek().start
        match = _POINT.match(self._text, start)
        if match is None:
            return None
        self._ahead.clear()
        self._position = match.end()
        return Token(TokenKind.POINT, match.group(), start, match.end())

    def take_block(self) -> Token | None:
        """Take the text from here to the ``;`` behind the next ``}``; None if there is none."""
        start = self.peek().start
        depth = 0
        for position in range(start, len(self._text)):
            depth += {"{": 1, "}": -1}.get(self._text[position], 0)
            if depth == 0 and self._text[position] == ";":
                self._ahead.clear()
                self._position = position + 1
                return Token(TokenKind.POINT, self._text[start : position + 1], start, position + 1)
        return None

    def span(self, first: Token, last: Token | None = None) -> Span:
        """Return the place of the tokens from ``first`` to ``last``."""
        return Span(self._source, first.start, (last or first).end)

    def _scan(self) -> Token:
        text = self._text
        while True:
            blank = _BLANK.match(text, self._position)
            assert blank is not None
            self._position = blank.end()
            if self._position >= len(text):
                return Token(TokenKind.END, "", len(text), len(text))
            match = _TOKEN.match(text, self._position)
            if match is not None:
                self._position = match.end()
                return Token(_KINDS[match.lastgroup or ""], match.group(), match.start(), match.end())
            character = text[self._position]
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            span = Span(self._source, self._position, self._position + 1)
            self._diagnostics.error(span, f"unexpected character {shown}")
            self._position += 1
