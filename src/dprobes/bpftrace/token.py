"""The tokens of a script of bpftrace, as the parser asks for them; names of probes are words of their own."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from dprobes.clike.token import TextTokens
from dprobes.lazypattern import lazy_pattern
from dprobes.source import Span

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["TokenStream"]


_TOKEN = lazy_pattern(
    r"""(?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<table>@[A-Za-z0-9_]*)
      | (?P<variable>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<parameter>\$[0-9#]+)
      | (?P<punctuation><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|\.\.
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)

# A path has slashes; elsewhere a slash begins the condition behind a probe.
_POINT = lazy_pattern(
    r"""(?:uprobe|uretprobe|usdt|u|ur|U):(?:"[^"\n]*"|[^\s,{":])*(?::(?:"[^"\n]*"|[^\s,{"/])*)?
      | [A-Za-z_]\w*(?::(?:"[^"\n]*"|[^\s,{"/])*)*""",
    re.VERBOSE,
)


class TokenStream(TextTokens):
    """Give the tokens of a text, in which comments are blank; ``source`` is where they come from."""

    def __init__(self, source: SourceFile, text: str, diagnostics: Diagnostics) -> None:
        super().__init__(text, _TOKEN, partial(Span, source), diagnostics, "the end of the script")

    def take_point(self) -> Token | None:
        """Take the name of a probe; None if none comes next."""
        return self.take_match(_POINT)

    def take_block(self) -> Token | None:
        """Take the text from here to the ``;`` behind the next ``}``; None if there is none."""
        depth = 0
        for position in range(self.peek().start, len(self.text)):
            depth += {"{": 1, "}": -1}.get(self.text[position], 0)
            if depth == 0 and self.text[position] == ";":
                return self.take_to(position + 1)
        return None
