"""``case _`` is refused where it takes members of an enumeration or classes of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools.match_lint import places, problems_in

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


def test_cases_are_counted_for_the_innermost_function(tmp_path: Path) -> None:
    inner = "    match y:\n{0}case Node():\n{0}    pass\n{0}case _:\n{0}    pass\n"
    file = tmp_path / "module.py"
    file.write_text(
        f"def f(x, y):\n    def g(y):\n    {inner.format(' ' * 12)}{inner.format(' ' * 8) * 2}", encoding="utf-8"
    )
    assert list(places(file)) == [(6, "g"), (11, "f"), (16, "f")]


def test_an_excuse_is_for_a_number_of_cases() -> None:
    excused = {"a.py:f": (1, "reason"), "a.py:g": (2, "reason")}
    assert list(problems_in({"a.py:f": [3], "a.py:g": [5, 9]}, excused)) == []
    assert list(problems_in({"a.py:f": [3, 4], "a.py:g": [5], "a.py:h": [7]}, excused)) == [
        "a.py:f (lines 3, 4): 1 'case _' excused, 2 take members and classes to come",
        "a.py:h (lines 7): 0 'case _' excused, 1 take members and classes to come",
        "a.py:g: 2 'case _' excused, 1 found",
    ]
