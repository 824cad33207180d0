"""
A program without its code: the statements of its headers, labels, and their spans in the source.

Statements are stored under their keywords, with values in the form of the table of keywords, so that a new keyword does
not change the others. A keyword that a reader does not know is an error, because it may be significant.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dprobes.ppdf.code_images import Block, Note, NoteKind, Notes, check_images, code_of
from dprobes.ppdf.ppdf_sections import NO_TEXT, NONE, Strings, Writer
from dprobes.rpn.keyed_tables import (
    BUCKETS_MAX,
    KEYS_MAX,
    ROOM_MAX,
    TABLES_MAX,
    Key,
    KeyKind,
    Range,
    Table,
    TableKind,
    Unit,
)
from dprobes.rpn.performance_counters import period_problem, unknown_counter_hint
from dprobes.rpn.program_text import Header, Keyword, ValueKind, keywords_of, location_keyword
from dprobes.rpn.rpn_program import (
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
    split_patch,
)
from dprobes.source_text import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.ppdf.code_images import StoredImage
    from dprobes.ppdf.ppdf_sections import Reader
    from dprobes.rpn.rpn_program import Code

__all__ = ["LOCATIONS", "Spans", "read_program", "read_sources", "write_program"]

# Only those lines of source files are stored to which a span refers; the others are empty.

LINE_MAX = 1 << 22
"""Maximum total number of lines in all files, which limits memory."""

DEPTH_MAX = 64
"""Maximum number of nested macros in one span."""

SPAN_SIZE = 24
_FILE_SIZE, _LINE_SIZE = 8, 8

_Row = tuple[int, int, int, int, int, int]


class Spans:
    """The numbers of spans, each once; ``write`` writes them with the lines that they need."""

    def __init__(self, strings: Strings) -> None:
        self._strings = strings
        self._files: dict[SourceFile, int] = {}
        self._lines: list[dict[int, str]] = []
        self._rows: dict[_Row, int] = {}

    def number(self, span: Span | None, depth: int = 0) -> int:
        """
        Add a span to the table of spans, and return its number there, or NONE for None.

        ``depth`` is the number of macro calls around it. A span that is nested too deeply is NONE, too.
        """
        if span is None or depth >= DEPTH_MAX:
            return NONE
        line, column = span.file.line_and_column(span.start)
        text = NO_TEXT.sub(" ", span.file.line_text(line))
        column = min(column, len(text) + 1)
        length = max(0, min(span.end - span.start, len(text) + 1 - column))
        file = self._files.setdefault(span.file, len(self._files))
        if file == len(self._lines):
            self._lines.append({})
        self._lines[file][line] = text
        name = body = NONE
        if span.expansion is not None:
            name = self._strings.number(span.expansion.name)
            body = self.number(span.expansion.body, depth + 1)
        return self._rows.setdefault((file, line, column, length, name, body), len(self._rows))

    def write(self, out: Writer) -> None:
        """Write the source files, their lines, and the table of spans."""
        out.u32(len(self._files))
        for file, lines in zip(self._files, self._lines, strict=True):
            out.row("sI", file.name, len(lines))
            for line, text in sorted(lines.items()):
                out.row("Is", line, text)
        out.u32(len(self._rows))
        for row in self._rows:
            out.row("IIIIII", *row)


@dataclass(frozen=True, slots=True)
class _File:
    source: SourceFile
    lines: Mapping[int, str]
    starts: Mapping[int, int]


def read_sources(reader: Reader) -> Sequence[Span]:
    """Read source files and spans; return the spans, indexed by their numbers."""
    files: list[_File] = []
    lines_left = LINE_MAX
    for _ in range(reader.count(_FILE_SIZE, "source files")):
        file = _read_file(reader, lines_left)
        lines_left -= max(file.lines, default=0)
        files.append(file)
    spans: list[Span] = []
    depths: list[int] = []
    for _ in range(reader.count(SPAN_SIZE, "spans")):
        file = files[reader.below(len(files), "the number of a source file")]
        at = reader.offset
        line, column, length = (reader.u32(what) for what in ("a line", "a column", "a length"))
        if line not in file.lines:
            reader.fail(f"line {line} of '{file.source.name}' is not there", at)
        room = len(file.lines[line]) + 1
        if not 1 <= column <= room or length > room - column:
            reader.fail(f"expected columns from 1 to {room}, found {length} characters from column {column} on", at)
        name = reader.string_or_none("a macro")
        body = reader.below_or_none(len(spans), "the number of a span for a macro")
        depth = 0 if body is None else depths[body] + 1
        if depth >= DEPTH_MAX or (name is None and body is not None):
            reader.fail("the definitions of macros lead nowhere", at)
        expansion = None if name is None else Expansion(name, None if body is None else spans[body])
        start = file.starts[line] + column - 1
        spans.append(Span(file.source, start, start + length, expansion))
        depths.append(depth)
    reader.end()
    return spans


def _read_file(reader: Reader, lines_left: int) -> _File:
    name = reader.string("the name of a source file")
    lines: dict[int, str] = {}
    previous = 0
    for _ in range(reader.count(_LINE_SIZE, "lines")):
        at = reader.offset
        line = reader.u32("the number of a line")
        if not previous < line <= lines_left:
            reader.fail(f"expected the number of a line from {previous + 1} to {lines_left}, found {line}", at)
        lines[line] = reader.string("a line")
        previous = line
    parts: list[str] = []
    starts: dict[int, int] = {}
    position, previous = 0, 0
    for line, text in lines.items():
        parts += ["\n" * (line - previous - 1), text, "\n"]
        starts[line] = position + line - previous - 1
        position = starts[line] + len(text) + 1
        previous = line
    return _File(SourceFile(name, "".join(parts)), lines, starts)


# The keyed tables of a program (``table =``), as the value of that statement in a file.
#
# ::
#
#     u32 number of tables; for each of them: name, kind (strings), u32 room, unit (string), u32 span
#         the kind is followed by the kept value unless that is a word: "last str[64]"
#         u8 whether there is a range; if so, low, high and step as wide numbers
#         u32 number of keys; for each of them: kind (string), u32 size

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TABLE_SIZE, _KEY_SIZE = 25, 8

WordT = TypeVar("WordT", bound=enum.Enum)


def write_tables(out: Writer, tables: Sequence[Table], spans: Spans) -> None:
    """Write the declarations of a program's keyed tables."""
    out.u32(len(tables))
    for table in tables:
        kind = table.kind.value if table.value is None else f"{table.kind.value} {table.value}"
        out.row("ssIsI", table.name, kind, table.room, table.unit.value, spans.number(table.span))
        out.u8(table.range is not None)
        if table.range is not None:
            out.row("www", table.range.low, table.range.high, table.range.step)
        out.u32(len(table.keys))
        for key in table.keys:
            out.row("sI", key.kind.value, key.size)


