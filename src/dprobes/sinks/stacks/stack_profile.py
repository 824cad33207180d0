"""Sink that collects call stacks into a profile. Frames are named while their processes may still run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.escapes import escaped
from dprobes.formatters.address_names import AddressSymboliser, is_of_kernel
from dprobes.formatters.field_values import FieldValues
from dprobes.formatters.templates.data_extraction import stacks_in
from dprobes.keyed.table_layout import STACK_ENDS, count_cells, key_parts, parts_of, shown_value
from dprobes.keyed.table_text import shown_name
from dprobes.record.log_record import KERNEL_STACK, USER_STACK, decode_record
from dprobes.rpn.instruction_set import StackEnd, Token
from dprobes.rpn.keyed_tables import KeyKind, TableKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.formatters.table_addresses import ProcessAddresses
    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.sinks import Batch
    from dprobes.target.code_names import CodeName
    from dprobes.trace.carried_names import CarriedNames

__all__ = [
    "FrameNode",
    "StackCollector",
    "StackProfile",
    "StackSample",
    "has_weighed_stacks",
    "table_unit",
    "table_weight",
    "tree_of",
]

_SAMPLES = "samples"
"""Unit of weights that count stacks."""

# A profile of call stacks: the weight of each stack, and the tree of all stacks.


@dataclass(frozen=True, slots=True)
class StackProfile:
    """
    The weights of stacks, by the names of their frames, the outermost first.

    ``unit`` is the unit of a weight: samples, bytes, nanoseconds. ``title`` is displayed.
    """

    weights: Mapping[tuple[str, ...], int]
    unit: str = _SAMPLES
    title: str = ""

    @property
    def total(self) -> int:
        """The total weight of all stacks."""
        return sum(self.weights.values())


@dataclass(slots=True)
class FrameNode:
    """
    A frame in the tree of all stacks.

    It has the weight of the stacks with this frame at this place, and the weight of those that end with it. ``before``
    is the former weight in the baseline profile.
    """

    name: str
    weight: int = 0
    own: int = 0
    before: int = 0
    callees: dict[str, FrameNode] = field(default_factory=dict)

    def callee(self, name: str) -> FrameNode:
        """Return the child node for the function ``name`` that this frame calls, and create it if necessary."""
        if name not in self.callees:
            self.callees[name] = FrameNode(name)
        return self.callees[name]

    def sorted_callees(self) -> Iterator[FrameNode]:
        """Yield the nodes of the callees, by name."""
        yield from (node for _, node in sorted(self.callees.items()))


def tree_of(profile: StackProfile, baseline: StackProfile | None = None) -> FrameNode:
    """Return the tree of a profile; with a ``baseline`` it includes the baseline's frames."""
    root = FrameNode("all")
    for stack, weight in profile.weights.items():
        node = root
        node.weight += weight
        for name in stack:
            node = node.callee(name)
            node.weight += weight
        node.own += weight
    if baseline is not None:
        for stack, weight in baseline.weights.items():
            node = root
            node.before += weight
            for name in stack:
                node = node.callee(name)
                node.before += weight
    return root


class StackSample(NamedTuple):
    """A stack with its time, CLOCK_MONOTONIC in nanoseconds; the outermost function is first."""

    time: int
    cpu: int | None
    pid: int
    tid: int
    name: str
    stack: tuple[str, ...]
    weight: int


_STACKS_MAX = 1 << 18
"""Maximum number of distinct stacks that are kept separately; further ones are merged into one."""

SAMPLES_MAX = 1 << 20
"""Maximum number of samples that are kept with their times."""

_OTHERS = ("[other stacks]",)


def table_weight(table: Table, cells: Sequence[int]) -> int:
    """Return the weight of a row's stack, by the row's ``cells``: the sum, or in tables of other kinds the count."""
    if table.kind is TableKind.SUM:
        return shown_value(table, cells)
    return sum(cells[cell] for cell in count_cells(table))


def table_unit(table: Table) -> str:
    """Return the unit of the weights of a table's stacks."""
    return shown_name(table) if table.kind is TableKind.SUM else _SAMPLES


