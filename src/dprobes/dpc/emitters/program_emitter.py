"""RPN source of programs (file headers, definitions with their handlers, procedures), and the templates of records."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.dpc.emitters.log_emitter import MinorCodes, logged_size, minor_codes
from dprobes.dpc.emitters.rpn_writer import Line, Writer
from dprobes.dpc.emitters.statement_emitter import StatementEmitter
from dprobes.dpc.emitters.value_emitter import ValueEmitter
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree.typed_program import logs_in
from dprobes.dpc.typers.program_typer import VARIABLE_COUNTS
from dprobes.dpc.types.c_types import Void, size_of
from dprobes.rpn.instruction_set import LOGMAX
from dprobes.rpn.keyed_tables import FAULTS
from dprobes.rpn.program_text import LOGMAX_MAX
from dprobes.rpn.rpn_program import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.typed_program import TypedFunction, TypedProbe
    from dprobes.dpc.typers.program_typer import ProgramTyper
    from dprobes.preprocessor import Preprocessed
    from dprobes.source_text import Span

__all__ = ["KERNEL_KINDS", "Compilation", "ProgramEmitter", "jmpmax_of", "template_file"]

KERNEL_KINDS = (syntax_tree.PointKind.TRACEPOINT, syntax_tree.PointKind.SYSTEM_CALL)
"""Kinds of probepoints that are in no module."""

_JMPMAX = 10_000
"""Default limit on the number of jumps in a hit, which bounds loops."""

_SCOPED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z_][A-Za-z0-9_]*)+\Z")
_SLASHED = re.compile(
    r'(?P<name>[^"*?\[]*(?:/|(?<!:):(?!:))[^"*?\[]*?)(?P<offset>(?:[+-](?:0x[0-9a-fA-F]+|[0-9]+))?)\Z'
)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled program: the lines of its RPN source, the templates of its major code, and its probe definitions."""

    module: str
    major: int
    lines: tuple[Line, ...]
    templates: Mapping[int, str] = field(default_factory=dict)
    definitions: int = 0

    @property
    def is_in_kernel(self) -> bool:
        """True if the program probes the kernel, one of its modules, or its tracepoints."""
        return any(line.text.startswith("modtype =") for line in self.lines[:2])

    def for_words_of(self, size: int) -> Compilation:
        """Return the program restricted to processors with words of ``size`` bytes."""
        name, *rest = self.lines
        return replace(self, lines=(name, Line(f"wordsize = {size}", name.span), *rest))

    @property
    def source(self) -> str:
        """The text of the RPN source."""
        return "".join(f"{line.text}\n" for line in self.lines)

    def preprocessed(self) -> Preprocessed:
        """Return the RPN source, in which each line has the span of C source that it was compiled from."""
        from dprobes.preprocessor.mapped_text import TextBuilder
        from dprobes.source_text import SourceFile
        from dprobes.source_text import Span as SourceSpan

        whole = SourceFile("<compiled>", self.source)
        builder = TextBuilder(whole)
        position = 0
        for line in self.lines:
            end = position + len(line.text) + 1
            text = "" if line.text.lstrip().startswith("//") else line.text
            builder.put(f"{text}\n", line.span or SourceSpan(whole, position, end))
            position = end
        return builder.build()

    @property
    def template_file(self) -> str:
        """The text of the program's template file."""
        return template_file(self.major, self.templates)


def jmpmax_of(program: syntax_tree.ProgramTree) -> int:
    """Return the limit on the number of jumps in a hit: the attribute ``jmpmax``, or the default."""
    return next((int(each.value or 0) for each in program.attributes if each.name == "jmpmax"), 0) or _JMPMAX


def template_file(major: int, templates: Mapping[int, str]) -> str:
    """
    Return the text of a template file for records with the major code ``major``.

    ``templates`` is keyed by minor code.
    """
    lines = [f"major = {major}"]
    for minor, text in sorted(templates.items()):
        lines += ["", f"minor = {minor}", *(f"fmt = {_quoted(line)}" for line in text.split("\n"))]
    return "\n".join((*lines, ""))


