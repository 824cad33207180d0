"""Uses of tables, which are found in a whole program before its parts are typed: kinds of values, sizes of strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typers.provided_names import KINDS
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dpc.syntax.syntax_tree import ProgramTree

__all__ = ["TEXT", "VALUE", "durations", "is_text_choice", "kinds_of_steps", "text_sizes", "values_written"]

VALUE = -1
"""Position of the kept value; positions of key fields begin with 0."""

TEXT = "text"
"""Kind of a string literal, and of a string without a stated length."""

_BOUNDS = "lhist"
"""Kind with bounds, which only typing evaluates. So such a table must be written before it is read."""


def values_written(program: ProgramTree, kinds: frozenset[str]) -> dict[str, str]:
    """
    Return the kind of each table whose first write shows it, by the table's name.

    ``kinds`` has the names of the aggregations. A table with bounds (``lhist``) is not included.
    """
    found: dict[str, str] = {}
    bodies = [probe.body for probe in program.probes]
    bodies += [function.body for function in program.functions]
    bodies += [block.body for block in program.blocks]
    for node in (node for body in bodies for node in body.walk()):
        match node:
            case syntax_tree.Assignment(operator, syntax_tree.TableAccess(name), value):
                found.setdefault(name, "sum" if operator else _kind(value, kinds))
            case syntax_tree.Increment(amount, syntax_tree.TableAccess(name)):
                found.setdefault(name, "count" if amount == 1 else "sum")
    steps = kinds_of_steps(program, kinds)
    found |= {name: steps[name] for name, kind in found.items() if name in steps and kind in ("count", "sum", "last")}
    return {name: kind for name, kind in found.items() if kind not in ("", _BOUNDS)}


def kinds_of_steps(program: ProgramTree, kinds: frozenset[str]) -> dict[str, str]:
    """
    Return the kind of each table that ``++``, ``--``, ``+=`` or ``-=`` changes, by the table's name.

    It is ``last`` for a table that ``=`` sets as well, ``count`` if it is only incremented, and else ``sum``.
    ``kinds`` are the names of the aggregations.
    """
    stepped, found = set[str](), dict[str, str]()
    for node in program.walk():
        match node:
            case syntax_tree.Assignment("", syntax_tree.TableAccess(name), value):
                if (kind := _aggregation(value, kinds)) in ("", "last"):
                    found[name] = "last"
                elif kind != "count":
                    found.setdefault(name, "sum")
            case syntax_tree.Assignment("+" | "-", syntax_tree.TableAccess(name)):
                stepped.add(name)
                found.setdefault(name, "sum")
            case syntax_tree.Increment(amount, syntax_tree.TableAccess(name)):
                stepped.add(name)
                if amount != 1:
                    found.setdefault(name, "sum")
    return {name: found.get(name, "count") for name in stepped}


def _aggregation(value: syntax_tree.Expression, kinds: frozenset[str]) -> str:
    """Return the name of the aggregation that a value calls; an empty string for a number."""
    return value.function if isinstance(value, syntax_tree.Call) and value.function in kinds else ""


def _kind(value: syntax_tree.Expression, kinds: frozenset[str]) -> str:
    match value:
        case syntax_tree.Call("last", [kept]):
            return _kind(kept, kinds)
        case syntax_tree.Call(function) if function in kinds:
            return function
        case syntax_tree.StringLiteral() | syntax_tree.Call("str", [_]):
            return TEXT
        case syntax_tree.Conditional() if is_text_choice(value):
            return TEXT
        case syntax_tree.Call("str" | "mem" | "kstack" | "ustack" | "ntop") | syntax_tree.Name("comm"):
            return ""
        case syntax_tree.TableAccess():
            return ""
    return "last"


def durations(program: ProgramTree) -> frozenset[str]:
    """
    Return the variables, and the tables as ``@NAME``, whose values are all durations in nanoseconds.

    Durations are ``elapsed``, CPU time, the difference of ``nsecs`` and another time, and sums, differences, choices
    and casts of durations. Numbers are ignored.
    """
    assigned: dict[str, list[syntax_tree.Expression]] = {}
    for node in program.walk():
        match node:
            case syntax_tree.Assignment("" | "+" | "-", syntax_tree.Name(name), value):
                assigned.setdefault(name, []).append(value)
            case syntax_tree.Assignment("" | "+" | "-", syntax_tree.TableAccess(name), value):
                assigned.setdefault(f"@{name}", []).append(_tallied(value))
            case syntax_tree.Assignment(_, syntax_tree.Name() | syntax_tree.TableAccess() as target):
                assigned.setdefault(_variable(target), []).append(node)
            case syntax_tree.Increment(_, syntax_tree.Name() | syntax_tree.TableAccess() as target):
                assigned.setdefault(_variable(target), []).append(node)
            case syntax_tree.Declarator(name, value=value) if value is not None:
                assigned.setdefault(name, []).append(value)
    found: frozenset[str] = frozenset()
    while True:
        more = frozenset(name for name, values in assigned.items() if _are_durations(values, found))
        if more == found:
            return found
        found = more


def _variable(target: syntax_tree.Name | syntax_tree.TableAccess) -> str:
    return f"@{target.name}" if isinstance(target, syntax_tree.TableAccess) else target.name


def _tallied(value: syntax_tree.Expression) -> syntax_tree.Expression:
    """Return the number that an aggregation takes; the call itself for ``count``."""
    is_aggregation = isinstance(value, syntax_tree.Call) and value.function in KINDS and value.arguments
    return value.arguments[0] if is_aggregation and isinstance(value, syntax_tree.Call) else value


def _are_durations(values: Sequence[syntax_tree.Expression], known: frozenset[str]) -> bool:
    numbers = [value for value in values if not isinstance(value, syntax_tree.Number)]
    return bool(numbers) and all(_is_duration(value, known) for value in numbers)


def _is_duration(value: syntax_tree.Expression, known: frozenset[str]) -> bool:
    match value:
        case syntax_tree.Name(name):
            return name == "elapsed" or name in known
        case syntax_tree.Call("elapsed" | "pmc", (syntax_tree.StringLiteral("task-clock"),)):
            return True
        case syntax_tree.TableAccess(name):
            return f"@{name}" in known
        case syntax_tree.Binary("-", syntax_tree.Name("nsecs"), right):
            return not isinstance(right, syntax_tree.Number) and not _is_duration(right, known)
        case syntax_tree.Binary("+" | "-", left, right):
            return _are_durations((left, right), known)
        case syntax_tree.Conditional(_, yes, no):
            return _are_durations((yes, no), known)
        case syntax_tree.Cast(_, operand):
            return _is_duration(operand, known)
    return False


def is_text_choice(value: syntax_tree.Expression) -> bool:
    """Return whether a value is a string literal, or a choice between string literals."""
    match value:
        case syntax_tree.StringLiteral():
            return True
        case syntax_tree.Conditional(_, yes, no):
            return is_text_choice(yes) and is_text_choice(no)
    return False


def text_sizes(program: ProgramTree, kept: int) -> dict[tuple[str, int], int]:
    """
    Return the room in bytes for strings at each place with a literal, by table and position.

    A place to which the value of another table is copied has at least the room of that value, by default ``kept``
    bytes.
    """
    bodies = [each for probe in program.probes for each in (probe.condition, probe.body) if each is not None]
    bodies += [function.body for function in program.functions]
    placed = [each for body in bodies for each in _placed(body)]
    wanted = {place for place, value in placed if is_text_choice(value)}
    placed += [each for block in program.blocks for each in _placed(block.body)]
    found = dict.fromkeys(wanted, 0)
    for place, value in placed:
        if place in wanted and not isinstance(value, syntax_tree.TableAccess):
            found[place] = max(found[place], _room_for(value))
    for place, value in placed:
        if place in wanted and isinstance(value, syntax_tree.TableAccess):
            found[place] = max(found[place], found.get((value.name, VALUE), kept))
    return found


def _placed(
    tree: syntax_tree.Expression | syntax_tree.Block,
) -> Iterator[tuple[tuple[str, int], syntax_tree.Expression]]:
    """Iterate over keys and kept values, each with the name of its table and its position."""
    for node in tree.walk():
        match node:
            case syntax_tree.Assignment(_, syntax_tree.TableAccess(name), value):
                kept = value.arguments[0] if isinstance(value, syntax_tree.Call) and value.function == "last" else value
                yield (name, VALUE), kept
            case syntax_tree.TableAccess(name, keys):
                yield from (((name, position), key) for position, key in enumerate(keys))


def _room_for(value: syntax_tree.Expression) -> int:
    """Return the number of string bytes that fit in the cells of a literal, or 0 for other values."""
    match value:
        case syntax_tree.StringLiteral(text):
            return min(len(text.encode("utf-8", "replace")) // 8 * 8 + 7, STRING_SIZE_MAX)
        case syntax_tree.Conditional(_, yes, no):
            return max(_room_for(yes), _room_for(no))
    return 0
