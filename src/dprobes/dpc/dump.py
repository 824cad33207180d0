"""
What each pass of the compiler makes of a program, as a text: for people who want to know why.

Trees are printed with a line for each node: its class, where it is in the source, its plain fields; what it consists of
stands below it, indented, behind the name of the field.
"""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from dprobes.clike.token import TokenKind
from dprobes.dpc.syntax.token import TokenStream
from dprobes.dpc.types.ctype import Array, Enumeration, Integer, Pointer, Record, Stack, String, Void
from dprobes.source import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed

__all__ = ["PASSES", "Passes", "token_lines", "tree_lines"]

PASSES = {
    "source": "the text behind the preprocessor",
    "tokens": "its tokens",
    "tree": "what is written, before names and types have a meaning",
    "places": "the same with points at instructions in the place of lines and inlined calls",
    "typed": "names resolved, conversions written out, constants worked out",
    "rpn": "the RPN source, with the lines of C as comments",
}
"""The passes by their names, in their order."""

_WRITTEN = ("probe", "block")
"""The fields of typed trees that have what is written, of which only the place is shown."""

_TYPES = (Array, Enumeration, Integer, Pointer, Record, Stack, String, Void)


class Passes:
    """Keep what the passes have made, by their names."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def note(self, name: str, made: object) -> None:
        """Keep what a pass has made."""
        self.found[name] = made


def token_lines(text: Preprocessed, diagnostics: Diagnostics) -> Iterator[str]:
    """Iterate over lines with the tokens of a text and their places; words of places are several tokens."""
    stream = TokenStream(text, diagnostics)
    while (token := stream.take()).kind is not TokenKind.END:
        span = stream.span(token)
        yield f"{span}: {token.kind.value} {token.text}"


def tree_lines(node: object, name: str = "", depth: int = 0) -> Iterator[str]:
    """Iterate over the lines that show a tree of dataclasses."""
    indent = "  " * depth
    label = f"{name}: " if name else ""
    if isinstance(node, (list, tuple)):
        for number, each in enumerate(node):
            yield from tree_lines(each, f"{name}[{number}]" if name else "", depth)
        return
    if isinstance(node, dict):
        for key, each in node.items():
            yield from tree_lines(each, f"{name}[{key}]", depth)
        return
    if not is_dataclass(node) or isinstance(node, _TYPES):
        yield f"{indent}{label}{_shown(node)}"
        return
    plain, inner, place = [], [], ""
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, Span):
            place = f" @{value}"
        elif field.name in _WRITTEN:
            place = f" @{value.span}"
        elif field.name == "at" or value in (None, (), [], {}, ""):  # by the ids of statements
            continue
        elif _is_plain(value):
            plain.append(f" {field.name}={_shown(value)}")
        else:
            inner.append((field.name, value))
    yield f"{indent}{label}{type(node).__name__}{place}{''.join(plain)}"
    for field_name, value in inner:
        yield from tree_lines(value, field_name, depth + 1)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(each, (str, int)) for each in value)
    return isinstance(value, _TYPES) or not (is_dataclass(value) or isinstance(value, dict))


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (frozenset, set)):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"<{value}>" if isinstance(value, _TYPES) else str(value)
