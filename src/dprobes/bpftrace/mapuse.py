"""What the maps of a script keep, by all that is assigned to them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.bpftrace import tree
from dprobes.bpftrace.expressionparser import parts_of
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["AGGREGATIONS", "Kept", "MapUses", "expressions_in", "expressions_of", "statements_of"]

AGGREGATIONS = {"count": 0, "sum": 1, "min": 1, "max": 1, "avg": 1, "stats": 1, "hist": 1, "lhist": 4}
"""What bpftrace can keep in a map besides a value, and of how many arguments."""

_CONVERSION = lazy_pattern(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j|t)?([a-zA-Z%])")

_SYMBOLS = frozenset({"ksym", "usym", "sym"})
_TEXTS = frozenset({"str", "strftime", "ntop", "buf", "path"})


class Kept(enum.Enum):
    """Say what a map keeps: ``NAMES`` are strings in quotes, a dictionary."""

    NUMBER = "numbers"
    SYMBOL = "symbols"
    NAMES = "names"
    TEXT = "strings"
    STACK = "call stacks of the kernel"
    USER_STACK = "call stacks of programs"
    TUPLE = "tuples"


@dataclass(frozen=True, slots=True)
class MapUses:
    """The maps of a script by their names, and which probes, by their numbers, put something into them."""

    kept: Mapping[str, Kept]
    makers: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, script: tree.Script) -> MapUses:
        """Return what a script does with its maps."""
        kept: dict[str, Kept] = dict.fromkeys(_strings_of_fields(script), Kept.TEXT)
        makers: dict[str, list[int]] = {}
        for number, probe in enumerate(script.probes):
            strings: dict[str, Kept] = {}
            for statement in statements_of(probe.body):
                match statement:
                    case tree.Assignment(tree.Variable(name), _, value):
                        strings[name] = _kept_by(value, strings)
                    case tree.Assignment(tree.Map(name), _, value):
                        found = _kept_by(value, strings)
                        if kept.get(name, Kept.NUMBER) is Kept.NUMBER:
                            kept[name] = found
                        makers.setdefault(name, []).append(number)
                    case tree.Do(tree.Step(_, tree.Map(name))):
                        kept.setdefault(name, Kept.NUMBER)
                        makers.setdefault(name, []).append(number)
        return cls(kept, makers)


def _strings_of_fields(script: tree.Script) -> set[str]:
    """Return the maps that keep arrays of characters: what is read from a field, and printed as a string."""
    assigned: dict[str, list[tree.Expression]] = {}
    printed: set[str] = set()
    for probe in script.probes:
        for statement in statements_of(probe.body):
            match statement:
                case tree.Assignment(tree.Map(name), "", value):
                    assigned.setdefault(name, []).append(value)
                case tree.Do(tree.Call("printf", [tree.String(format_), *arguments])):
                    letters = [match[1] for match in _CONVERSION.finditer(format_) if match[1] != "%"]
                    pairs = zip(letters, arguments, strict=False)
                    printed |= {each.name for letter, each in pairs if letter == "s" and isinstance(each, tree.Map)}
    return {name for name in printed if all(isinstance(each, tree.Field) for each in assigned.get(name, [None]))}


def statements_of(body: Sequence[tree.Statement]) -> Iterator[tree.Statement]:
    """Return the statements of a block and of all blocks in it."""
    for statement in body:
        yield statement
        match statement:
            case tree.If(_, then, otherwise):
                yield from statements_of(then)
                yield from statements_of(otherwise)
            case tree.While(_, inner) | tree.Unroll(_, inner):
                yield from statements_of(inner)


def expressions_of(probe: tree.Probe) -> Iterator[tree.Expression]:
    """Return all expressions of a probe, with those that they are made of, but for maps that are assigned to."""
    if probe.condition is not None:
        yield from parts_of(probe.condition)
    yield from expressions_in(probe.body)


def expressions_in(body: Sequence[tree.Statement]) -> Iterator[tree.Expression]:
    """Return the same of a block."""
    for statement in statements_of(body):
        match statement:
            case tree.Assignment(tree.Map(_, keys), operator, value) as assignment:
                if operator:
                    yield assignment.target
                for each in (*keys, value):
                    yield from parts_of(each)
            case tree.Assignment(_, _, value):
                yield from parts_of(value)
            case tree.Do(expression):
                yield from parts_of(expression)
            case tree.If(condition) | tree.While(condition):
                yield from parts_of(condition)


def _kept_by(value: tree.Expression, strings: Mapping[str, Kept]) -> Kept:
    match value:
        case tree.String():
            return Kept.NAMES
        case tree.Tuple():
            return Kept.TUPLE
        case tree.Name("func" | "probe"):
            return Kept.SYMBOL
        case tree.Name("comm" | "username"):
            return Kept.TEXT
        case tree.Name("kstack") | tree.Call("kstack"):
            return Kept.STACK
        case tree.Name("ustack") | tree.Call("ustack"):
            return Kept.USER_STACK
        case tree.Variable(name):
            return strings.get(name, Kept.NUMBER)
        case tree.Call(function) if function in _SYMBOLS:
            return Kept.SYMBOL
        case tree.Call(function) if function in _TEXTS:
            return Kept.TEXT
        case tree.Conditional(_, then, _):
            return _kept_by(then, strings)
    return Kept.NUMBER
