"""
The columns of names: those of addresses that templates print by name, and the functions where samples and accesses hit.

Names come with the records in their trace file, and from processes of this machine that still run.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

from dprobes.formatters.addressfields import code_names, function_of
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.record.boot import boot_id
from dprobes.record.codec import decode_record
from dprobes.record.layout import Item
from dprobes.tables.placecolumns import clean
from dprobes.tables.schema import name_columns, name_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    from dprobes.formatters.templates.model import Template
    from dprobes.formatters.templates.values import Value
    from dprobes.record.layout import LogRecord
    from dprobes.record.packed import PackedRecords
    from dprobes.record.probeinfo import Place
    from dprobes.trace.content import TraceProgram

__all__ = ["NameColumns"]


class NameColumns:
    """Make the columns of names for the records of a program in a trace file."""

    def __init__(self, program: TraceProgram) -> None:
        own = boot_id()
        is_live = bool(own) and program.origin.boot_id == own
        self._program = program
        self._symboliser = AddressSymboliser(program.source, live=is_live, carried=program.names)

    def _place(self, probe: int) -> Place:
        return self._program.place(probe).in_module(self._program.source.module)

    def _are_in_code(self, probes: Iterable[int]) -> bool:
        return all(self._program.place(probe).routine for probe in probes)

    # Records that were decoded

    def of_values(
        self, template: Template, records: Sequence[LogRecord], probes: Sequence[int], values: Sequence[Sequence[Value]]
    ) -> dict[str, pa.Array]:
        """Return the columns beside those of a template's fields, whose ``values`` are given by columns."""
        import pyarrow as pa

        found = {}
        for name, each in name_columns(template):
            names: list[str | list[str | None] | None] = []
            for record, probe, value in zip(records, probes, values[each.position], strict=True):
                shown = code_names(value, record, self._place(probe), self._symboliser, is_stack=each.is_stack)
                names.append(list(clean(shown)) if isinstance(shown, tuple) else clean([shown])[0])
            found[name] = pa.array(names, name_type(each))
        return found

    def functions(self, records: Sequence[LogRecord], probes: Sequence[int]) -> dict[str, pa.Array]:
        """Return the column of functions if some hits may have been in any; else nothing."""
        import pyarrow as pa

        if self._are_in_code(set(probes)):
            return {}
        pairs = zip(records, map(self._place, probes), strict=True)
        names = clean([function_of(record, place, self._symboliser) or None for record, place in pairs])
        return {"function": pa.array(names, pa.string())}

    # Packed records

    def of_packed(
        self, template: Template, records: PackedRecords, places: Sequence[tuple[int, int, bool]]
    ) -> dict[str, pa.Array]:
        """Return the same of records whose fields are at fixed ``places`` of the data."""

        def named(record: LogRecord, place: Place, address: int) -> str | None:
            shown = code_names(address, record, place, self._symboliser, is_stack=False)
            return shown if isinstance(shown, str) else None

        found = {}
        for name, each in name_columns(template):
            start, size, _ = places[each.position]
            at = (records.shape.data + start, size)
            found[name] = self._named(records, at, named)
        return found

    def functions_of_packed(self, records: PackedRecords) -> dict[str, pa.Array]:
        """Return the same as ``functions``."""
        probes, at = records.probes(), records.shape.place(Item.IP)
        if at is None or self._are_in_code({probes} if isinstance(probes, int) else set(probes)):
            return {}

        def function(record: LogRecord, place: Place, _: int) -> str | None:
            return function_of(record, place, self._symboliser) or None

        return {"function": self._named(records, at, function)}

    def _named(
        self, records: PackedRecords, at: tuple[int, int], name: Callable[[LogRecord, Place, int], str | None]
    ) -> pa.Array:
        """Return the column of what ``name`` gives for addresses ``at`` some place; like records are named once."""
        import pyarrow as pa

        addresses = records.column(*at, records.shape.byte_order)
        columns = [addresses, records.probes(), records.item(Item.PID), records.names()]
        if self._program.names.has_changes:
            columns.append(records.item(Item.TIME))
        if not any(isinstance(column, list) for column in columns):
            keys: list[tuple[Any, ...]] = [tuple(columns)]
        else:
            keys = list(zip(*(c if isinstance(c, list) else repeat(c, len(records)) for c in columns), strict=True))
        numbers: dict[tuple[Any, ...], int] = {}
        names = []
        for row, key in enumerate(keys):
            if key not in numbers:
                numbers[key] = len(numbers)
                probe, encoded = records[row]
                names.append(name(decode_record(encoded), self._place(probe), key[0]))
        shown = pa.array(clean(names), pa.string())
        if len(keys) == 1:
            return pa.repeat(shown[0], len(records))
        return shown.take(pa.array([numbers[key] for key in keys], pa.int32()))
