"""
The lines of a script that begin with ``#``: bpftrace gives them, and definitions of structures, to a C compiler.

We do what it would do where the kernel's types are known (BPFTRACE_HAVE_BTF). Lines that are left out are blanked, so
that places in the text stay what they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.source import Span

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["Directives", "read_directives"]

_KNOWN = frozenset({"BPFTRACE_HAVE_BTF"})
_CONDITION = lazy_pattern(r"\s*#\s*(?P<word>ifdef|ifndef|if|elif|else|endif)\b\s*(?P<rest>.*)")
_DIRECTIVE = lazy_pattern(r"\s*#\s*(?P<word>[a-z]\w*)\s*(?P<rest>.*)")
_COMMENT = lazy_pattern(r'"(?:[^"\\\n]|\\.)*"|/\*.*?\*/|//[^\n]*', re.DOTALL)


class Directives(NamedTuple):
    """The text without ``#`` lines and comments, macros as they were written, and included headers by their places."""

    text: str
    macros: tuple[str, ...]
    headers: tuple[tuple[str, Span], ...]


def read_directives(source: SourceFile, diagnostics: Diagnostics) -> Directives:
    """Read the ``#`` lines of a script."""
    plain = _COMMENT.sub(lambda match: match.group() if match.group()[0] == '"' else _blank(match.group()), source.text)
    kept: list[str] = []
    macros: list[str] = []
    headers: list[tuple[str, Span]] = []
    taken: list[bool] = []
    position = 0
    for line in plain.splitlines(keepends=True):
        span = Span(source, position, position + len(line.rstrip()))
        position += len(line)
        condition, directive = _CONDITION.match(line), _DIRECTIVE.match(line)
        if line.startswith("#!"):
            kept.append(_blank(line))
        elif condition is not None:
            _condition(condition, taken, span, diagnostics)
            kept.append(_blank(line))
        elif not all(taken) or directive is None:
            kept.append(line if all(taken) else _blank(line))
        else:
            kept.append(_blank(line))
            match directive["word"]:
                case "include":
                    headers.append((directive["rest"].strip(), span))
                case "define" | "undef":
                    macros.append(line.strip())
                case word:
                    diagnostics.error(span, f"there is no directive '#{word}'")
    if taken:
        diagnostics.error(Span(source, position, position), "expected '#endif' before the end of the script")
    return Directives("".join(kept), tuple(macros), tuple(headers))


def _condition(match: re.Match[str], taken: list[bool], span: Span, diagnostics: Diagnostics) -> None:
    rest = match["rest"].strip()
    match match["word"]:
        case "ifdef" | "ifndef" as word:
            taken.append((rest in _KNOWN) == (word == "ifdef"))
        case "if" | "elif" as word:
            diagnostics.error(
                span, f"conditions behind '#{word}' are not converted", hint="leave the part that you want"
            )
            if word == "if":
                taken.append(True)
        case word if not taken:
            diagnostics.error(span, f"'#{word}' without '#if'")
        case "else":
            taken[-1] = not taken[-1]
        case _:
            taken.pop()


def _blank(text: str) -> str:
    return "".join(character if character == "\n" else " " for character in text)
