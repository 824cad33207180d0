"""Where a name is defined: in the program, or of a function that is probed in the source of its module."""

from __future__ import annotations

import re

from dprobes.cli.languageserver.analysis import is_c, word_at
from dprobes.lazynamedtuple import NamedTuple

__all__ = ["Definition", "definition_of"]

_TYPE = r"(?:static|global|percpu|thread|extern|typedef|struct|union|enum|const|volatile|unsigned|signed|[A-Za-z_]\w*)"


class Definition(NamedTuple):
    """Where something is defined in a text."""

    start: int
    end: int


def definition_of(name: str, text: str, offset: int) -> Definition | None:
    """Return where the word at an offset is defined; None if that is not found."""
    start, end = word_at(text, offset)
    word = text[start:end]
    if not word:
        return None
    plain = _without_comments(text)
    for pattern in _patterns(word) if is_c(name) else _rpn_patterns(word):
        # What is nearest above it, else the first one below.
        found = [match.start("name") for match in re.finditer(pattern, plain, re.MULTILINE)]
        before = [place for place in found if place <= start]
        if found:
            place = before[-1] if before else found[0]
            return Definition(place, place + len(word))
    return None


def _patterns(word: str) -> list[str]:
    name = rf"(?P<name>{re.escape(word)})"
    if word.startswith("@"):
        return [rf"{name}\b\s*(?:\[[^\]\n]*\]\s*)?(?:=(?!=)|\+=|-=|\+\+)"]
    return [
        rf"^[ \t]*#[ \t]*define[ \t]+{name}\b",
        rf"\b(?:struct|union|enum)\s+{name}\s*\{{",
        rf"\b(?!return\b|else\b|case\b){_TYPE}(?:\s+{_TYPE})*[\s*]+{name}\s*(?=[=;,\[])",
        rf"\b(?!return\b|else\b){_TYPE}[\s*]+{name}\s*\([^)]*\)\s*\{{",
        rf"[(,]\s*(?:[\w\s*]*?[\s*])?{name}\s*(?=[,)])(?=[^;{{]*\{{)",
    ]


def _rpn_patterns(word: str) -> list[str]:
    name = rf"(?P<name>{re.escape(word)})"
    return [
        rf"^[ \t]*#[ \t]*define[ \t]+{name}\b",
        rf"^[ \t]*{name}[ \t]*:",
        rf"^[ \t]*proc[ \t]+{name}\b",
        rf"^[ \t]*table[ \t]*=[ \t]*{name}\b",
    ]


def _without_comments(text: str) -> str:
    pattern = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)  # noqa: TID251 - used at once
    return pattern.sub(lambda match: "".join(c if c == "\n" else " " for c in match.group()), text)
