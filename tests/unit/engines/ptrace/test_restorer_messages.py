"""The manifest of what is written into a process, and what becomes of one that is none."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from dprobes.engines.ptrace.restorer_messages import (
    ENTRIES,
    MANIFEST_MAGIC,
    MANIFEST_SIZE,
    entries_in,
    entry_of,
    length_in,
)
from dprobes.engines.ptrace.site_patches import NativeMemory, SitePatch

MEMORY = NativeMemory(0x1000, 8192, 0x10000, 1 << 20, None, ((0x20000, 4096),), (0x30000, MANIFEST_SIZE))
CODE = ((0x5000, 0x6000), (0x8000, 0x9000))
JUMP = SitePatch(
    ((0, 1, 0x401000),), 0x401000, b"\x55\x48\x89\xe5\x90", (0x401005, b""),
    ((0x401002, b"\xe9\1\2"), (0x401000, b"\xeb\0")), (b"\x89\xe5\x90", b"\x55\x48"), end=7,
)  # fmt: skip


def test_an_entry_says_what_is_written_and_what_belongs_there() -> None:
    data = entry_of(MEMORY, CODE, [JUMP], [(0x402000, 0x55)]) + entry_of(MEMORY, (), (), ())
    first, second = entries_in(data)
    assert (first.memory, first.code) == (MEMORY, CODE)
    jump, single = first.writes
    assert (jump.writes, jump.originals) == (JUMP.writes, JUMP.originals)
    assert (single.writes, single.originals) == (((0x402000, b"\xcc"),), (b"\x55",))
    assert (second.memory, second.code, second.writes) == (MEMORY, (), ())


def test_the_length_is_behind_the_magic() -> None:
    assert length_in(MANIFEST_MAGIC + struct.pack("=Q", 77)) == 77
    assert length_in(MANIFEST_MAGIC + struct.pack("=Q", MANIFEST_SIZE - ENTRIES)) == MANIFEST_SIZE - ENTRIES
    assert length_in(MANIFEST_MAGIC + struct.pack("=Q", MANIFEST_SIZE - ENTRIES + 1)) is None
    assert length_in(bytes(16)) is None
    assert length_in(MANIFEST_MAGIC) is None


def changed(**parts: Any) -> bytes:
    found = json.loads(entry_of(MEMORY, CODE, [JUMP], ())[4:])
    return json.dumps(found | parts).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000,
        changed(memory=[1, 2, 3, 4]),
        changed(memory=[1, 2, 3, -4, [], [1, 2]]),
        changed(memory=[1, 2, 3, 1 << 63, [], [1, 2]]),
        changed(memory=[1, 2, 3, "4", [], [1, 2]]),
        changed(memory=[1, 2, 3, 4, [], None]),
        changed(code=[[1, 2, 3]]),
        changed(code=7),
        changed(writes=[[[1, "cc", "5566"]]]),
        changed(writes=[[[1, "", ""]]]),
        changed(writes=[[[1, "cc" * 65, "55" * 65]]]),
        changed(writes=[[[1, "zz", "55"]]]),
        changed(writes=[[[1.5, "cc", "55"]]]),
    ],
)  # fmt: skip
def test_what_is_no_entry_ends_the_list(text: bytes) -> None:
    good = entry_of(MEMORY, CODE, [JUMP], ())
    data = good + struct.pack("=I", len(text)) + text + good
    assert len(list(entries_in(data))) == 1


def test_an_entry_that_is_cut_counts_for_nothing() -> None:
    good = entry_of(MEMORY, CODE, [JUMP], ())
    assert [len(list(entries_in(good[:size]))) for size in (0, 3, 4, 20, len(good) - 1, len(good))] == [
        0,
        0,
        0,
        0,
        0,
        1,
    ]