def read_tables(reader: Reader, spans: Sequence[Span]) -> tuple[Table, ...]:
    """Read the tables of a program; raise ``FormatError`` for a table that no ``table =`` statement could declare."""
    tables: dict[str, Table] = {}
    for _ in range(reader.count(_TABLE_SIZE, "tables", TABLES_MAX)):
        at = reader.offset
        table = _read_table(reader, spans)
        if table.name in tables or not _NAME.fullmatch(table.name):
            reader.fail(f"expected the name of a table that is not there yet, found '{table.name}'", at)
        tables[table.name] = table
    return tuple(tables.values())


def _read_table(reader: Reader, spans: Sequence[Span]) -> Table:
    name = reader.string("the name of a table")
    kind, value = _read_kind(reader)
    at = reader.offset
    room = reader.u32("the room of a table")
    if not 1 <= room <= ROOM_MAX:
        reader.fail(f"expected a table with room for 1 to {ROOM_MAX} keys, found {room}", at)
    unit = _word(reader, Unit, "the unit of a table")
    number = reader.below_or_none(len(spans), "the number of a span")
    at = reader.offset
    found = None
    if reader.flag("whether a table has a range"):
        found = Range(reader.wide("a bound"), reader.wide("a bound"), reader.wide("a step"))
        if found.step < 1 or not found.low < found.high or found.buckets > BUCKETS_MAX:
            reader.fail(f"expected a range of at most {BUCKETS_MAX} buckets for a table, found another one", at)
    if (found is None) == (kind is TableKind.LHIST):
        reader.fail(f"expected a range for 'lhist' only, found kind '{kind.value}'", at)
    keys = tuple(_read_key(reader) for _ in range(reader.count(_KEY_SIZE, "keys", KEYS_MAX)))
    return Table(name, kind, keys, found, room, unit, None if number is None else spans[number], value)


def _read_kind(reader: Reader) -> tuple[TableKind, Key | None]:
    at = reader.offset
    text = reader.string("the kind of a table")
    word, blank, kept = text.partition(" ")
    kind = _known(reader, TableKind, word, "the kind of a table", at)
    if not blank:
        return kind, None
    try:
        value = Key.parsed(kept)
    except ValueError:
        value = None
    if value is None or not value.can_be_kept_by(kind):
        reader.fail(f"expected a kind of value that '{word}' keeps, found '{kept}'", at)
    return kind, value


def _read_key(reader: Reader) -> Key:
    kind = _word(reader, KeyKind, "the kind of a key")
    at, largest = reader.offset, kind.sizes[1] if kind.sizes is not None else 0
    size = reader.u32("the size of a key")
    if not (kind.sizes is not None) <= size <= largest:
        reader.fail(f"expected a size up to {largest} for the key '{kind.value}', found {size}", at)
    return Key(kind, size)


