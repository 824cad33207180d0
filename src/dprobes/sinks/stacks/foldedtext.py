"""
Folded stacks: a line for each stack, as flame graph tools take them, and back.

::

    python3;main;PyRun_SimpleString 42
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.lazypattern import lazy_pattern
from dprobes.sinks.stacks.profile import StackProfile

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["folded_lines", "parse_folded"]

_LINE = lazy_pattern(r"(?P<stack>.*\S) +(?P<weight>\d{1,19})")


def folded_lines(profile: StackProfile) -> list[str]:
    """Return the lines of a profile, by stack; a semicolon within a name becomes a colon."""
    return [
        f"{';'.join(name.replace(';', ':').replace(chr(10), ' ') for name in stack)} {weight}"
        for stack, weight in sorted(profile.weights.items())
    ]


def parse_folded(lines: Iterable[str], name: str) -> StackProfile:
    """Return the profile that lines of the file ``name`` hold; raise ``FormatError`` for one that is none."""
    weights: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise FormatError(
                f"'{name}' holds no folded stacks: line {number} does not end with a blank and a number",
                hint="a line is 'main;outer;inner 42'",
            )
        stack = tuple(match["stack"].split(";"))
        weights[stack] = weights.get(stack, 0) + int(match["weight"])
    return StackProfile(weights, title=name)
