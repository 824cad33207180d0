"""The verb ``examples``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli.main import run

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"They are in {EXAMPLES}"
    assert sum("How much memory does a program ask for?" in line for line in lines) == 1


def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["examples", "exec-args"]) == 0
    assert capsys.readouterr().out == (EXAMPLES / "exec-args.rpn").read_text()


def test_a_wrong_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["examples", "malloc-return"]) == 2
    assert "there is no example 'malloc-return'; did you mean 'malloc-returns'?" in capsys.readouterr().err