class ProgramEmitter:
    """A writer of the RPN programs of a source, one for each module."""

    def __init__(
        self,
        program: syntax_tree.ProgramTree,
        typer: ProgramTyper,
        functions: Sequence[TypedFunction],
        probes: Sequence[TypedProbe],
        word_size: int,
        diagnostics: Diagnostics,
        module: str,
    ) -> None:
        self._program = program
        self._typer = typer
        self._functions = functions
        self._probes = probes
        self._word_size = word_size
        self._diagnostics = diagnostics
        self._module = program.module or module
        self._printed: dict[int, tuple[str, Span]] = {}
        """The template of each minor code, and the place of its probe in the source."""
        self._codes = [minor_codes(each.paths, each.body) for each in probes]
        """The minor codes of each probe, by its position in ``probes``."""
        self._minors = self._first_minors()
        """The first minor code of each probe, by its position in ``probes``."""
        self._has_faults = False
        self._wide: dict[str, None] = {}
        """The procedures for wide numbers that the current program needs."""
        self._procedures = {each.signature.name: f"f{n}_{each.signature.name}" for n, each in enumerate(functions)}

    def compilations(self) -> list[Compilation]:
        """
        Return the programs in the order in which the source names their modules.

        A source that has only blocks of the tool is a program without probes, for no module.
        """
        if not self._probes:
            return [self._compilation("*")]
        modules: dict[str, None] = {}
        for each in self._probes:
            for point in each.at:
                module = self._module_of(point)
                if not module:
                    self._refuse_unknown_module(point)
                modules[module] = None
        found = [self._compilation(module) for module in modules]
        return [self._with_faults(each) for each in found] if self._has_faults else found

    def _with_faults(self, compilation: Compilation) -> Compilation:
        """Return a program whose header declares the table of exceptions, after all other tables."""
        lines = list(compilation.lines)
        place = next(number for number, line in enumerate(lines) if line.text.startswith("jmpmax"))
        lines.insert(place, Line(f"table = {FAULTS}, count, word, word", None))
        return replace(compilation, lines=tuple(lines))

    def _module_of(self, point: syntax_tree.Point) -> str:
        """Return the name of the module that a probepoint, or else the program, states; "" if neither does."""
        if point.kind in KERNEL_KINDS:
            return "kernel tracepoint"
        if point.module == "kernel":
            return "kernel kernel"
        if point.kind is syntax_tree.PointKind.SAMPLE:
            return point.module or self._program.module or "*"  # everything on the CPU, even with a process or command
        if point.access in ("io", "in", "out") and not point.module:
            return "kernel kernel"  # nearly all accesses to ports are those of drivers
        if point.module or self._module:
            return point.module or self._module
        if point.kind is syntax_tree.PointKind.WATCH and point.place[:1].isdigit():
            return "kernel kernel"  # an address in every process, which a kernel program watches
        return ""

    def _refuse_unknown_module(self, point: syntax_tree.Point) -> None:
        hint = f"write MODULE:{point.place}, or 'module NAME;'"
        neighbours = (pair for each in self._probes for pair in pairwise(each.at))
        before = next((each for each, other in neighbours if other is point), None)
        if before is not None and (before.module or before.kind is not syntax_tree.PointKind.CODE):
            joined = f"{before.module}:{point.place}" if before.module else f"{before.kind.value} {point.place}"
            hint = f"write each place in full: {'return ' if before.at_return else ''}{joined}"
        if point.place.startswith(("/", "./", "../")):
            hint = "write MODULE:FUNCTION; write a path with ',' or ':' in double quotes: \"./a,b.so\":FUNCTION"
        self._diagnostics.error(point.span, f"the module of '{point.place}' is not known", hint=hint)

    def _attribute(self, attributes: Sequence[syntax_tree.Attribute], name: str) -> int | str | None:
        return next((each.value for each in attributes if each.name == name), None)

    def _compilation(self, module: str) -> Compilation:
        w = Writer()
        self._wide = {}
        place = next((point.span for each in self._probes for point in each.at), None)
        name, modtype = module, ""
        if module.startswith("kernel "):
            name, modtype = "vmlinux", module.removeprefix("kernel ")
        elif module.startswith("kmod "):
            name, modtype = module.removeprefix("kmod "), "kmod"
        major = self._attribute(self._program.attributes, "major") or 0
        with w.at(place):
            w.header(f"name = {_quoted(name)}")
        if modtype:
            with w.at(place):
                w.header(f"modtype = {modtype}")
        w.header(f"major = {major}")
        for kind, count in self._typer.counts.items():
            if count:
                w.header(f"{VARIABLE_COUNTS[kind]} = {count}")
        for table in self._typer.tables:
            with w.at(table.span):
                w.header(table.statement)
        w.header(f"jmpmax = {jmpmax_of(self._program)}")
        if (logmax := self._logmax(module)) > LOGMAX:
            w.header(f"logmax = {logmax}")
        for definer, attribute in (("groupdef", "group"), ("typedef", "type")):
            if defined := self._names_of(attribute):
                with w.at(defined[1]):
                    w.header(f"{definer} = {defined[0]}")
        templates: dict[int, str] = {}
        definitions = 0
        for each, codes, first in zip(self._probes, self._codes, self._minors, strict=True):
            points = [point for point in each.at if self._module_of(point) == module]
            if not points:
                continue
            found = {first + code: text for code, text in _templates(each, codes).items()}
            self._check_minors(each.probe, found)
            templates |= found
            definitions += len(points)
            for point in points:
                self._definition(w, each, codes, point, first)
        for function in self._functions:
            self._procedure(w, function)
        if self._wide:
            from dprobes.dpc.emitters.cell_emitter import procedure_lines

            for line in procedure_lines(self._wide):
                w.header(line)
        assert isinstance(major, int)
        return Compilation(name, major, tuple(w.lines), templates, definitions)

    def _logmax(self, module: str) -> int:
        """
        Return the maximum size in bytes of a module's records, for the longest output; report a size over LOGMAX_MAX.

        Each probe's longest sequence of ``printf`` counts.
        """
        largest = 0
        for each in self._probes:
            if not any(self._module_of(point) == module for point in each.at):
                continue
            sizes = {
                log.number: sum(logged_size(item, self._word_size) for item in log.items) for log in logs_in(each.body)
            }
            wanted = max((sum(map(sizes.__getitem__, sequence)) for sequence in each.paths.ends), default=0)
            if wanted > LOGMAX_MAX:
                message = f"this may print {wanted} bytes in one record, which has at most {LOGMAX_MAX}"
                hint = "print less: str(p, n) or mem(p, n) with a smaller n"
                self._diagnostics.error(each.at[0].span, message, hint=hint)
            largest = max(largest, min(wanted, LOGMAX_MAX))
        return largest

    def _names_of(self, name: str) -> tuple[str, Span] | None:
        """
        Return the words of the attribute ``name``, such as "group", of all probes, and its first span.

        Return None if no probe has the attribute.
        """
        found = [each for probe in self._probes for each in probe.probe.attributes if each.name == name]
        names = dict.fromkeys(word for each in found for word in str(each.value).split())
        return (" ".join(names), found[0].span) if found else None

    def _check_minors(self, probe: syntax_tree.Probe, templates: dict[int, str]) -> None:
        """
        Report a minor code that two probes use with different templates.

        Records of both would be printed with the first template. ``templates`` is keyed by minor code.
        """
        for minor, text in templates.items():
            known, first = self._printed.setdefault(minor, (text, probe.span))
            if known != text:
                span = next((each.span for each in probe.attributes if each.name == "minor"), probe.span)
                notes = (Note("the other one is printed here", first),)
                message = f"minor code {minor} belongs to another format, by which this output would be printed"
                self._diagnostics.error(span, message, notes=notes, hint="leave 'minor' out: each format gets its own")

    def _first_minors(self) -> list[int]:
        """
        Return the first minor code of each probe; with several probes, codes count from 1 in the order of the source.

        All modules share the templates. A probe with several probepoints has the same codes at each, if its templates
        are equal there.
        """
        following = int(len({each.probe.order for each in self._probes}) > 1)
        known: dict[tuple[int, tuple[tuple[int, str], ...]], int] = {}
        found = []
        for each, codes in zip(self._probes, self._codes, strict=True):
            own = self._attribute(each.probe.attributes, "minor")
            key = each.probe.order, tuple(sorted(_templates(each, codes).items()))
            first = own if isinstance(own, int) else known.get(key, following)
            known[key] = first
            found.append(first)
            following = max(following, first + codes.count)
        return found

    def _definition(self, w: Writer, each: TypedProbe, codes: MinorCodes, point: syntax_tree.Point, minor: int) -> None:
        with w.at(point.span):
            w.header("")
            w.header(f"// {' '.join(point.span.text.split())}")
            for statement in _placed(point, self._typer):
                w.header(statement)
            w.header(f"minor = {minor}")
            for attribute in each.probe.attributes:
                if attribute.name != "minor":
                    w.header(f"{attribute.name} = {attribute.value}")
            if point.at_return:
                w.header("return = yes")
        w.depth = 0
        values = ValueEmitter(w, self._word_size, self._procedures, used=self._wide)
        emitter = StatementEmitter(
            w, values, each.slots, paths=each.paths, codes=codes, minor=minor, word_size=self._word_size
        )
        place = point.span if each.probe.condition is None else each.probe.condition.span
        emitter.handler(each.condition, each.body, place)
        self._has_faults = self._has_faults or (emitter.faults is not None and emitter.faults.counts)

    def _procedure(self, w: Writer, function: TypedFunction) -> None:
        signature = function.signature
        with w.at(signature.span):
            w.header("")
            w.header(f"proc {self._procedures[signature.name]}")
        w.depth = 0
        count = sum(2 if (size_of(each) or 0) > self._word_size else 1 for each in signature.parameters)
        values = ValueEmitter(w, self._word_size, self._procedures, count, self._wide)
        result = None if isinstance(signature.type, Void) else count
        StatementEmitter(w, values, function.slots, result=result, word_size=self._word_size).function(function.body)
        w.header("endproc")


