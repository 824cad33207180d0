"""The help of the command as a whole."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from dprobes.cli import main

if TYPE_CHECKING:
    import pytest


def named_example() -> Path | None:
    """Return the probe program that the help names."""
    result = CliRunner().invoke(main.command_group, ["--help"])
    lines = [line.split("dprobes run ")[1] for line in result.stdout.splitlines() if "A first probe:" in line]
    return Path(shlex.split(lines[0])[0]) if lines else None


def test_the_help_names_a_program_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert named_example() == Path("examples/malloc.rpn")
    monkeypatch.chdir(tmp_path)
    example = named_example()
    assert example is not None
    assert example.is_file()


def test_the_help_of_an_installed_wheel_names_what_it_has_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "my tools"
    monkeypatch.setattr(main, "__file__", str(prefix / "lib/python3/site-packages/dprobes/cli/main.py"))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert named_example() is None
    (prefix / "share/dprobes/examples").mkdir(parents=True)
    example = prefix / "share/dprobes/examples/malloc.rpn"
    example.write_text("")
    assert named_example() == example
