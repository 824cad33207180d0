"""Conversion of a bpftrace script to a program in DProbes C, with the options for its run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpftrace import script_tree
from dprobes.bpftrace.expression_writer import ExpressionWriter, Fields, MapUses, expressions_of
from dprobes.bpftrace.script_parser import parse
from dprobes.bpftrace.script_place import LONG_NAMES, PlaceKind, places_of
from dprobes.bpftrace.statement_writer import StatementWriter, asked_variable
from dprobes.source_text import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpftrace.script_place import Machine, Place
    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import SourceFile

__all__ = ["Conversion", "convert"]

# Directives are evaluated as by a compiler that has the kernel's types. Omitted lines become blanks, so that places in
# the script stay the same.

_KNOWN = frozenset({"BPFTRACE_HAVE_BTF"})
_CONDITION = re.compile(r"\s*#\s*(?P<word>ifdef|ifndef|if|elif|else|endif)\b\s*(?P<rest>.*)")
_DIRECTIVE = re.compile(r"\s*#\s*(?P<word>[a-z]\w*)\s*(?P<rest>.*)")
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/\*.*?\*/|//[^\n]*', re.DOTALL)


class Directives(NamedTuple):
    """
    A script's text with comments and ``#`` lines blanked, and the contents of these lines.

    ``macros`` are the ``#define`` lines as written, ``headers`` the included files, each with its place.
    """

    text: str
    macros: tuple[str, ...]
    headers: tuple[tuple[str, Span], ...]


def read_directives(source: SourceFile, diagnostics: Diagnostics) -> Directives:
    """Return the text and the ``#`` lines of a script; report directives that are unknown or not converted."""
    plain = _COMMENT.sub(lambda match: match.group() if match.group()[0] == '"' else _blank(match.group()), source.text)
    kept: list[str] = []
    macros: list[str] = []
    headers: list[tuple[str, Span]] = []
    taken: list[bool] = []
    position = 0
    for line in plain.splitlines(keepends=True):
        span = Span(source, position, position + len(line.rstrip()))
        position += len(line)
        condition, directive = _CONDITION.match(line), _DIRECTIVE.match(line)
        if line.startswith("#!"):
            kept.append(_blank(line))
        elif condition is not None:
            _condition(condition, taken, span, diagnostics)
            kept.append(_blank(line))
        elif not all(taken) or directive is None:
            kept.append(line if all(taken) else _blank(line))
        else:
            kept.append(_blank(line))
            match directive["word"]:
                case "include":
                    headers.append((directive["rest"].strip(), span))
                case "define" | "undef":
                    macros.append(line.strip())
                case word:
                    diagnostics.error(span, f"there is no directive '#{word}'")
    if taken:
        diagnostics.error(Span(source, position, position), "expected '#endif' before the end of the script")
    return Directives("".join(kept), tuple(macros), tuple(headers))


def _condition(match: re.Match[str], taken: list[bool], span: Span, diagnostics: Diagnostics) -> None:
    rest = match["rest"].strip()
    match match["word"]:
        case "ifdef" | "ifndef" as word:
            taken.append((rest in _KNOWN) == (word == "ifdef"))
        case "if" | "elif" as word:
            diagnostics.error(
                span, f"conditions after '#{word}' are not converted", hint="leave the part that you want"
            )
            if word == "if":
                taken.append(True)
        case word if not taken:
            diagnostics.error(span, f"'#{word}' without '#if'")
        case "else":
            taken[-1] = not taken[-1]
        case _:
            taken.pop()


def _blank(text: str) -> str:
    return "".join(character if character == "\n" else " " for character in text)


_STRUCTURE = re.compile(r"\b(struct|union|enum)\s+(\w+)\s*\{")
_MACRO = re.compile(r"#\s*define\s+(\w+)")
_OF_TOOL = ("BEGIN", "END", "interval")
_UNITS = ("s", "ms", "us")
_RATE_MAX, _DIGITS_MAX = 100, 9


class Conversion(NamedTuple):
    """A converted script: the text in DProbes C, and the options of ``dprobes run`` that the program needs."""

    text: str
    options: tuple[str, ...]


def convert(source: SourceFile, machine: Machine, diagnostics: Diagnostics) -> Conversion:
    """Convert a script; raise ``SourceError`` with all constructs that have no equivalent in DProbes C."""
    directives = read_directives(source, diagnostics)
    script = parse(source, directives.text, diagnostics)
    diagnostics.raise_if_errors()
    converter = _Converter(script, machine, diagnostics, directives.macros)
    for header, span in directives.headers:
        diagnostics.note(span, f"the header {header} is not read: what is used of it has to be declared")
    probes = converter.probes()
    diagnostics.raise_if_errors()
    if not script.probes:
        diagnostics.error(None, "there is no probe in the script")
        diagnostics.raise_if_errors()
    head = [*directives.macros, *script.structures]
    return Conversion("\n".join([*head, *([""] if head else []), *probes]) + "\n", tuple(converter.options))


