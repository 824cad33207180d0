"""
A program without its code: the statements of its headers, labels, and where everything was written.

Statements are stored under their keywords, with values in the form that the table of keywords gives them; so a new
keyword changes nothing for the others. One that a reader does not know is an error: it may matter.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dprobes.ppdf.images import Block, Note, NoteKind, Notes, check_images, code_of
from dprobes.ppdf.tabledefinitions import read_tables, write_tables
from dprobes.rpn.keywords import Header, Keyword, ValueKind, keywords_of
from dprobes.rpn.printer import location_keyword
from dprobes.rpn.program import (
    MAX_INSTRUCTIONS,
    Access,
    Address,
    Expression,
    Glob,
    Location,
    ModuleType,
    Offset,
    ProbeDefinition,
    Procedure,
    Program,
    Sampler,
    Tracepoint,
    Usdt,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.ppdf.fieldcodec import Reader, Writer
    from dprobes.ppdf.images import StoredImage
    from dprobes.ppdf.sources import Spans
    from dprobes.rpn.program import Code
    from dprobes.source import Span

__all__ = ["LOCATIONS", "read_program", "write_program"]

LOCATIONS = {"offset": 1, "pattern": 2, "address": 3, "range": 4, "sampler": 5, "tracepoint": 6, "usdt": 7}
"""The first byte of a location says which form it has."""

_STATEMENT_SIZE, _DEFINITION_SIZE, _PROCEDURE_SIZE, _LABEL_SIZE, _NOTE_SIZE = 9, 20, 20, 8, 9


def write_program(out: Writer, program: Program, notes: Sequence[Notes], spans: Spans) -> None:
    """Write a program; ``notes`` are those on the code of its handlers and procedures."""
    _Writer(out, spans).program(program, list(notes))


def read_program(reader: Reader, spans: Sequence[Span], images: Sequence[StoredImage]) -> Program:
    """Return the program whose code is in ``images``."""
    return _Reader(reader, spans).program(images)


class _Writer:
    def __init__(self, out: Writer, spans: Spans) -> None:
        self._out = out
        self._spans = spans

    def program(self, program: Program, notes: list[Notes]) -> None:
        out = self._out
        self._statements(program, Header.FILE)
        out.u32(len(program.definitions))
        for definition, its_notes in zip(program.definitions, notes, strict=False):
            self._statements(definition, Header.POINT)
            self._block(definition.handler, its_notes)
        out.u32(len(program.procedures))
        for procedure, its_notes in zip(program.procedures, notes[len(program.definitions) :], strict=True):
            out.string(procedure.name)
            out.u32(self._spans.number(procedure.span))
            self._block(procedure.code, its_notes)

    def _statements(self, section: Program | ProbeDefinition, header: Header) -> None:
        out = self._out
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        written = []
        for keyword in keywords_of(header).values():
            value = getattr(section, keyword.attribute)
            if keyword.attribute == "location":
                is_there = keyword.name == location_keyword(value)
            else:
                is_there = value != defaults[keyword.attribute] or keyword.name in section.spans
            if is_there and value is not None:
                written.append((keyword, value))
        out.u32(len(written))
        for keyword, value in written:
            out.string(keyword.name)
            out.u32(self._spans.number(section.spans.get(keyword.name)))
            self._value(keyword, value)

    def _value(self, keyword: Keyword, value: Any) -> None:
        out = self._out
        match keyword.kind:
            case ValueKind.LOCATION | ValueKind.RANGE | ValueKind.FREQUENCY:
                self._location(value)
            case ValueKind.NUMBER:
                out.u64(value)
            case ValueKind.BOOLEAN | ValueKind.WORD_SIZE:
                out.u8(value)
            case ValueKind.NAMES:
                out.strings(value)
            case ValueKind.MODTYPE | ValueKind.ACCESS:
                out.string(value.value)
            case ValueKind.MODULE | ValueKind.NAME:
                out.string(value)
            case ValueKind.TABLE:
                write_tables(out, value, self._spans)

    def _location(self, location: Location) -> None:
        out = self._out
        match location:
            case Offset(expression):
                out.u8(LOCATIONS["offset"])
                self._expression(expression)
            case Glob(pattern):
                out.u8(LOCATIONS["pattern"])
                out.string(pattern)
            case Address(low, None):
                out.u8(LOCATIONS["address"])
                self._expression(low)
            case Address(low, Expression() as high):
                out.u8(LOCATIONS["range"])
                self._expression(low)
                self._expression(high)
            case Sampler(frequency):
                out.u8(LOCATIONS["sampler"])
                out.u32(frequency)
            case Tracepoint(subsystem, name):
                out.u8(LOCATIONS["tracepoint"])
                out.string(subsystem)
                out.string(name)
            case Usdt(provider, name):
                out.u8(LOCATIONS["usdt"])
                out.string(provider)
                out.string(name)

    def _expression(self, expression: Expression) -> None:
        self._out.string(expression.symbol)
        self._out.wide(expression.addend)

    def _block(self, code: Code, notes: Notes) -> None:
        out = self._out
        out.numbers([self._spans.number(instruction.span) for instruction in code.instructions])
        out.u32(len(code.labels))
        for label, index in code.labels.items():
            out.string(label)
            out.u32(index)
        out.u32(len(notes))
        for index, note in notes.items():
            out.u32(index)
            out.u8(note.kind)
            out.string(note.text)


class _Reader:
    def __init__(self, reader: Reader, spans: Sequence[Span]) -> None:
        self._in = reader
        self._all_spans = spans
        self._instructions = 0

    def program(self, images: Sequence[StoredImage]) -> Program:
        reader = self._in
        fields, spans = self._statements(Header.FILE)
        headers: list[tuple[dict[str, Any], Mapping[str, Span]]] = []
        names: dict[str, None] = {}
        name_spans: list[Span | None] = []
        blocks: list[tuple[int, Block]] = []
        for _ in range(reader.count(_DEFINITION_SIZE, "probe definitions", MAX_INSTRUCTIONS)):
            headers.append(self._statements(Header.POINT))
            blocks.append(self._block())
        if not headers:
            reader.fail("expected at least one probe definition, found none")
        for _ in range(reader.count(_PROCEDURE_SIZE, "procedures", MAX_INSTRUCTIONS)):
            at = reader.offset
            name = reader.string("the name of a procedure")
            if name in names:
                reader.fail(f"there are two procedures '{name}'", at)
            names[name] = None
            name_spans.append(self._span())
            blocks.append(self._block())
        reader.end()
        tables = [table.name for table in fields.get("tables", ())]
        codes = list(code_of(images[0], blocks, tuple(names), tables))
        program = Program(
            definitions=tuple(
                ProbeDefinition(handler=code, spans=spans, **fields)
                for (fields, spans), code in zip(headers, codes, strict=False)
            ),
            procedures=tuple(
                Procedure(name, code, span)
                for name, span, code in zip(names, name_spans, codes[len(headers) :], strict=True)
            ),
            spans=spans,
            **fields,
        )
        check_images(program, images)
        return program

    def _statements(self, header: Header) -> tuple[dict[str, Any], dict[str, Span]]:
        reader = self._in
        begin = reader.offset
        fields: dict[str, Any] = {}
        spans: dict[str, Span] = {}
        for _ in range(reader.count(_STATEMENT_SIZE, f"statements of {header.value}")):
            at = reader.offset
            name = reader.string("a keyword")
            keyword = keywords_of(header).get(name)
            if keyword is None:
                reader.fail(f"'{name} =' is not known in {header.value}", at)
            if keyword.attribute in fields:
                reader.fail(f"'{name} =' is given twice in {header.value}", at)
            span = self._span()
            if span is not None:
                spans[name] = span
            fields[keyword.attribute] = self._value(keyword)
        needed = "name" if header is Header.FILE else "location"
        if not fields.get(needed):
            reader.fail(f"expected a {needed} in {header.value}, found none", begin)
        return fields, spans

    def _value(self, keyword: Keyword) -> Any:
        reader, what, at = self._in, f"'{keyword.name} ='", self._in.offset
        match keyword.kind:
            case ValueKind.LOCATION | ValueKind.RANGE | ValueKind.FREQUENCY:
                location = self._location()
                if location_keyword(location) != keyword.name:
                    reader.fail(f"expected the value of {what}, found that of '{location_keyword(location)} ='", at)
                return location
            case ValueKind.NUMBER:
                number = reader.u64(what)
                if not keyword.minimum <= number <= keyword.maximum:
                    reader.fail(f"expected {keyword.minimum} to {keyword.maximum} for {what}, found {number}", at)
                return number
            case ValueKind.BOOLEAN:
                return reader.flag(what)
            case ValueKind.WORD_SIZE:
                size = reader.u8(what)
                if size not in (4, 8):
                    reader.fail(f"expected {keyword.kind.value} for {what}, found {size}", at)
                return size
            case ValueKind.NAMES:
                return reader.strings(what)
            case ValueKind.MODTYPE | ValueKind.ACCESS:
                kind = ModuleType if keyword.kind is ValueKind.MODTYPE else Access
                text = reader.string(what)
                try:
                    return kind(text)
                except ValueError:
                    reader.fail(f"expected {keyword.kind.value} for {what}, found '{text}'", at)
            case ValueKind.MODULE | ValueKind.NAME:
                return reader.string(what)
            case ValueKind.TABLE:
                return read_tables(reader, self._all_spans)

    def _location(self) -> Location:
        reader, at = self._in, self._in.offset
        form = reader.u8("a location")
        if form == LOCATIONS["offset"]:
            return Offset(self._expression())
        if form == LOCATIONS["pattern"]:
            return Glob(reader.string("a pattern"))
        if form == LOCATIONS["address"]:
            return Address(self._expression())
        if form == LOCATIONS["range"]:
            return Address(self._expression(), self._expression())
        if form == LOCATIONS["tracepoint"]:
            return Tracepoint(reader.string("a subsystem"), reader.string("a tracepoint"))
        if form == LOCATIONS["usdt"]:
            return Usdt(reader.string("a provider"), reader.string("a USDT probe"))
        if form != LOCATIONS["sampler"]:
            reader.fail(f"expected a form of location from 1 to {len(LOCATIONS)}, found {form}", at)
        return Sampler(self._frequency())

    def _frequency(self) -> int:
        at, limits = self._in.offset, keywords_of(Header.POINT)["sampler"]
        frequency = self._in.u32("a frequency")
        if not limits.minimum <= frequency <= limits.maximum:
            self._in.fail(f"expected {limits.minimum} to {limits.maximum} samples a second, found {frequency}", at)
        return frequency

    def _expression(self) -> Expression:
        symbol = self._in.string_or_none("a symbol")
        return Expression(self._in.wide("a number"), symbol)

    def _span(self) -> Span | None:
        number = self._in.below_or_none(len(self._all_spans), "the number of a span")
        return None if number is None else self._all_spans[number]

    def _block(self) -> tuple[int, Block]:
        reader = self._in
        count = reader.count(4, "instructions", MAX_INSTRUCTIONS - self._instructions)
        self._instructions += count
        spans = [self._span() for _ in range(count)]
        labels: dict[str, int] = {}
        for _ in range(reader.count(_LABEL_SIZE, "labels")):
            at = reader.offset
            label = reader.string("a label")
            if label in labels:
                reader.fail(f"there are two labels '{label}'", at)
            labels[label] = reader.below(count + 1, "the place of a label")
        notes: Notes = {}
        for _ in range(reader.count(_NOTE_SIZE, "notes on operands")):
            at = reader.offset
            index, kind = reader.below(count, "the number of an instruction"), reader.u8("the kind of a note")
            text = reader.string_or_none("a note on an operand")
            if kind not in NoteKind.__members__.values() or index in notes:
                reader.fail(f"expected one note of kind 1 to {len(NoteKind)} for an instruction, found {kind}", at)
            if (text is None) != (kind == NoteKind.NEGATIVE):
                reader.fail("a note has not the text that it needs", at)
            notes[index] = Note(NoteKind(kind), text)
        return count, Block(labels, spans, notes)
