"""ARCHITECTURE.md names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

PLACES = ("", "src/dprobes")
"""What paths are relative to; a name without a directory may be that of any one file."""


def is_there(name: str) -> bool:
    if any(list((ROOT / place).glob(name)) for place in PLACES):
        return True
    return "/" not in name and len(list((ROOT / "src").rglob(name))) == 1


def test_every_file_that_is_named_is_there() -> None:
    names = set(re.findall(r"`([\w/.*]+(?:\.py|/))`", TEXT))
    assert len(names) > 50
    assert sorted(name for name in names if not is_there(name)) == []
