"""
Keyed tables in shared memory, as interpreted handlers and the tool change them: as exactly as handlers in processes do.

What is added is added by one instruction, and the greater of two numbers is kept by one, so nobody's change is lost.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dprobes.bpf.layout import HEAD_CELLS, MapName, table_map
from dprobes.engines.atomiccells import add_to_word, raise_word
from dprobes.engines.inline.memory.arrays import SharedArray
from dprobes.engines.inline.memory.hashes import SharedHash
from dprobes.engines.interface import TableChange
from dprobes.keyed.layout import Change, changes, shown_value

if TYPE_CHECKING:
    from dprobes.engines.inline.memory.tables import SharedTables
    from dprobes.keyed.contents import TableContents
    from dprobes.rpn.tables import Table

__all__ = ["SharedStore"]

_CELL = 8
_TRIES = 8
"""How often a value is made that somebody else deletes at once."""


class SharedStore:
    """The table with a number, in the ``maps`` of its program."""

    def __init__(self, table: Table, number: int, maps: SharedTables) -> None:
        self.table = table
        self._number = number
        self._all = maps
        self._map = maps.maps[table_map(number)]
        self._lost = maps.maps[MapName.TABLES_LOST]

    def tally(self, key: bytes, value: int = 0) -> None:
        """Take a signed number in."""
        address = self._made(key)
        if not address:
            return
        for cell, change, number in changes(self.table, value):
            place = address + _CELL * cell
            match change:
                case Change.ADD:
                    add_to_word(place, number)
                case Change.GREATEST:
                    raise_word(place, number)
                case Change.SET:
                    ctypes.c_uint64.from_address(place).value = number

    def keep(self, key: bytes, value: bytes) -> None:
        """Take in what is kept, a string or a call stack."""
        if address := self._made(key):
            ctypes.memmove(address, value, _CELL * self.table.value_cells)

    def kept(self, key: bytes) -> bytes:
        """Return what is kept under a key, zeros if there is nothing."""
        address, size = self._found(key), _CELL * self.table.value_cells
        return ctypes.string_at(address, size) if address else bytes(size)

    def value(self, key: bytes) -> int:
        """Return the number under a key (``keyed.layout.shown_value``), 0 if there is nothing."""
        address = self._found(key)
        if not address:
            return 0
        count = self.table.value_cells
        return shown_value(self.table, (ctypes.c_uint64 * count).from_address(address)[:])

    def delete(self, key: bytes) -> None:
        """Take a key out, if it is there."""
        self._all.change(TableChange(self._number, key, None))

    def clear(self) -> None:
        """Take all keys out, and forget what was lost."""
        self._all.change(TableChange(self._number, None))

    def contents(self) -> TableContents:
        """Return what is there now."""
        return self._all.contents()[self._number]

    def _found(self, key: bytes) -> int:
        """Return the address of the value under a key, 0 if there is none."""
        if isinstance(self._map, SharedHash):
            return self._map.address_of(key)
        return self._map.own_address + _CELL * HEAD_CELLS if self._map.words[0] else 0

    def _made(self, key: bytes) -> int:
        """Return the address of the value under a key, which is made if there is none; 0, and count, without room."""
        if not isinstance(self._map, SharedHash):
            self._map.words[0] = 1
            return self._found(key)
        for _ in range(_TRIES):
            if address := self._map.address_of(key):
                return address
            try:
                self._map.add(key, bytes(self._map.shape.value_size))
            except OSError:
                break
        assert isinstance(self._lost, SharedArray)
        add_to_word(self._lost.own_address + _CELL * self._number, 1)
        return 0
