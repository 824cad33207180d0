"""What is put into the tables of a program, as it is written: so they can be read before the place where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.dpc.syntax import tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dpc.syntax.programtree import ProgramTree

__all__ = ["TEXT", "values_written"]

TEXT = "text"
"""What a text in quotes is, and a string that is as long as nothing says."""

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
        case tree.Call("str" | "mem" | "kstack" | "ustack" | "ntop") | tree.Name("comm"):
            return ""
        case tree.TableAccess():
            return ""
    return "last"