def _word(reader: Reader, words: type[WordT], what: str) -> WordT:
    at = reader.offset
    return _known(reader, words, reader.string(what), what, at)


def _known(reader: Reader, words: type[WordT], text: str, what: str, at: int) -> WordT:
    try:
        return words(text)
    except ValueError:
        expected = ", ".join(str(each.value) for each in words if each.value)
        reader.fail(f"expected one of {expected} for {what}, found '{text}'", at)


LOCATIONS = {
    "offset": 1, "pattern": 2, "address": 3, "range": 4, "sampler": 5, "tracepoint": 6, "usdt": 7, "counter": 8,
}  # fmt: skip
"""First byte of a location, by its form."""

_STATEMENT_SIZE, _DEFINITION_SIZE, _PROCEDURE_SIZE, _LABEL_SIZE, _NOTE_SIZE = 9, 20, 20, 8, 9


def write_program(out: Writer, program: Program, notes: Sequence[Notes], spans: Spans) -> None:
    """Write header, definitions and procedures; ``notes`` are those on the code of each handler and procedure."""
    _Writer(out, spans).program(program, list(notes))


def read_program(reader: Reader, spans: Sequence[Span], images: Sequence[StoredImage]) -> Program:
    """Return the program whose code is in ``images``; raise ``FormatError`` if it is invalid, or its code differs."""
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
            out.row("sI", procedure.name, self._spans.number(procedure.span))
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
            out.row("sI", keyword.name, self._spans.number(section.spans.get(keyword.name)))
            self._value(keyword, value)

    def _value(self, keyword: Keyword, value: Any) -> None:
        out = self._out
        match keyword.kind:
            case ValueKind.LOCATION | ValueKind.RANGE | ValueKind.SAMPLING:
                self._location(value)
            case ValueKind.NUMBER:
                out.u64(value)
            case ValueKind.BOOLEAN | ValueKind.WORD_SIZE:
                out.u8(value)
            case ValueKind.NAMES:
                out.strings(value)
            case ValueKind.MODTYPE | ValueKind.ACCESS:
                out.string(value.value)
            case ValueKind.MODULE | ValueKind.NAME | ValueKind.PATCH:
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
                out.row("Bs", LOCATIONS["pattern"], pattern)
            case Address(low, None):
                out.u8(LOCATIONS["address"])
                self._expression(low)
            case Address(low, Expression() as high):
                out.u8(LOCATIONS["range"])
                self._expression(low)
                self._expression(high)
            case Sampler(frequency, None):
                out.row("BI", LOCATIONS["sampler"], frequency)
            case Sampler(period, str(counter)):
                out.row("BIs", LOCATIONS["counter"], period, counter)
            case Tracepoint(subsystem, name):
                out.row("Bss", LOCATIONS["tracepoint"], subsystem, name)
            case Usdt(provider, name):
                out.row("Bss", LOCATIONS["usdt"], provider, name)

    def _expression(self, expression: Expression) -> None:
        self._out.row("sw", expression.symbol, expression.addend)

    def _block(self, code: Code, notes: Notes) -> None:
        out = self._out
        out.numbers([self._spans.number(instruction.span) for instruction in code.instructions])
        out.u32(len(code.labels))
        for label, index in code.labels.items():
            out.row("sI", label, index)
        out.u32(len(notes))
        for index, note in notes.items():
            out.row("IBs", index, note.kind, note.text)


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
            case ValueKind.LOCATION | ValueKind.RANGE | ValueKind.SAMPLING:
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
            case ValueKind.PATCH:
                text = reader.string(what)
                if split_patch(text) is None:
                    reader.fail(f"expected {keyword.kind.value} for {what}, found '{text[:40]}'", at)
                return text
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
        if form == LOCATIONS["counter"]:
            return self._counter_sampler()
        if form != LOCATIONS["sampler"]:
            reader.fail(f"expected a form of location from 1 to {len(LOCATIONS)}, found {form}", at)
        return Sampler(self._frequency())

    def _frequency(self) -> int:
        at, limits = self._in.offset, keywords_of(Header.POINT)["sampler"]
        frequency = self._in.u32("a frequency")
        if not limits.minimum <= frequency <= limits.maximum:
            self._in.fail(f"expected {limits.minimum} to {limits.maximum} samples a second, found {frequency}", at)
        return frequency

    def _counter_sampler(self) -> Sampler:
        at, period = self._in.offset, self._in.u32("a period")
        counter = self._in.string("a counter")
        if unknown_counter_hint(counter) is not None:
            self._in.fail(f"expected the name of a counter, found '{counter[:40]}'", at)
        if (problem := period_problem(period, counter)) is not None:
            self._in.fail(problem, at)
        return Sampler(period, counter)

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
