"""``case _`` is refused where it takes members of an enumeration or classes of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools.match_lint import places

if TYPE_CHECKING:
    from pathlib import Path


def lines_of(tmp_path: Path, cases: str) -> list[tuple[int, str]]:
    file = tmp_path / "module.py"
    file.write_text(f"def f(x):\n    match x:\n{cases}", encoding="utf-8")
    return list(places(file))


@pytest.mark.parametrize(
    "pattern", ["Kind.ONE", "Kind.ONE | Kind.TWO", "Node()", "tree.Node(left=1)", "Node() as node"]
)
def test_the_rest_of_members_and_classes_is_found(tmp_path: Path, pattern: str) -> None:
    cases = f"        case {pattern}:\n            return 1\n        case _:\n            return 2\n"
    assert lines_of(tmp_path, cases) == [(5, "f")]


@pytest.mark.parametrize("pattern", ["1", "'one'", "int()", "str() | Node()", "[Node(), *_]"])
def test_the_rest_of_open_data_is_not(tmp_path: Path, pattern: str) -> None:
    cases = f"        case {pattern}:\n            return 1\n        case _:\n            return 2\n"
    assert lines_of(tmp_path, cases) == []


@pytest.mark.parametrize("rest", ["assert_never(x)", "raise ValueError(x)"])
def test_a_rest_that_is_refused_is_not(tmp_path: Path, rest: str) -> None:
    assert (
        lines_of(tmp_path, f"        case Node():\n            return 1\n        case _:\n            {rest}\n") == []
    )
