"""
What is put into the tables of a program, as it is written: so they can be read before the place where it is.

So it is known as well for how long strings in quotes a table has to have room, before the first one is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.dpc.syntax import tree
from dprobes.dpc.types.ctype import Enumeration
from dprobes.rpn.tables import STRING_SIZE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dpc.syntax.programtree import ProgramTree
    from dprobes.dpc.types.ctype import Integer

__all__ = [
    "SIGNED",
    "TEXT",
    "VALUE",
    "is_text_choice",
    "text_sizes",
    "values_written",
    "word_kind",
]

VALUE = -1
"""The position of what a table keeps; those of keys begin with 0."""

TEXT = "text"
"""What a text in quotes is, and a string that is as long as nothing says."""

SIGNED, _UNSIGNED = "signed", "word"
"""Keys of a word, with a sign and without."""

_BOUNDS = "lhist"
"""What tables keep with bounds, which only types tell: it has to be put before it is read."""


def values_written(program: ProgramTree, kinds: frozenset[str]) -> dict[str, str]:
    """Return what the tables keep whose first use that puts something puts a number, or a text in quotes, by names."""
    found: dict[str, str] = {}
    bodies = [probe.body for probe in program.probes]
    bodies += [function.body for function in program.functions]
    bodies += [block.body for block in program.blocks]
    for name, kind in (each for body in bodies for each in _written(body, kinds)):
        found.setdefault(name, kind)
    return {name: kind for name, kind in found.items() if kind not in ("", _BOUNDS)}


def _written(node: Any, kinds: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Iterate over what is put into tables by a node and all in it; "" is what is no number."""
    match node:
        case tree.Assignment(operator, tree.TableAccess(name), value):
            yield name, "sum" if operator else _kind(value, kinds)
        case tree.Increment(amount, tree.TableAccess(name)):
            yield name, "count" if amount == 1 else "sum"
    if isinstance(node, tuple):
        for each in node:
            yield from _written(each, kinds)
    elif type(node).__module__ == tree.__name__:
        for field in getattr(type(node), "__slots__", ()):
            yield from _written(getattr(node, field), kinds)


def _kind(value: tree.Expression, kinds: frozenset[str]) -> str:
    match value:
        case tree.Call("last", [kept]):
            return _kind(kept, kinds)
        case tree.Call(function) if function in kinds:
            return function
        case tree.StringLiteral() | tree.Call("str", [_]):
            return TEXT
        case tree.Conditional() if is_text_choice(value):
            return TEXT
        case tree.Call("str" | "mem" | "kstack" | "ustack" | "ntop") | tree.Name("comm"):
            return ""
        case tree.TableAccess():
            return ""
    return "last"


def is_text_choice(value: tree.Expression) -> bool:
    """Return whether a value is a text in quotes, or a choice between such."""
    match value:
        case tree.StringLiteral():
            return True
        case tree.Conditional(_, yes, no):
            return is_text_choice(yes) and is_text_choice(no)
    return False


def text_sizes(program: ProgramTree, kept: int) -> dict[tuple[str, int], int]:
    """
    Return for how many bytes there is to be room where handlers put strings in quotes, by table and position.

    ``kept`` is how many bytes tables keep of a string.
    """
    bodies = [each for probe in program.probes for each in (probe.condition, probe.body)]
    bodies += [function.body for function in program.functions]
    placed = [each for body in bodies for each in _placed(body)]
    wanted = {place for place, value in placed if is_text_choice(value)}
    placed += [each for block in program.blocks for each in _placed(block.body)]
    found = dict.fromkeys(wanted, 0)
    for place, value in placed:
        if place in wanted and not isinstance(value, tree.TableAccess):
            found[place] = max(found[place], _room_for(value))
    for place, value in placed:
        if place in wanted and isinstance(value, tree.TableAccess):
            found[place] = max(found[place], found.get((value.name, VALUE), kept))
    return found


def _placed(node: Any) -> Iterator[tuple[tuple[str, int], tree.Expression]]:
    """Iterate over keys and what is put under them, each with the name of the table and its position."""
    match node:
        case tree.Assignment(_, tree.TableAccess(name), value):
            kept = value.arguments[0] if isinstance(value, tree.Call) and value.function == "last" else value
            yield (name, VALUE), kept
        case tree.TableAccess(name, keys):
            yield from (((name, position), key) for position, key in enumerate(keys))
    if isinstance(node, tuple):
        for each in node:
            yield from _placed(each)
    elif type(node).__module__ == tree.__name__:
        for field in getattr(type(node), "__slots__", ()):
            yield from _placed(getattr(node, field))


def _room_for(value: tree.Expression) -> int:
    """Return for how many bytes of a text there is room in the cells that it takes; 0 of what is none."""
    match value:
        case tree.StringLiteral(text):
            return min(len(text.encode("utf-8", "replace")) // 8 * 8 + 7, STRING_SIZE_MAX)
        case tree.Conditional(_, yes, no):
            return max(_room_for(yes), _room_for(no))
    return 0


def word_kind(type_: Integer | Enumeration, known: str) -> str:
    """Return the kind of a key of a word: that of the first use of the table, or else with the sign of its type."""
    if known in (_UNSIGNED, SIGNED):
        return known
    return SIGNED if (type_.base if isinstance(type_, Enumeration) else type_).is_signed else _UNSIGNED
