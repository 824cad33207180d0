"""
``--count``, ``--hist`` and ``--sum`` at the hit: a program whose handlers tally the values instead of logging them.

This is possible if every run of a handler produces one record. A field must be a header item that an instruction can
push, or a word that one ``log`` pops from the stack. The position of a field is determined by reading it from records
of random words.

A sum of unsigned numbers has one more key, the sign bit of the number: the exact sum follows from the table's sum of
signed words. The final contents of tables are counted like records with the same contents, so the results are the same.
A hit whose probed instruction faults counts, as with every table.
"""

from __future__ import annotations

import enum
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dprobes.cli import console
from dprobes.cli.console import print_line, print_table
from dprobes.errors import FormatError
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.field_values import HEADER_FIELDS, NUMBERED, PLACE_FIELDS, FieldValues
from dprobes.formatters.templates.template_collection import templates_of
from dprobes.keyed.table_layout import BIAS, HIST_ZERO, key_parts
from dprobes.keyed.table_text import bar_lines, power_bucket_label, quantity
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place
from dprobes.resolve.probepoints import places_of
from dprobes.rpn.instruction_set import Flow, Group, rows_by_syntax
from dprobes.rpn.keyed_tables import KEYS_MAX, MEMORY_MAX, TABLES_MAX, Key, KeyKind, Table, TableKind, Unit
from dprobes.rpn.program_needs import sets_codes
from dprobes.rpn.rpn_program import Code, Expression, Glob, Instruction
from dprobes.sinks import Batch
from dprobes.sinks.field_columns import FieldColumns
from dprobes.sinks.record_aggregates import GROUPS_MAX, VALUES_MAX, Aggregates, Sum, place_text
from dprobes.trace.trace_content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.cli.shared_options import WantedFields
    from dprobes.engines.engine_interface import Attachment
    from dprobes.formatters.templates.template_collection import Templates
    from dprobes.keyed.table_layout import TableRow
    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.rpn_program import Operand, ProbeDefinition, Program
    from dprobes.sinks.record_aggregates import CountTable, Histogram, Measures, SumTable
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.record_columns import BlockRows
    from dprobes.trace.trace_content import TraceProgram
    from dprobes.trace.trace_filter import Selection

__all__ = ["HandlerAggregates", "NotAtTheHitError", "aggregate_traces", "aggregates_of", "print_aggregates", "sum_of"]

# ``--count``, ``--hist`` and ``--sum``: the tables that are printed at the end instead of records.

_ROWS = 50
"""Maximum number of printed rows of a table; the others are summed up."""


def aggregates_of(wanted: WantedFields) -> Aggregates:
    """Return empty aggregates for the fields that the options ``--count``, ``--hist``, ``--sum`` and ``--by`` name."""
    return Aggregates(wanted.counted, wanted.measured, wanted.summed, wanted.by)


def aggregate_traces(
    found: Iterable[Block | LostRecords],
    selection: Selection,
    wanted: WantedFields,
    templates: Templates | None = None,
) -> Counter[str]:
    """
    Print the aggregates of the selected records of trace files; return the number of lost records by program.

    ``templates`` take precedence over those of the programs. Raise ``FormatError`` if there are records, but no
    program's records have one of the fields.
    """
    aggregates = aggregates_of(wanted)
    sources: dict[TraceProgram, RecordSource] = {}
    refusals: list[FormatError] = []
    lost: Counter[str] = Counter()
    for each in found:
        program = each.program
        if isinstance(each, LostRecords):
            lost[program.name] += each.count
            continue
        if program not in sources:
            # Programs of several files may have the same number.
            source = replace(program.source, number=len(sources))
            if templates is not None:
                source = replace(source, templates=templates.over(templates_of(source.templates)))
            sources[program] = source
            try:
                symboliser = AddressSymboliser(source, live=program.may_run, carried=program.names)
                aggregates.create_event_of(source, program.origin.host, symboliser)
            except FormatError as error:
                refusals.append(error)
        for rows, mask in selection.masked(each):
            _log_rows(aggregates, sources[program], rows, mask)
    if sources and len(refusals) == len(sources):
        raise refusals[0]
    print_aggregates(aggregates)
    return lost


