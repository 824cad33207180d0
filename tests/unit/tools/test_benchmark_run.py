"""The benchmark prints its table whatever fails in a section."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_a_section_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from run import measure
    from table import BenchmarkError, Measurement

    def late(directory: Path) -> NoReturn:
        raise BenchmarkError("no probe was armed within a minute\nand more")

    def broken(directory: Path) -> NoReturn:
        raise subprocess.CalledProcessError(1, ["gcc"])

    row = Measurement("a call", 1.0)
    sections = {"late": late, "broken": broken, "fine": lambda directory: [row]}
    assert measure(list(sections), sections, Path("/nonexistent")) == (
        [
            Measurement("late: failed: no probe was armed within a minute", None),
            Measurement("broken: failed: Command '['gcc']' returned non-zero exit status 1.", None),
            row,
        ],
        True,
    )
    assert "no probe was armed within a minute\nand more" in capsys.readouterr().err
