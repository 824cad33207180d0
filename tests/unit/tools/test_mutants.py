"""The tool that changes single places of the sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]

BEFORE = '''"""A module."""

LIMIT = 3


def count(numbers):
    """Count."""
    seen = 0
    for number in numbers:
        if number < LIMIT and not number % 2:
            seen += 1
    return f"{seen + 1}"
'''


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mutants"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


@pytest.fixture
def module(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    path = tmp_path / "src" / "dprobes" / "counts.py"
    path.parent.mkdir(parents=True)
    path.write_text(BEFORE)
    return path


def test_each_mutant_is_one_change_in_a_function(tool: Any, module: Path) -> None:
    found = [mutant.lines() for mutant in tool.mutants_of(module.relative_to(tool.ROOT))]
    condition = "if number < LIMIT and not number % 2:"
    assert sorted(found) == sorted(
        [
            ("seen = 0", "pass"),
            ("seen = 0", "seen = (1)"),
            (condition, "if (number < LIMIT or not number % 2):"),
            (condition, "if (number <= LIMIT) and not number % 2:"),
            (condition, "if number < LIMIT and (number % 2):"),
            (condition, "if number < LIMIT and not (number * 2):"),
            (condition, "if number < LIMIT and not number % (3):"),
            ("seen += 1", "pass"),
            ("seen += 1", "seen += (2)"),
        ]
    )


def test_the_sample_stays_when_other_lines_change(tool: Any, module: Path) -> None:
    before = [mutant.lines() for mutant in tool.sample(1, 4, "")]
    module.write_text(BEFORE.replace("LIMIT = 3\n", "LIMIT = 4\n\nOTHER = 5\n"))
    assert [mutant.lines() for mutant in tool.sample(1, 4, "")] == before
    assert [mutant.lines() for mutant in tool.sample(2, 4, "")] != before


def test_what_is_named_is_there(tool: Any) -> None:
    tests = {test for tests in tool.ALSO.values() for test in tests}
    assert sorted(test for test in tests if not (ROOT / test).exists()) == []
    sources = ROOT / "src" / "dprobes"
    assert [p for p in tool.ALSO if not (sources / p).is_dir() and not (sources / f"{p}.py").is_file()] == []


def test_explained_mutants_are_of_lines_that_are_there(tool: Any) -> None:
    found = tool.explanations()
    assert found
    for (module, before, _), because in found.items():
        assert before.splitlines()[0] in (ROOT / module).read_text()
        assert because.endswith(".")
