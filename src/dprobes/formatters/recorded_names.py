"""
Location of addresses in records that will be displayed by name, while their processes may still run.

These are the addresses that a template prints by name, the addresses in call stacks, and the ip of samplers and
watchpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import FormatError
from dprobes.formatters.address_names import AddressSymboliser, names_itself
from dprobes.formatters.templates.data_extraction import decode_fields, placeholders
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.formatters.templates.template_model import Conversion
from dprobes.record.log_record import CODES_END, KERNEL_STACK, USER_STACK, codes_in, decode_record
from dprobes.record.record_rows import PROBE_SIZE
from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces
from dprobes.rpn.instruction_set import StackEnd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.formatters.templates.template_model import Template, Value
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.target.code_names import LocatedCode

__all__ = ["RecordedNames"]

_WAYS_MAX = 1 << 12
_STACKS = (KERNEL_STACK, USER_STACK)
_NAMED = (Conversion.ADDRESS, Conversion.STACK)


class _Way(NamedTuple):
    """The addresses in the data of records with the same beginning: in fields of a template, or in items."""

    template: Template | None = None
    fields: tuple[tuple[int, Conversion], ...] = ()
    has_items: bool = False

    @property
    def has_addresses(self) -> bool:
        return bool(self.fields) or self.has_items


class RecordedNames:
    """A locator of the addresses in the records of one program."""

    def __init__(self, source: RecordSource) -> None:
        self._symboliser = AddressSymboliser(source, live=True)
        self._ways: dict[bytes, _Way] = {}
        self.know(source)

    def know(self, source: RecordSource) -> None:
        """Replace the description of the program, with its templates, by ``source``."""
        self._ways.clear()
        self._templates = ProgramTemplates.of_source(source)

    def located(self, records: Sequence[bytes], places: Iterable[Place]) -> list[LocatedCode]:
        """
        Return the module and function of each code address in encoded records, as far as they can be determined.

        ``places`` has the probepoint of each record. Most programs log no addresses: the result is then empty.
        """
        found: dict[int, LocatedCode] = {}
        if isinstance(records, TableBytes) and isinstance(places, TablePlaces):
            for table in map(RecordTable.of_rows, filter(len, records.table.parts)):
                self._locate(TableBytes(table), TablePlaces(table, places.places), found)
        else:
            self._locate(records, places, found)
        return list(found.values())

    def _locate(self, records: Sequence[bytes], places: Iterable[Place], found: dict[int, LocatedCode]) -> None:
        ways = {begin: self._way(begin) for begin in _begins(records)}
        odd = {id(place) for place in _distinct(places) if not names_itself(place)}
        if not odd and not any(way.has_addresses for way in ways.values()):
            return
        if not odd and isinstance(records, TableBytes) and not any(way.fields for way in ways.values()):
            rows = records.table.parts[0].rows_with_stacks()
            if not rows:
                return
            known = list(places)
            records, places = [records[row] for row in rows], [known[row] for row in rows]
        for encoded, place in zip(records, places, strict=True):
            way = ways[encoded[:CODES_END]]
            if id(place) not in odd and not way.has_addresses:
                continue
            try:
                record = decode_record(encoded)
            except FormatError:
                continue  # its consumer reports the error
            for address, is_return in self._addresses(record, way, has_ip=id(place) in odd):
                if (located := self._code_at(address, record, place, is_return=is_return)) is not None:
                    found[id(located)] = located

    def _code_at(self, address: int, record: LogRecord, place: Place, *, is_return: bool) -> LocatedCode | None:
        """Return the location of an address, or of the call before a return address, or None if it is unknown."""
        located = self._symboliser.located(address - is_return, record, place)
        if is_return and (located is None or located.function is None):
            return self._symboliser.located(address, record, place)
        return located

    @staticmethod
    def _addresses(record: LogRecord, way: _Way, *, has_ip: bool) -> Iterator[tuple[int, bool]]:
        """
        Iterate over the code addresses in a record, each with True if it is a return address.

        ``has_ip`` includes the instruction pointer of the hit.
        """
        if has_ip and record.ip is not None:
            yield record.ip, False
        if way.template is not None and way.fields and not record.is_stack_trace:
            values = decode_fields(way.template, record).values
            for number, conversion in way.fields:
                yield from _of_value(values[number], conversion)
        elif way.has_items:
            for item in record.items():
                if item.kind in _STACKS and isinstance(item.value, tuple):
                    yield from _of_stack(item.value)

    def _way(self, begin: bytes) -> _Way:
        if begin not in self._ways:
            if len(self._ways) >= _WAYS_MAX:
                self._ways.clear()
            self._ways[begin] = self._find_way(begin)
        return self._ways[begin]

    def _find_way(self, begin: bytes) -> _Way:
        codes = codes_in(begin)
        if codes is None:
            return _Way(has_items=True)
        template = self._templates.written.find(codes.major, codes.minor)
        template = template or self._templates.derived(codes.word_size, codes.major, codes.minor)
        if template is None:
            return _Way(has_items=True)
        conversions = enumerate(part.conversion for part in placeholders(template))
        return _Way(template, tuple((n, conversion) for n, conversion in conversions if conversion in _NAMED))


def _begins(records: Sequence[bytes]) -> set[bytes]:
    if isinstance(records, TableBytes):
        (packed,) = records.table.parts
        place = packed.shape.name
        if (packed.row_size if place is None else place) >= PROBE_SIZE + CODES_END:
            return packed.begins(CODES_END)
    return {record[:CODES_END] for record in records}


def _distinct(places: Iterable[Place]) -> Iterable[Place]:
    return places.distinct() if isinstance(places, TablePlaces) else {id(place): place for place in places}.values()


def _of_value(value: Value, conversion: Conversion) -> Iterator[tuple[int, bool]]:
    match value:
        case int():
            yield value, False
        case tuple() if conversion is Conversion.STACK:
            yield from _of_stack(value)
        case tuple():
            yield from ((each, False) for each in value)


def _of_stack(stack: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """
    Iterate over the addresses of a call stack without its end marker, each with True for a return address.

    All but the first are return addresses.
    """
    yield from ((address, number > 0) for number, address in enumerate(stack) if address not in _ENDS)


_ENDS = frozenset(StackEnd)
