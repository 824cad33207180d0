"""
Maps of keyed tables, and their contents (``bpf.map_layouts.MapName``, ``keyed.table_layout``).

The memory of a hash table is allocated when the table is created, so a handler never waits for an allocation. An entry
has a value for each CPU, unless the CPUs share one value, or the values would take too much memory. Tables with
user-space call stacks are kept by the reader of the ring, because it unwinds the stacks.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from dprobes.bpf.map_layouts import HEAD_CELLS, MapName, table_map
from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import TableContents, TableRow, changed, merged
from dprobes.platform.linux.procfs import cpu_limit
from dprobes.rpn.keyed_tables import MEMORY_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.engines.engine_interface import TableChange
    from dprobes.rpn.keyed_tables import Table

__all__ = ["ArrayPart", "HashPart", "MapMaker", "TableMaps", "zeros_size"]

_WORD_MAX = (1 << 64) - 1


def zeros_size(tables: Sequence[Table]) -> int:
    """Return the size in bytes of the largest value of these tables: new values are initialized with as many zeros."""
    return 8 * max((table.value_cells for table in tables), default=0)


class ArrayPart(Protocol):
    """BPF array, or its equivalent in shared memory, with one element."""

    @property
    def words(self) -> memoryview:
        """Writable view of the element as 64-bit numbers."""

    def close(self) -> None:
        """Release the array."""


class HashPart(Protocol):
    """Hash table. A per-CPU value is read as the concatenation of the values of all CPUs."""

    def __getitem__(self, key: bytes) -> bytes: ...

    def __setitem__(self, key: bytes, value: bytes) -> None: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def discard(self, key: bytes) -> bool:
        """Delete a key; return False if it did not exist."""

    def close(self) -> None:
        """Release the table."""


A = TypeVar("A", bound=ArrayPart)
H = TypeVar("H", bound=HashPart)
A_co = TypeVar("A_co", bound=ArrayPart, covariant=True)
H_co = TypeVar("H_co", bound=HashPart, covariant=True)


class MapMaker(Protocol[A_co, H_co]):
    """Factory of the maps in which an engine stores keyed tables."""

    def array(self, size: int, name: str) -> A_co:
        """Return an array of one element of ``size`` bytes."""

    def hash(self, key_size: int, value_size: int, entries: int, name: str, *, per_cpu: bool) -> H_co:
        """
        Return a hash table with the memory for ``entries`` keys, all of it allocated. Sizes are in bytes.

        With ``per_cpu``, each CPU has a value of ``value_size`` bytes for a key.
        """


class _Hash(Generic[H]):
    """Map of a keyed table whose entries have keys: a hash table with a value for each key, or for each key and CPU."""

    def __init__(self, table: Table, stack: contextlib.ExitStack, maps: MapMaker[Any, H], *, shared: bool) -> None:
        self._table = table
        size, cpus = 8 * table.value_cells, cpu_limit()
        if table.room * (table.key_size + size * cpus) > MEMORY_MAX:
            shared = True
        self._parts = 1 if shared else cpus
        self._map = maps.hash(table.key_size, size, table.room, "dprobes_table", per_cpu=not shared)
        stack.callback(self._map.close)
        self._layout = struct.Struct(f"={table.value_cells}Q")
        self.map: H = self._map

    @property
    def is_shared(self) -> bool:
        """True if all CPUs have one value for a key."""
        return self._parts == 1

    def tally(self, key: bytes, value: int) -> None:
        """Tally a number in the value that all CPUs share; raise ``OSError`` if there is no room."""
        try:
            cells = list(self._layout.unpack(self._map[key]))
        except KeyError:
            cells = [0] * self._table.value_cells
        self._map[key] = self._layout.pack(*changed(self._table, cells, value))

    def add(self, key: bytes, value: int) -> None:
        """Add a number to the value that all CPUs share; raise ``OSError`` if there is no room."""
        try:
            (cell,) = self._layout.unpack(self._map[key])
        except KeyError:
            cell = 0
        self._map[key] = self._layout.pack(cell + value & _WORD_MAX)

    def keep(self, key: bytes, value: bytes) -> None:
        """Store a string or a call stack, which all CPUs share; raise ``OSError`` if there is no room."""
        self._map[key] = value

    def delete(self, key: bytes) -> None:
        """Delete a key if it exists."""
        self._map.discard(key)

    def clear(self) -> None:
        """Delete all keys."""
        for key in list(self._map):
            self._map.discard(key)

    def rows(self) -> Iterator[TableRow]:
        seen: set[bytes] = set()
        for key in self._map:
            if key in seen:
                continue
            seen.add(key)
            with contextlib.suppress(KeyError):  # the key was deleted meanwhile
                value = self._map[key]
                cells = self._layout.iter_unpack(value)
                yield TableRow(key, merged(self._table, list(cells)))


class _Cells(Generic[A]):
    """Map of a keyed table without keys: an array with one value, or one for each CPU."""

    def __init__(
        self, table: Table, stack: contextlib.ExitStack, maps: MapMaker[A, Any], cpus: int, *, shared: bool
    ) -> None:
        self._table = table
        self._stride = HEAD_CELLS + table.value_cells
        self.map = self._map = maps.array(8 * self._stride * (1 if shared else cpus), "dprobes_table")
        stack.callback(self._map.close)
        self.is_shared = shared

    def tally(self, key: bytes, value: int) -> None:  # noqa: ARG002 - the table has no keys
        """Tally a number in the value that all CPUs share."""
        words, end = self._map.words, self._stride
        for cell, number in enumerate(changed(self._table, words[HEAD_CELLS:end].tolist(), value), HEAD_CELLS):
            words[cell] = number
        words[0] = 1

    def add(self, key: bytes, value: int) -> None:  # noqa: ARG002 - the table has no keys
        """Add a number to the value that all CPUs share."""
        words = self._map.words
        words[HEAD_CELLS] = words[HEAD_CELLS] + value & _WORD_MAX
        words[0] = 1

    def keep(self, key: bytes, value: bytes) -> None:  # noqa: ARG002 - the table has no keys
        """Store a string or a call stack, which all CPUs share."""
        words = self._map.words
        for cell, number in enumerate(memoryview(value).cast("Q").tolist(), HEAD_CELLS):
            words[cell] = number
        words[0] = 1

    def delete(self, key: bytes) -> None:  # noqa: ARG002
        """Reset the value, which all CPUs share, to that of an unused table. ``key`` is ignored."""
        self.clear()

    def clear(self) -> None:
        """Delete the value."""
        words = self._map.words
        for start in range(0, len(words), self._stride):
            words[start] = 0
            for cell in range(start + HEAD_CELLS, start + self._stride):
                words[cell] = 0

    def rows(self) -> Iterator[TableRow]:
        words, stride = self._map.words, self._stride
        parts = [words[start : start + stride] for start in range(0, len(words), stride)]
        if used := [part[HEAD_CELLS:].tolist() for part in parts if part[0]]:
            yield TableRow(b"", merged(self._table, used))


class _SharedStore(TableStore):
    """Keyed table that several attachments change, each in its own thread. A lock protects it."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._lock = threading.Lock()

    def tally(self, key: bytes, value: int = 0) -> None:
        """Tally a signed number under a key."""
        with self._lock:
            super().tally(key, value)

    def keep(self, key: bytes, value: bytes) -> None:
        """Store a string or a call stack under a key."""
        with self._lock:
            super().keep(key, value)

    def delete(self, key: bytes) -> None:
        """Delete a key if it exists."""
        with self._lock:
            super().delete(key)


