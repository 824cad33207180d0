"""Shell patterns as regular expressions that match in linear time."""

from __future__ import annotations

import re
from fnmatch import translate

__all__ = ["compile_glob", "is_pattern"]


def is_pattern(text: str) -> bool:
    """Return whether a text contains a metacharacter of patterns."""
    return any(character in text for character in "*?[")


def compile_glob(pattern: str) -> re.Pattern[str]:
    """
    Return a regular expression whose ``match`` implements ``pattern``: ``*``, ``?``, ``[abc]``, ``[!abc]``.

    ``match`` accepts only whole strings, and is case-sensitive.
    """
    # fnmatch searches the rest of the pattern for the end of each bracket, and takes an unterminated one literally.
    # Here an unterminated bracket is replaced by a bracket expression that contains a bracket.
    parts, position = [], 0
    while (start := pattern.find("[", position)) >= 0:
        parts.append(pattern[position:start])
        # The first character in a bracket, or after its '!', is always literal.
        first = start + (2 if pattern.startswith("!", start + 1) else 1)
        end = pattern.find("]", first + 1)
        if end < 0:
            parts.append(pattern[start:].replace("[", "[[]"))
            return re.compile(translate("".join(parts)))
        parts.append(pattern[start : end + 1])
        position = end + 1
    return re.compile(translate("".join((*parts, pattern[position:]))))