def _log_rows(aggregates: Aggregates, source: RecordSource, rows: BlockRows, mask: Sequence[bool] | None) -> None:
    if aggregates.log_columns(FieldColumns(rows.rows, rows.place, aggregates.fields_of(source), mask)):
        return
    wanted = range(len(rows)) if mask is None else compress(range(len(rows)), mask)
    found = [rows.record(row) for row in wanted]
    places = [rows.place(each.probe) for each in found]
    aggregates.log_events(Batch(source, [each.record for each in found], places, rows.block.wall_offset))


def print_aggregates(aggregates: Aggregates) -> None:
    """Print the tables of ``--count`` and ``--sum`` and the histograms of ``--hist`` on standard output."""
    for each in aggregates.tables():
        _print_table(each)
    shown: Counter[str] = Counter()
    for histogram in aggregates.measures.histograms():
        shown[histogram.field] += 1
        if shown[histogram.field] <= _ROWS:
            _print_histogram(histogram)
    for field, count in shown.items():
        if count > _ROWS:
            print_line(f"and {count - _ROWS} more histograms of {field}")
    for table in aggregates.measures.sums():
        _print_sums(table)


def _print_table(table: CountTable) -> None:
    total = sum(count for _, count in table.rows) + table.others
    rows = [(*values, str(count), f"{100 * count / total:.1f}%") for values, count in table.rows[:_ROWS]]
    if (hidden := sum(count for _, count in table.rows[_ROWS:]) + table.others) > 0:
        what = f"{len(table.rows) - _ROWS} others" if len(table.rows) > _ROWS else "others"
        blank = [""] * (len(table.fields) - 1)
        rows.append((what, *blank, str(hidden), f"{100 * hidden / total:.1f}%"))
    if not rows:
        print_line(f"no records to count by {', '.join(table.fields)}")
        return
    print_table((*table.fields, "count", "share"), rows)


def _print_sums(table: SumTable) -> None:
    rows = [(*group, *_columns_of(found, table.unit)) for group, found in table.rows[:_ROWS]]
    if len(table.rows) > _ROWS:
        hidden = reduce(Sum.plus, (found for _, found in table.rows[_ROWS:]))
        blank = [""] * (len(table.by) - 1)
        rows.append((f"{len(table.rows) - _ROWS} others", *blank, *_columns_of(hidden, table.unit)))
    if rows:
        print_table((*table.by, "count", f"sum of {table.field}", "average", "least", "largest"), rows)
    else:
        print_line(f"no numbers of {table.field} to sum up")
    if table.odd:
        print_line(_without_number(table.odd))


def _without_number(count: int) -> str:
    return f"and {count} record{'s' * (count != 1)} with no number there"


def _columns_of(found: Sum, unit: Unit) -> tuple[str, ...]:
    if unit is not Unit.NONE:
        numbers = (found.total, found.total / found.numbers, found.least, found.largest)
        return str(found.numbers), *(quantity(number, unit) for number in numbers)
    average = f"{found.total / found.numbers:.1f}".removesuffix(".0")
    return str(found.numbers), str(found.total), average, str(found.least), str(found.largest)


def _print_histogram(histogram: Histogram) -> None:
    print_line(f"{histogram.field} {histogram.where}".rstrip())
    for line in bar_lines([(power_bucket_label(bucket, histogram.unit), count) for bucket, count in histogram.buckets]):
        print_line(line)
    if histogram.odd:
        print_line(_without_number(histogram.odd))


_PUSHES = {"pid": "push pid", "tid": "push tid", "uid": "push uid", "cpu": "push procid"}
"""The instructions that push a header item."""

_CONSTANT = frozenset({"major", "minor", "host", "program", "stack_trace", *PLACE_FIELDS})
"""The fields that are the same in all records of a place."""

_NAME = "name"
_TRIALS = 8
_MASK = (1 << 64) - 1
_WORDS_MAX = 64


class NotAtTheHitError(Exception):
    """Records must be transferred; the message is the reason, as a clause."""


class _Word(NamedTuple):
    """A field whose value is the logged word with index ``number``."""

    number: int


class _Item(NamedTuple):
    """A field whose value is the header item ``name``."""

    name: str


_Source = _Word | _Item | None
"""The source of a field's value, or None if it is the same in all records of a place."""


class _What(enum.Enum):
    COUNT, HIST, SUM = range(3)


_KINDS = {_What.HIST: TableKind.HIST, _What.SUM: TableKind.STATS}