class TableMaps(Generic[A, H]):
    """
    Maps of the tables of a probe program, created by ``maps``, and their context manager.

    ``shared`` has the numbers of the tables whose values all CPUs share. ``cpus`` is a power of two, because handlers
    mask the CPU's number with ``cpus`` - 1. With ``keeps_stacks``, tables with user-space call stacks are maps, too;
    otherwise they are in ``stores``.
    """

    keeps_stacks = False

    def __init__(self, tables: Sequence[Table], shared: AbstractSet[int], cpus: int, maps: MapMaker[A, H]) -> None:
        self._tables = tables
        self.stores: dict[int, TableStore] = {}
        """The tables that the reader of the ring keeps, by number."""
        with contextlib.ExitStack() as stack:
            self._maps: dict[int, _Hash[H] | _Cells[A]] = {}
            for number, table in enumerate(tables):
                is_shared = number in shared
                if table.has_user_stack and not self.keeps_stacks:
                    self.stores[number] = _SharedStore(table)
                elif table.keys:
                    self._maps[number] = _Hash(table, stack, maps, shared=is_shared)
                else:
                    self._maps[number] = _Cells(table, stack, maps, cpus, shared=is_shared)
            self._added: dict[int, TableStore] = {}
            """Values tallied by this process for per-CPU tables, which only handlers on a CPU may write."""
            self._lost = maps.array(8 * len(tables), "dprobes_lost")
            stack.callback(self._lost.close)
            self._stack = stack.pop_all()

    @property
    def maps(self) -> Mapping[MapName, A | H]:
        """The maps by the names that handlers use."""
        found: dict[MapName, A | H] = {table_map(number): each.map for number, each in self._maps.items()}
        return {**found, MapName.TABLES_LOST: self._lost}

    def change(self, change: TableChange) -> None:
        """Change a table. A change for which there is no room, or no lock, counts as lost."""
        number, key, value, adds = change
        stores: list[TableStore | _Hash[H] | _Cells[A]] = [
            each[number] for each in (self.stores, self._maps, self._added) if number in each
        ]
        try:
            for store in stores:
                if key is None:
                    store.clear()
                elif value is None:
                    store.delete(key)
        except OSError:  # another thread holds the lock of a part of the table, and does not run
            self._note_lost(number)
            return
        if key is None:
            self._lost.words[number] = 0
        if key is None or value is None:
            return
        found = stores[0]
        if isinstance(found, _Hash | _Cells) and not found.is_shared:
            found = self._added.setdefault(number, TableStore(self._tables[number]))
        try:
            if isinstance(value, bytes):
                found.keep(key, value)
            elif adds:
                found.add(key, value)
            else:
                found.tally(key, value)
        except OSError:
            self._note_lost(number)

    def _note_lost(self, number: int) -> None:
        self._lost.words[number] = min(self._lost.words[number] + 1, _WORD_MAX)

    def _rows(self, number: int) -> tuple[TableRow, ...]:
        rows = tuple(self._maps[number].rows())
        if number not in self._added:
            return rows
        table, cells = self._tables[number], dict(rows)
        for key, more in self._added[number].contents().rows:
            cells[key] = merged(table, [cells[key], more]) if key in cells else more
        return tuple(TableRow(key, each) for key, each in cells.items())

    def contents(self) -> tuple[TableContents, ...]:
        """Return the contents of the tables, in the order of the program's header."""
        lost = self._lost.words
        found = []
        for number, table in enumerate(self._tables):
            if number in self.stores:
                contents = self.stores[number].contents()
                found.append(TableContents(table, contents.rows, contents.lost + lost[number]))
            else:
                found.append(TableContents(table, self._rows(number), lost[number]))
        return tuple(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
