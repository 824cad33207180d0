"""A name in double backquotes is one that the code has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.reference_lint import prose_and_names, stale

if TYPE_CHECKING:
    from pathlib import Path

TEXT = '''"""A module about ``Thing`` and ``gone_thing``."""

LIMIT = 5
"""Like ``other.limit``, of a ``Thing``."""


class Thing:  # see ``nowhere()``
    note = "of a word"
'''


def test_docstrings_and_comments_are_prose() -> None:
    prose, names = prose_and_names(TEXT)
    assert [line for line, _ in prose] == [1, 4, 7]
    assert names == {"LIMIT", "class", "Thing", "note", "of", "a", "word"}


def test_references_to_nothing_are_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(TEXT, encoding="utf-8")
    known = prose_and_names(TEXT)[1]
    assert list(stale(file, known)) == [(1, "gone_thing"), (4, "other.limit"), (7, "nowhere")]