def _templates(each: TypedProbe, codes: MinorCodes) -> dict[int, str]:
    """Return the templates of a probe, keyed by minor code from 0."""
    of_logs = {log.number: log.template for log in logs_in(each.body)}
    return {code: "\n".join(of_logs[log] for log in sequence) for sequence, code in codes.of.items()}


def _placed(point: syntax_tree.Point, typer: ProgramTyper) -> list[str]:
    """Return the statements of a probepoint's header that say where it is placed."""
    match point.kind:
        case syntax_tree.PointKind.SAMPLE:
            return [f"sampler = {Sampler(point.number, point.place or None)}"]
        case syntax_tree.PointKind.WATCH:
            size = 1 if point.type is None else size_of(typer.types_at(point).of(point.type)) or 1
            place = _SCOPED.sub(r'"\g<0>"', _symbol(point.place))
            end = f":{place} + {size - 1}" if size > 1 else ""
            return [f"address = {place}{end}", f"watchpoint = {point.access}"]
        case syntax_tree.PointKind.SYSTEM_CALL:
            return [f"offset = syscall:{point.place}"]
        case syntax_tree.PointKind.USDT:
            return [f"offset = usdt:{point.place}"]
    return [f"offset = {_symbol(point.place)}"]


def _symbol(place: str) -> str:
    """Return a place in a module in RPN syntax. A name with a slash, as in Go, or with a source file is quoted."""
    match = _SLASHED.match(place)
    return place if match is None else f'"{match["name"]}"{match["offset"]}'


def _quoted(line: str) -> str:
    escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return f'"{escaped}"'