class _Converter:
    def __init__(
        self, script: script_tree.Script, machine: Machine, diagnostics: Diagnostics, macros: Sequence[str]
    ) -> None:
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
        self._asked: list[str] = []

    def probes(self) -> list[str]:
        """Return all definitions of the program in order: probes that write a table precede those that read it."""
        found = []
        for number in self._order():
            probe = self._script.probes[number]
            kind = LONG_NAMES.get(probe.points[0].parts[0], probe.points[0].parts[0])
            if kind not in _OF_TOOL:
                found += self._probes(probe)
            elif (block := self._of_tool(kind, probe)) is not None:
                found.append(block)
        return [*self._variables(), *found, *self._answers()]

    def _variables(self) -> list[str]:
        """Return the declarations of the program variables that hits set to have the tool execute a statement."""
        return [f"static long {asked_variable(number)};" for number in range(len(self._asked))]

    def _answers(self) -> list[str]:
        """Return an ``every`` and an ``end`` block, which execute the statements whose variables hits have set."""
        every, end = list[str](), list[str]()
        for number, statement in enumerate(self._asked):
            variable = asked_variable(number)
            every.append(f"    if ({variable}) {{ {variable} = 0; {statement} }}")
            if not statement.startswith(("exit", "clear")):
                end.append(f"    if ({variable}) {statement}")
        blocks = (("every 100ms", every), ("end", end))
        return ["\n".join([f"{word} {{", *lines, "}"]) for word, lines in blocks if lines]

    def _order(self) -> list[int]:
        """Return the probes' numbers in an order in which tables are written before they are read, if possible."""
        left = list(range(len(self._script.probes)))
        reads = {
            number: {
                each.name for each in expressions_of(self._script.probes[number]) if isinstance(each, script_tree.Map)
            }
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

    def _probes(self, probe: script_tree.Probe) -> list[str]:
        """
        Return the probe definition, or one for each place.

        Separate definitions are needed for ``func`` and ``probe`` at places without an address that has that name.
        """
        places = [place for point in probe.points for place in places_of(point, self._machine, self._diagnostics)]
        asks = any(
            isinstance(each, script_tree.Name) and each.name in ("func", "probe") for each in expressions_of(probe)
        )
        if asks and any(place.kind not in (PlaceKind.ENTRY, PlaceKind.RETURN, PlaceKind.OTHER) for place in places):
            return [self._probe(probe, [place]) for place in places]
        return [self._probe(probe, places)] if places else []

    def _probe(self, probe: script_tree.Probe, places: Sequence[Place]) -> str:
        arrays: dict[str, int] = {}
        pointers: dict[str, str] = {}
        for place in places:
            subsystem = "syscalls" if place.kind is PlaceKind.CALL_ENTRY else place.subsystem
            if subsystem:
                arrays |= self._machine.arrays(place.subsystem, place.function) if place.subsystem else {}
                pointers |= self._machine.pointers(subsystem, place.function)
        values = ExpressionWriter(
            places,
            self._maps,
            Fields(arrays, pointers),
            self._structures,
            self._constants,
            self._diagnostics,
            _parameters(probe, places),
        )
        condition = f" when ({values.number(probe.condition)})" if probe.condition is not None else ""
        lines = StatementWriter(values, self._maps, self._asked).block(probe.body)
        self.options += [each for each in values.options if each not in self.options]
        where = ",\n".join(place.text for place in places)
        return "\n".join([f"{where}{condition} {{", *(f"    {line}" for line in lines), "}"])

    def _of_tool(self, kind: str, probe: script_tree.Probe) -> str | None:
        """Return the block of the tool for a probe BEGIN, END or interval (``kind``); None if it has no statements."""
        word = {"BEGIN": "begin", "END": "end"}.get(kind) or f"every {self._time(probe)}"
        values = ExpressionWriter((), self._maps, Fields(), self._structures, self._constants, self._diagnostics)
        lines = StatementWriter(values, self._maps, in_tool=True).block(probe.body)
        self.options += [each for each in values.options if each not in self.options]
        return "\n".join([f"{word} {{", *(f"    {line}" for line in lines), "}"]) if lines else None

    def _time(self, probe: script_tree.Probe) -> str:
        match probe.points[0].parts:
            case (_, "hz", number) if number.isdigit() and 1 <= int(number) <= _RATE_MAX:
                return f"{1000 // int(number)}ms"
            case (_, unit, number) if unit in _UNITS and number.isdigit() and len(number) <= _DIGITS_MAX:
                return f"{int(number)}{unit}"
        self._diagnostics.error(probe.points[0].span, "this is not a time", hint="write interval:s:1")
        return "1s"


def _parameters(probe: script_tree.Probe, places: Sequence[Place]) -> frozenset[str]:
    """Return the parameters of the probed functions that a probe uses by name, as ``args.NAME``."""
    if not any(place.has_names for place in places):
        return frozenset()
    fields = [each for each in expressions_of(probe) if isinstance(each, script_tree.Field)]
    return frozenset(
        each.name for each in fields if isinstance(each.base, script_tree.Name) and each.base.name == "args"
    )
