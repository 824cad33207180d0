"""Packing of a ring's entries that are records, without a loop over single entries."""

from __future__ import annotations

import sys
from functools import lru_cache

from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT
from dprobes.engines.ring_spans import HEADER_SIZE
from dprobes.errors import FormatError
from dprobes.record.record_rows import PackedRows

__all__ = ["packed_entries"]

_LENGTH = 4
_HEAD_SIZE = ENTRY_HEAD.size
_KIND_AT = HEADER_SIZE + KIND_SHIFT // 8


def packed_entries(table: bytes, stride: int) -> PackedRows | None:
    """Return entries of one size, ``stride`` bytes apart, as packed records, or None if they differ in kind."""
    size = int.from_bytes(table[:_LENGTH], sys.byteorder)
    if any(table[_KIND_AT::stride]) or size <= _HEAD_SIZE:
        return None
    try:
        return PackedRows.of_table(table, stride, _places(size))
    except FormatError:
        return None


@lru_cache(64)
def _places(size: int) -> tuple[int, ...]:
    """Return the offsets, in an entry of ``size`` bytes, of the bytes of a packed row: probepoint, then record."""
    return (*range(HEADER_SIZE, HEADER_SIZE + 4), *range(HEADER_SIZE + _HEAD_SIZE, HEADER_SIZE + size))
