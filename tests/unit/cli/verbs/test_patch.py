"""The argument of dprobes patch --remove names the patches that it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dprobes.cli.verbs.patch import _is_named
from dprobes.engines.ptrace.patching.patch_records import PatchRecord

OBJECT = Path("fix.so").absolute()
RECORD = PatchRecord(0, 4096, 16, b"", b"", "parse_size", "/opt/parser", str(OBJECT), "parse_size")


@pytest.mark.parametrize(
    ("named", "is_named"),
    [
        ("parse_size", True),
        ("./fix.so:parse_size", True),
        ("./fix.so:parse_size=parse_size", True),
        ("./fix.so:parse_size=./parser:parse_size", True),
        ("./fix.so:parse_size=/opt/parser:parse_size", True),
        ("./fix.so:parse_size=./other:parse_size", False),
        ("./fix.so:parse_size=parse_name", False),
        ("./fix.so:other", False),
        ("./other.so:parse_size", False),
        ("other", False),
    ],
)
def test_a_patch_is_named_as_it_was_inserted(named: str, is_named: bool) -> None:
    assert _is_named(RECORD, named) is is_named
