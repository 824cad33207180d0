"""Shell patterns as regular expressions, in linear time whatever they are."""

from __future__ import annotations

import re
from fnmatch import translate

__all__ = ["compile_glob", "is_pattern"]


def is_pattern(text: str) -> bool:
    """Return whether a text has something that makes it a pattern."""
    return any(character in text for character in "*?[")


def compile_glob(pattern: str) -> re.Pattern[str]:
    """
    Return the expression whose ``match`` says whether a text matches ``pattern``: ``*``, ``?``, ``[abc]``, ``[!abc]``.

    Upper and lower case differ.
    """
    # fnmatch looks for the end of each bracket up to the end of the pattern, and takes what has none as it stands. Such
    # a bracket is written as one that holds a bracket here.
    parts, position = [], 0
    while (start := pattern.find("[", position)) >= 0:
        parts.append(pattern[position:start])
        # What comes first in a bracket, or behind its '!', is one of its characters.
        first = start + (2 if pattern.startswith("!", start + 1) else 1)
        end = pattern.find("]", first + 1)
        if end < 0:
            parts.append(pattern[start:].replace("[", "[[]"))
            return re.compile(translate("".join(parts)))
        parts.append(pattern[start : end + 1])
        position = end + 1
    return re.compile(translate("".join((*parts, pattern[position:]))))