@dataclass(frozen=True, slots=True)
class _Tally:
    """
    Table of one definition for the option with index ``view`` among those of its kind.

    The handler logs ``words`` words. ``keys`` has the sources of the fields that vary, in the order of the table's
    keys. ``value`` is the source of the number, or None if records have none. With ``has_sign``, there is one more key.
    """

    definition: int
    what: _What
    view: int
    words: int
    keys: tuple[_Word | _Item, ...]
    table: Table
    value: _Word | _Item | None = None
    has_sign: bool = False


class HandlerAggregates:
    """
    A ``program`` that updates keyed tables at each hit instead of logging records, and the contents of these tables.

    The constructor raises ``NotAtTheHitError`` if records are needed, for example because they have other consumers
    (``carries``).
    """

    def __init__(
        self,
        program: Program,
        source: RecordSource,
        wanted: WantedFields,
        *,
        carries: bool = False,
    ) -> None:
        if carries:
            raise NotAtTheHitError("another output needs them")
        if sets_codes(program):
            raise NotAtTheHitError("handlers set the codes of records")
        self._values = FieldValues(source, os.uname().nodename)
        self._wanted = wanted
        self._source = source
        self.own_tables = len(program.tables)
        """Number of tables that the original program has."""
        self._tallies: list[_Tally] = []
        definitions = [self._tallied(program, n, each) for n, each in enumerate(program.definitions)]
        tables = (*program.tables, *(each.table for each in self._tallies))
        if len(tables) > TABLES_MAX or len({table.name for table in tables}) < len(tables):
            raise NotAtTheHitError(f"that would take more than {TABLES_MAX} tables")
        self.program = replace(program, definitions=tuple(definitions), tables=tables)

    # The program

    def _tallied(self, program: Program, number: int, definition: ProbeDefinition) -> ProbeDefinition:
        """
        Return a definition whose handler adds to keyed tables instead of logging, and register these tables.

        ``number`` is the definition's index. Raise ``NotAtTheHitError`` if a field cannot be computed in the handler.
        """
        before, words, after = _around_log(definition)
        record = LogRecord(program.major, definition.minor)
        tallies: list[_Tally] = []

        def keys_of(fields: Sequence[str]) -> tuple[_Word | _Item, ...]:
            if named := [field for field in fields if self._values.is_named(field)]:
                raise NotAtTheHitError(f"'{named[0]}' is shown by its name, which depends on the process")
            found = [self._source_of(definition, field, record, words) for field in fields]
            return tuple(dict.fromkeys(each for each in found if each is not None))

        for view, fields in enumerate(self._wanted.counted):
            keys = keys_of(fields)
            table = _table(f"count{view}_of_{number}", TableKind.COUNT, keys, VALUES_MAX)
            tallies.append(_Tally(number, _What.COUNT, view, words, keys, table))
        by = keys_of(self._wanted.by)
        for what, fields in ((_What.HIST, self._wanted.measured), (_What.SUM, self._wanted.summed)):
            for view, field in enumerate(fields):
                value = self._source_of(definition, field, record, words)
                if value == _Item(_NAME) or (value is None and field in _CONSTANT):
                    raise NotAtTheHitError(f"'{field}' is not a number that differs from record to record")
                # A record without the field counts as one without a number.
                kind = TableKind.COUNT if value is None else _KINDS[what]
                has_sign = what is _What.SUM and value is not None and not self._is_signed(field, value, record, words)
                table = _table(f"{_KINDS[what].value}{view}_of_{number}", kind, by, GROUPS_MAX, has_sign=has_sign)
                tallies.append(_Tally(number, what, view, words, by, table, value, has_sign))
        self._tallies += tallies
        code = [*before]
        for tally in tallies:
            code += _instructions_of(tally)
        if words:
            code.append(_instruction("ros <cells>", words))
        return replace(definition, handler=Code((*code, *after, _instruction("abort")), {}))

    def _source_of(self, definition: ProbeDefinition, field: str, record: LogRecord, words: int) -> _Source:
        """
        Return the source of a field's value in a handler that logs ``words`` words, or None if it is constant.

        ``record`` is an empty record with the codes of the definition. Raise ``NotAtTheHitError`` if no instruction
        pushes the value.
        """
        if field in HEADER_FIELDS:
            if field in _CONSTANT:
                return None
            if field == _NAME or field in _PUSHES:
                return _Item(field)
            raise NotAtTheHitError(f"no instruction pushes '{field}' as records have it")
        if field == "function" and not definition.is_in_code:
            raise NotAtTheHitError("samples and accesses can be in any function")
        if field in _CONSTANT:
            return None
        if (numbered := NUMBERED.match(field)) is not None and numbered[1] == "item":
            raise NotAtTheHitError(f"'{field}' is not a word that the handler logs")
        found = {self._word_of(field, record, words, size) for size in (8, 4)}
        if len(found) > 1:
            raise NotAtTheHitError(f"'{field}' is another word in 32-bit code")
        return found.pop()

    def _is_signed(self, field: str, value: _Word | _Item, record: LogRecord, words: int) -> bool:
        """
        Return True if a field is a signed number.

        To determine that, decode a record whose ``words`` logged words have all bits set. ``value`` is the field's
        source.
        """
        if isinstance(value, _Item):
            return False
        size = record.word_size
        found = self._values.find(_with_words(record, [(1 << 8 * size) - 1] * words, size), Place("", ""), field)
        return isinstance(found, int) and found < 0

    def _word_of(self, field: str, record: LogRecord, words: int, size: Literal[4, 8]) -> _Word | None:
        random = Random(field)  # noqa: S311 - nothing is kept secret
        candidates = set(range(words))
        for _ in range(_TRIALS):
            data = [random.getrandbits(8 * size) for _ in range(words)]
            value = self._values.find(_with_words(record, data, size), Place("", ""), field)
            if value is None:
                return None
            if not isinstance(value, int):
                raise NotAtTheHitError(f"'{field}' is not a word that the handler logs")
            candidates = {n for n in candidates if (value - data[n]) % (1 << 8 * size) == 0}
        if len(candidates) != 1:
            raise NotAtTheHitError(f"'{field}' is not a word that the handler logs")
        return _Word(candidates.pop())

    # Results

    def collect(self, session: Attachment, aggregates: Aggregates, word_size: Literal[4, 8]) -> None:
        """
        Add the contents of the handlers' keyed tables to ``aggregates``.

        ``word_size`` is that of the probed processes in bytes. Values without room in a table are counted as others, or
        reported by a warning.
        """
        probes = list(session.probes)
        places = places_of(self._source.module, probes)
        contents = session.tables()[self.own_tables :]
        for tally, held in zip(self._tallies, contents, strict=True):
            place = next((places[n] for n, probe in enumerate(probes) if probe.number == tally.definition), None)
            if place is None:
                continue
            definition = self.program.definitions[tally.definition]
            record = LogRecord(self.program.major, definition.minor, word_size=word_size)
            fields = self._wanted.counted[tally.view] if tally.what is _What.COUNT else self._wanted.by
            for row in held.rows:
                of_row = _with_parts(record, tally, key_parts(tally.table.keys, row.key))
                group = tuple(self._values.text(of_row, place, field) for field in fields)
                if tally.what is _What.COUNT:
                    aggregates.add_count(tally.view, group, row.cells[0])
                else:
                    self._add_measured(aggregates.measures, tally, row, record, group or (place_text(place),))
            if tally.what is _What.COUNT:
                aggregates.add_others(tally.view, held.lost)
            elif held.lost:
                console.warning(f"{held.lost} numbers did not fit into a table: too many values of {', '.join(fields)}")

    def _add_measured(
        self, measures: Measures, tally: _Tally, row: TableRow, record: LogRecord, group: tuple[str, ...]
    ) -> None:
        """
        Add one row of a keyed table to the histogram or sum of ``group``.

        ``record`` is an empty record with the codes and word size of the definition.
        """
        bits = 8 * record.word_size
        match tally.what, tally.value:
            case _What.HIST, None:
                measures.add_odd(tally.view, group, row.cells[0])
            case _What.SUM, None:
                measures.add_unsummed(tally.view, row.cells[0])
            case _What.SUM, _:
                is_negative = tally.has_sign and key_parts(tally.table.keys, row.key)[-1]
                measures.add_sum(tally.view, group, sum_of(row.cells, 1 << bits if is_negative else 0))
            case _What.HIST, source:
                assert source is not None
                field = self._wanted.measured[tally.view]
                is_signed = self._is_signed(field, source, record, tally.words)
                for cell, count in enumerate(row.cells):
                    if count:
                        bucket = cell - HIST_ZERO
                        # As an unsigned number it has all bits of the word.
                        bucket = bits if bucket < 0 and not is_signed else bucket
                        measures.add_bucket(tally.view, group, bucket, count)


