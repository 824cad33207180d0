"""The records and stacks of live patches, which are read from memory that a process can change at will."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.patching.patch_records import PatchRecord, link_to, record_bytes, record_in, stack_at
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace

BASE = 0x7F0000000000
RECORD = PatchRecord(
    BASE, 0x7000, 0x401000, bytes.fromhex("554889e548"), bytes.fromhex("e9fb0f0000"), "work", "/bin/program",
    "/tmp/fix.so", "work",
)  # fmt: skip


def test_a_record_is_read_as_it_was_written() -> None:
    page = record_bytes(RECORD)
    assert record_in(page + bytes(4096 - len(page)), BASE) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"base": BASE + 4096},
        {"base": "7f0000000000"},
        {"size": -1},
        {"start": 1 << 63},
        {"start": 1.5},
        {"jump": "e9fb0f000000"},
        {"jump": "ebfb0f0000"},
        {"original": "55"},
        {"original": "zz4889e548"},
        {"original": None},
        {"function": 3},
        {"path": "x" * 1025},
    ],
    ids=str,
)
def test_a_record_with_other_values_is_ignored(change: dict[str, object]) -> None:
    mark, _, text = record_bytes(RECORD).partition(b"\n")
    changed = json.dumps(json.loads(text) | change).encode()
    assert record_in(mark + b"\n" + changed, BASE) is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"{}", b"[" * 4000, b"\xff"])
def test_a_page_without_a_record_is_ignored(text: bytes) -> None:
    mark, _, _ = record_bytes(RECORD).partition(b"\n")
    assert record_in(mark + b"\n" + text, BASE) is None
    assert record_in(text, BASE) is None


def test_names_that_do_not_fit_a_page_are_refused() -> None:
    with pytest.raises(EngineError) as caught:
        record_bytes(RECORD._replace(path="/" + "x" * 4096))
    assert caught.value.message == "the names of the module, the function and the object are too long for a patch"


class _Memory:
    """The memory of a process: bytes by address."""

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self._pieces = pieces

    def read(self, address: int, size: int) -> bytes:
        for start, data in self._pieces.items():
            if start <= address and address + size <= start + len(data):
                return data[address - start : address - start + size]
        raise OSError


def stack_of(links: dict[int, int], top: int) -> list[int]:
    """Return the numbers of the patches in a stack; ``links`` are those of each patch to its former one."""
    records = {
        number: RECORD._replace(base=number << 16, jump=b"\xe9" + number.to_bytes(4, "little")) for number in links
    }
    pieces = {RECORD.start: records[top].jump}
    for number, former in links.items():
        pieces[number << 16] = bytes(4088) + link_to(records.get(former))
    found = stack_at(cast("AddressSpace", _Memory(pieces)), records.values(), RECORD.start)
    return [record.base >> 16 for record in found]


@pytest.mark.parametrize(
    ("links", "stack"),
    [
        ({1: 0, 2: 1, 3: 2}, [3, 2, 1]),
        ({1: 0, 2: 0, 3: 1}, [3, 1]),
        ({1: 3, 2: 1, 3: 2}, [3, 2, 1]),
        ({1: 1, 2: 2, 3: 3}, [3]),
    ],
    ids=["all", "one removed", "a ring", "links to themselves"],
)
def test_a_stack_has_each_patch_at_most_once(links: dict[int, int], stack: list[int]) -> None:
    assert stack_of(links, 3) == stack


def test_unreadable_memory_has_no_stack() -> None:
    assert stack_at(cast("AddressSpace", _Memory({})), [RECORD], RECORD.start) == []


def test_patches_of_another_address_are_not_in_a_stack() -> None:
    memory = _Memory({RECORD.start: RECORD.jump, RECORD.start + 64: RECORD.jump, BASE: bytes(4096)})
    others = [RECORD._replace(start=RECORD.start + 64)]
    assert stack_at(cast("AddressSpace", memory), others, RECORD.start) == []
    assert stack_at(cast("AddressSpace", memory), others, RECORD.start + 64) == others
