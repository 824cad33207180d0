"""Memory that is handed out in parts, and that others map from the same file."""

from __future__ import annotations

import mmap
import os

import pytest

from dprobes.engines.inline.shared_memory import Region
from dprobes.errors import NotSupportedError


def test_parts_do_not_overlap_and_are_aligned() -> None:
    with Region(1 << 16) as region:
        starts = [(region.take(size), size) for size in (1, 64, 65, 3, 4096)]
        aligned = region.take(10, 4096)
        assert aligned % 4096 == 0
        ends = [start + size for start, size in starts]
        assert all(start % 64 == 0 for start, _ in starts)
        assert all(end <= start for end, (start, _) in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= aligned


def test_what_does_not_fit_is_said() -> None:
    with Region(100) as region:
        assert region.size == mmap.PAGESIZE
        region.take(4000)
        with pytest.raises(NotSupportedError) as refused:
            region.take(97)
        assert str(refused.value) == "97 bytes do not fit into the memory that handlers share with the tool"
        assert region.take(64) == 4032


def test_it_begins_as_zeros_and_others_see_changes() -> None:
    with Region(8192) as region:
        assert not any(region.mapping[:])
        other = Region(8192, os.dup(region.descriptor))
        region.mapping[100] = 7
        assert other.mapping[100] == 7
        assert other.own_address != region.own_address
        other.mapping[100] = 8
        other.close()
        assert region.mapping[100] == 8, "who closes it leaves it to the others"
