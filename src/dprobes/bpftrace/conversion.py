"""A script of bpftrace to a program in DProbes C, with the options that it is run with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpftrace import tree
from dprobes.bpftrace.directives import read_directives
from dprobes.bpftrace.expressionwriter import ExpressionWriter
from dprobes.bpftrace.mapuse import Kept, MapUses, expressions_of, statements_of
from dprobes.bpftrace.parser import parse
from dprobes.bpftrace.place import LONG_NAMES, PlaceKind, places_of
from dprobes.bpftrace.statementwriter import StatementWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpftrace.machine import Machine
    from dprobes.bpftrace.place import Place
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["Conversion", "convert"]

_STRUCTURE = re.compile(r"\b(struct|union|enum)\s+(\w+)\s*\{")
_MACRO = re.compile(r"#\s*define\s+(\w+)")
_OF_TOOL = ("BEGIN", "END", "interval")
_LEFT_OUT = {
    "BEGIN": "records say what they are",
    "END": "tables are printed at the end",
    "interval": "--interval prints tables as they are",
}
_UNITS = {"s": "s", "ms": "ms", "us": "us", "ns": "ns"}


class Conversion(NamedTuple):
    """The text of a program, and the options of ``dprobes run`` that it needs."""

    text: str
    options: tuple[str, ...]


def convert(source: SourceFile, machine: Machine, diagnostics: Diagnostics) -> Conversion:
    """Convert a script; raise ``SourceError`` with all that has no like in DProbes C."""
    directives = read_directives(source, diagnostics)
    script = parse(source, directives.text, diagnostics)
    diagnostics.raise_if_errors()
    converter = _Converter(script, machine, diagnostics, directives.macros)
    for header, span in directives.headers:
        diagnostics.note(span, f"the header {header} is not read: what is used of it has to be declared")
    probes = converter.probes()
    diagnostics.raise_if_errors()
    if not probes:
        diagnostics.error(None, "there is no probe in the script but those of the tool itself (BEGIN, END, interval)")
        diagnostics.raise_if_errors()
    head = [*directives.macros, *script.structures]
    return Conversion("\n".join([*head, *([""] if head else []), *probes]) + "\n", tuple(converter.options))


class _Converter:
    def __init__(self, script: tree.Script, machine: Machine, diagnostics: Diagnostics, macros: Sequence[str]) -> None:
        self._script = script
        self._machine = machine
        self._diagnostics = diagnostics
        self._maps = MapUses.of(script)
        self._structures = frozenset(
            f"{kind} {name}" for text in script.structures for kind, name in _STRUCTURE.findall(text)
        )
        self._constants = frozenset(
            name for text in macros if (match := _MACRO.match(text)) is not None for name in match.groups()
        )
        self.options: list[str] = []

    def probes(self) -> list[str]:
        """Return the probes, those that put something into a table before those that read it."""
        found = []
        for number in self._order():
            probe = self._script.probes[number]
            kind = LONG_NAMES.get(probe.points[0].parts[0], probe.points[0].parts[0])
            if kind in _OF_TOOL:
                self._of_tool(kind, probe)
            else:
                found += self._probes(probe)
        return found

    def _order(self) -> list[int]:
        """Return the numbers of the probes in such an order that tables are known before they are read."""
        left = list(range(len(self._script.probes)))
        reads = {
            number: {each.name for each in expressions_of(self._script.probes[number]) if isinstance(each, tree.Map)}
            for number in left
        }
        found: list[int] = []
        while left:
            ready = next((number for number in left if self._is_known(reads[number], number, found)), left[0])
            left.remove(ready)
            found.append(ready)
        return found

    def _is_known(self, names: set[str], number: int, before: Sequence[int]) -> bool:
        made = (set(self._maps.makers.get(name, ())) for name in names)
        return all(not makers or makers & {number, *before} for makers in made)

    def _probes(self, probe: tree.Probe) -> list[str]:
        """Return a probe, or one for each place where the body asks which one was hit and no address says it."""
        places = [place for point in probe.points for place in places_of(point, self._machine, self._diagnostics)]
        asks = any(isinstance(each, tree.Name) and each.name in ("func", "probe") for each in expressions_of(probe))
        if asks and any(place.kind not in (PlaceKind.ENTRY, PlaceKind.OTHER) for place in places):
            return [self._probe(probe, [place]) for place in places]
        return [self._probe(probe, places)] if places else []

    def _probe(self, probe: tree.Probe, places: Sequence[Place]) -> str:
        arrays: dict[str, int] = {}
        for place in places:
            if place.subsystem:
                arrays |= self._machine.arrays(place.subsystem, place.function)
        values = ExpressionWriter(places, self._maps, arrays, self._structures, self._constants, self._diagnostics)
        condition = f" when ({values.number(probe.condition)})" if probe.condition is not None else ""
        lines = StatementWriter(values, self._maps).block(probe.body)
        where = ",\n".join(place.text for place in places)
        return "\n".join([f"{where}{condition} {{", *(f"    {line}" for line in lines), "}"])

    def _of_tool(self, kind: str, probe: tree.Probe) -> None:
        """Look at a block that runs in the tool: what it prints is left out, or is done by an option."""
        left_out = False
        for statement in statements_of(probe.body):
            match statement:
                case tree.Do(tree.Call("printf" | "time" | "clear" | "zero" | "delete")):
                    left_out = True
                case tree.Do(tree.Call("print", [tree.Map(), *rest])):
                    if kind == "interval":
                        self._option(f"--interval {self._time(probe)}")
                    if rest and isinstance(rest[0], tree.Number):
                        self._option(f"--rows {rest[0].value}")
                case tree.Do(tree.Call("exit", _)) if kind == "interval":
                    self._option(f"--duration {self._time(probe)}")
                case tree.Assignment(tree.Map(name), "", tree.String()) if self._maps.kept[name] is Kept.NAMES:
                    pass
                case _:
                    hint = "tables are printed at the end, and with --interval TIME"
                    message = f"only printing of tables is converted in a block '{kind}'"
                    self._diagnostics.error(statement.span, message, hint=hint)
        if left_out:
            said = _LEFT_OUT[kind]
            self._diagnostics.note(
                probe.points[0].span, f"what the block '{kind}' prints or clears is left out: {said}"
            )

    def _option(self, option: str) -> None:
        if option not in self.options:
            self.options.append(option)

    def _time(self, probe: tree.Probe) -> str:
        match probe.points[0].parts:
            case (_, "hz", number) if number.isdigit() and int(number):
                return f"{1000 // int(number) or 1}ms"
            case (_, unit, number) if unit in _UNITS and number.isdigit():
                return f"{number}{_UNITS[unit]}"
        self._diagnostics.error(probe.points[0].span, "this is no time", hint="write interval:s:1")
        return "1s"