def sum_of(cells: Sequence[int], offset: int) -> Sum:
    """
    Return count, sum, minimum and maximum in the cells of a ``stats`` value, with ``offset`` added to each number.

    The sum is exact, although its cell is modulo 2**64: count, minimum and maximum bound it.
    """
    count, least, largest = cells[0], BIAS - 1 - cells[2], cells[3] - BIAS
    # The sum is known modulo 2**64; the exact sum of this count of numbers lies between these bounds.
    total = count * least + (cells[1] - count * least & _MASK)
    return Sum(count, total + count * offset, least + offset, largest + offset)


def _around_log(definition: ProbeDefinition) -> tuple[list[Instruction], int, list[Instruction]]:
    """
    Return the instructions before the only log instruction, the number of logged words, and the instructions after it.

    Raise ``NotAtTheHitError`` for a handler with branches, with several log instructions, or which may fail before it
    logs.
    """
    if isinstance(definition.location, Glob):
        raise NotAtTheHitError("a pattern matches several functions")
    instructions = list(definition.handler.instructions)
    if instructions and instructions[-1].row.syntax == "exit":
        instructions.pop()
    if definition.handler.labels or any(each.row.flow is not Flow.NEXT for each in instructions):
        raise NotAtTheHitError("a handler has branches")
    if any(each.row.operator == "callk" for each in instructions):
        raise NotAtTheHitError("a handler calls an extension")
    logs = [n for n, each in enumerate(instructions) if each.row.operator == "log"]
    if not logs:
        return instructions, 0, []
    place, *more = logs
    words = instructions[place].operand
    if more or instructions[place].row.syntax != "log <count>" or not isinstance(words, int) or words > _WORDS_MAX:
        raise NotAtTheHitError("a handler logs something other than words at once")
    before = instructions[:place]
    if any(each.row.faults and each.row.group is not Group.REGISTER for each in before):
        raise NotAtTheHitError("a handler may fail before it logs")
    return before, words, instructions[place + 1 :]


