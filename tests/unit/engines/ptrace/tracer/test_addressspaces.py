"""Many places in a process's memory, read page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.tracer.addressspaces import PageReader
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 2 * PAGE_SIZE


@pytest.mark.parametrize(
    ("address", "size"),
    [(0, 8), (PAGE_SIZE - 8, 8), (PAGE_SIZE - 7, 8), (PAGE_SIZE - 1, 2), (SIZE - 8, 8), (0, SIZE), (1, PAGE_SIZE)],
)
def test_a_place_may_end_in_another_page_than_it_begins(tmp_path: Path, address: int, size: int) -> None:
    data = bytes(n % 251 for n in range(SIZE))
    (tmp_path / "memory").write_bytes(data)
    with (tmp_path / "memory").open("rb") as memory:
        assert PageReader(memory.fileno()).read(address, size) == data[address : address + size]
