"""A docstring begins with a noun or an imperative, and names what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.docstring_lint import beginnings, prose_and_names, stale

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


def test_docstrings_that_begin_like_a_riddle_are_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""What there is."""\n\n\ndef f():\n    r"""\n    Say how.\n    """\n    return """What"""\n', "utf-8"
    )
    assert list(beginnings(file)) == [(1, "What"), (5, "Say")]


def test_nouns_and_imperatives_are_not(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Status of a run."""\n\n\ndef f():\n    """Return what there is."""  # What\n', "utf-8")
    assert list(beginnings(file)) == []
