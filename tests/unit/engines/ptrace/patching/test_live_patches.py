"""The records of live patches, which are read from memory that a process can change at will."""

from __future__ import annotations

import json

import pytest

from dprobes.engines.ptrace.patching.live_patches import PatchRecord, record_bytes, record_in
from dprobes.errors import EngineError

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