def has_weighed_stacks(table: Table) -> bool:
    """Return whether a table has call stacks as keys, and counts or sums that are their weights."""
    has_stacks = any(key.kind in (*_USER_KINDS, *_KERNEL_KINDS) for key in table.keys)
    return has_stacks and (table.kind is TableKind.SUM or bool(count_cells(table)))


class StackCollector:
    """
    Sink that sums the weights of records' stacks.

    ``weight`` is the field with the weight of a record's stack; without it, each weight is 1. ``without`` counts
    records or rows that have no stack, or no weight. With ``keeps_samples``, each stack is kept with its thread and
    time, up to SAMPLES_MAX of them; ``left_out`` counts the others.
    """

    def __init__(self, weight: str | None = None, *, keeps_samples: bool = False) -> None:
        self._weight = weight
        self._unit = weight or _SAMPLES
        self._weights: Counter[tuple[str, ...]] = Counter()
        self._sources: dict[int, tuple[AddressSymboliser, FieldValues]] = {}
        self._title = ""
        self.without = self.left_out = 0
        self.table: str | None = None
        """Table whose keys are the stacks, or None for stacks of records."""
        self.wall_offset = 0
        """Offset in nanoseconds from the times of samples to times since 1970."""
        self.samples: list[StackSample] = []
        self._keeps_samples = keeps_samples
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        """The stacks of samples, for deduplication."""

    # The sink

    def create_event(self, source: RecordSource) -> None:
        """Register a program; raise ``FormatError`` if its records have no field of the weight's name."""
        self.create_event_of(source, live=True)

    def create_event_of(self, source: RecordSource, *, live: bool, carried: CarriedNames | None = None) -> None:
        """
        Register a program; raise the same error as ``create_event``.

        ``live`` is true if its records are of processes of this machine. ``carried`` are the names of addresses in its
        trace file.
        """
        values = FieldValues(source)
        if self._weight is not None:
            values.check(self._weight, is_number=True)
        known = self._sources.get(source.number)
        symboliser = known[0] if known is not None else AddressSymboliser(source, live=live, carried=carried)
        self._sources[source.number] = symboliser, values
        self._title = self._title or source.name

    def log_events(self, batch: Batch) -> None:
        """Add the call stacks in a batch of records to the profile, with their weights."""
        symboliser, values = self._sources[batch.source.number]
        self.wall_offset = batch.wall_offset
        for encoded, place in zip(batch.records, batch.places, strict=True):
            record = decode_record(encoded)
            weight = self._weight_of(values, record, place)
            stack = tuple(_frames(_stacks(record, values), record, place, symboliser))
            if not stack or weight is None:
                self.without += 1
                continue
            root = escaped(record.process_name or str(record.pid or "?"))
            self._add((root, *stack), weight)
            if self._keeps_samples:
                self._keep(record, root, stack, weight)

    def _add(self, stack: tuple[str, ...], weight: int) -> None:
        is_new = stack not in self._weights
        self._weights[_OTHERS if is_new and len(self._weights) >= _STACKS_MAX else stack] += weight

    def _keep(self, record: LogRecord, name: str, stack: tuple[str, ...], weight: int) -> None:
        if len(self.samples) >= SAMPLES_MAX or (stack not in self._known and len(self._known) >= _STACKS_MAX):
            self.left_out += 1
            return
        stack = self._known.setdefault(stack, stack)
        pid = record.pid or 0
        tid = pid if record.tid is None else record.tid
        time = record.time if record.time is not None else self.samples[-1].time if self.samples else 0
        self.samples.append(StackSample(time, record.cpu, pid, tid, name, stack, weight))

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program, but not its stacks."""
        self._sources.pop(source.number, None)

    def flush(self) -> None:
        """Do nothing: the profile is read at the end."""

    def close(self) -> None:
        """Do nothing: no resource is open."""

    # Tables

    def add_table(self, contents: TableContents, names: ProcessAddresses) -> None:
        """
        Add the call stacks in a table's keys, with the count or the sum of each row as its weight.

        The outermost frames of a stack are the other parts of its key. All stacks of a profile must have the same unit.
        """
        table = contents.table
        self.table = self._title = shown_name(table)
        self._unit = table_unit(table)
        for row in contents.rows:
            weight, stack = table_weight(table, row.cells), tuple(_key_frames(table, row.key, names))
            if not stack or weight < 0:
                self.without += 1
                continue
            outer = (escaped(str(part)) for part in parts_of(table, row.key, names) if not isinstance(part, list))
            self._add((*outer, *stack), weight)

    # Results

    def profile(self) -> StackProfile:
        """Return the profile of the stacks collected so far."""
        return StackProfile(dict(self._weights), self._unit, self._title)

    def _weight_of(self, values: FieldValues, record: LogRecord, place: Place) -> int | None:
        if self._weight is None:
            return 1
        value = values.find(record, place, self._weight)
        return value if isinstance(value, int) and value >= 0 else None


def _key_frames(table: Table, key: bytes, names: ProcessAddresses) -> Iterator[str]:
    """Iterate over the names of the frames in a key, outermost first: the program's, then the kernel's."""
    stacks = {each.kind: part for each, part in zip(table.keys, key_parts(table.keys, key), strict=True)}
    for kind in (*_USER_KINDS, *_KERNEL_KINDS):
        words = stacks.get(kind, ())
        assert isinstance(words, tuple), "it is a call stack"
        pid = words[0] if words and kind in _USER_KINDS else None

        def name_of(number: int, address: int, pid: int | None = pid) -> CodeName | None:
            return names.frame_at(address, pid, is_caller=number > 0)

        yield from _named(words if pid is None else words[1:], name_of)


_USER_KINDS = (KeyKind.USER_STACK, KeyKind.USER_FRAMES)
_KERNEL_KINDS = (KeyKind.KERNEL_STACK, KeyKind.FRAMES)
_INLINED = "_[i]"
"""Suffix of the name of a function whose call was inlined, like ``_[k]`` for one of the kernel."""


def _stacks(record: LogRecord, values: FieldValues) -> Mapping[str, Sequence[int]]:
    """Return the call stacks of a record by kind: from the record's items, or else by the program's template."""
    found = {item.kind: item.value for item in record.items() if isinstance(item.value, tuple)}
    template = values.templates.of(record)
    if found or template is None or record.is_stack_trace:
        return found
    taken = stacks_in(template, record)
    kinds = ((Token.USER_STACK, USER_STACK), (Token.KERNEL_STACK, KERNEL_STACK))
    return {kind: taken[token] for token, kind in kinds if token in taken}


def _frames(
    found: Mapping[str, Sequence[int]], record: LogRecord, place: Place, symboliser: AddressSymboliser
) -> Iterator[str]:
    """Iterate over the names of a record's frames, outermost first: the program's, then the kernel's."""

    def name_of(number: int, address: int) -> CodeName | None:
        return (symboliser.caller_name if number else symboliser.code_name)(address, record, place)

    for kind in (USER_STACK, KERNEL_STACK):
        yield from _named(found.get(kind, ()), name_of)


def _named(words: Sequence[int], name_of: Callable[[int, int], CodeName | None]) -> Iterator[str]:
    """
    Iterate over the names of a stack's frames, outermost first.

    ``words`` are its addresses, the innermost first. ``name_of`` takes the number of a frame and its address.
    """
    for number in range(len(words) - 1, -1, -1):
        address = words[number]
        if address in STACK_ENDS:
            yield STACK_ENDS[StackEnd(address)]
            continue
        name = name_of(number, address)
        yield _function(name, is_kernel=is_of_kernel(address))
        if name is not None:
            yield from (f"{escaped(inlined)}{_INLINED}" for inlined in reversed(name.inlined))


def _function(name: CodeName | None, *, is_kernel: bool) -> str:
    """Return the name of a frame without the offset in it: frames of one function are merged."""
    text = "[unknown]" if name is None else name.function or f"[{name.module}]"
    return f"{escaped(text)}_[k]" if is_kernel else escaped(text)