def _table(name: str, kind: TableKind, sources: Sequence[_Word | _Item], room: int, *, has_sign: bool = False) -> Table:
    kinds = [KeyKind.COMM if each == _Item(_NAME) else KeyKind.WORD for each in sources]
    kinds += [KeyKind.WORD] * has_sign
    if len(kinds) > KEYS_MAX:
        raise NotAtTheHitError(f"a table has no more than {KEYS_MAX} keys")
    if not kinds and room != VALUES_MAX:
        return Table(name, kind)
    table = Table(name, kind, tuple(Key(kind) for kind in kinds), room=room << has_sign)
    return table if table.memory <= MEMORY_MAX else replace(table, room=MEMORY_MAX // (table.memory // table.room))


def _instructions_of(tally: _Tally) -> list[Instruction]:
    """Return the instructions that tally. The logged words are on top of the stack before and after them."""
    found: list[Instruction] = []
    cells = 0

    def push(source: _Word | _Item) -> None:
        nonlocal cells
        if isinstance(source, _Word):
            found.append(_instruction("push tsp, <n>", source.number + cells))
        elif source.name != _NAME:
            found.append(_instruction(_PUSHES[source.name]))
        cells += source != _Item(_NAME)

    for source in tally.keys:
        push(source)
    if tally.value is not None:
        if tally.has_sign:
            found.append(_instruction("push <value>", Expression(0)))
            cells += 1
            push(tally.value)
            found.append(_instruction("lt"))
            cells -= 1
        push(tally.value)
    return [*found, _instruction("tally <table>", tally.table.name)]


def _instruction(syntax: str, operand: Operand = None) -> Instruction:
    return Instruction(rows_by_syntax()[syntax], operand)


def _with_words(record: LogRecord, words: Sequence[int], size: Literal[4, 8]) -> LogRecord:
    data = b"".join(word.to_bytes(size, record.byte_order) for word in words)
    return record._replace(data=data, word_size=size)


def _with_parts(record: LogRecord, tally: _Tally, parts: Sequence[Any]) -> LogRecord:
    """Return a copy of ``record`` whose header items and data have the values ``parts`` of a table's key."""
    words: dict[int, int] = {}
    for source, part in zip(tally.keys, parts, strict=False):  # a sign key may follow
        if isinstance(source, _Word):
            words[source.number] = part
        elif source.name == _NAME:
            record = record._replace(process_name=part.decode("utf-8", "surrogateescape"))
        else:
            record = record._replace(**{source.name: part})
    return _with_words(record, [words.get(n, 0) for n in range(tally.words)], record.word_size)
