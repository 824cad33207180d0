"""The examples by their names, in a checkout and as a wheel installs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli import option_values
from dprobes.cli.main import run
from dprobes.cli.option_values import all_examples, example_directory, example_templates, find_example

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_each_example_says_what_it_shows() -> None:
    found = {example.name: example for example in all_examples()}
    programs = [*EXAMPLES.glob("*.rpn"), *EXAMPLES.glob("*.dpc")]
    assert set(found) == {path.stem for path in programs}
    assert len(found) == len(programs)  # names are unique, whatever the language
    assert found["malloc"].summary == "How much memory does a program ask for?"
    assert found["bash-lines"].summary == "The lines typed into a shell"
    assert found["kill-calls"].summary.startswith("Who calls kill(2), for whom, and what is on the stack")
    assert all(example.summary and "dprobes run" not in example.summary for example in found.values())


def test_an_example_is_found_by_its_name() -> None:
    assert find_example("malloc") == find_example("malloc.rpn") == EXAMPLES / "malloc.rpn"
    assert find_example("signals") == find_example("signals.dpc") == EXAMPLES / "signals.dpc"
    assert find_example("examples/signals.dpc") == EXAMPLES / "signals.dpc"  # as the documentation writes it
    assert find_example("signals.rpn") is None
    assert find_example("no-such-example") is None
    assert find_example("../examples/malloc") is None
    assert example_templates(EXAMPLES / "strings.rpn") == EXAMPLES / "templates"
    assert example_templates(EXAMPLES / "malloc.rpn") is None  # it has no template, and needs none
    assert example_templates(Path("malloc.rpn")) is None
    assert example_templates(EXAMPLES / "signals.dpc") is None  # what it prints is in the program


def test_a_wheel_installs_them_below_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_values, "__file__", str(tmp_path / "lib/python3/site-packages/dprobes/cli/x.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert example_directory() is None
    assert list(all_examples()) == []
    (tmp_path / "share/dprobes").mkdir(parents=True)
    (tmp_path / "share/dprobes/examples").symlink_to(EXAMPLES)
    assert find_example("malloc") == tmp_path / "share/dprobes/examples/malloc.rpn"


def test_a_file_of_the_name_comes_before_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["show", "malloc"]) == 0
    assert "offset = malloc" in capsys.readouterr().out
    (tmp_path / "malloc").write_text("name = mine\noffset = 0x10\nexit\n")
    assert run(["check", "malloc"]) == 0
    assert run(["show", "malloc"]) == 0
    assert 'name = "mine"' in capsys.readouterr().out


def test_a_name_of_neither_is_the_error_of_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", "mallocs"]) == 2
    assert capsys.readouterr().err == "error: cannot read 'mallocs': no such file or directory\n"


def test_the_word_behind_a_text_is_the_command_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {"./no-such-command": "'./no-such-command' does not exist", "signals": "command 'signals' is not found"}
    for word, message in said.items():  # not without its directory, and not the example of the name
        assert run(["run", "-e", "libc.so.6:abs { @ = count() }", "--engine", "ptrace", "--", word]) == 1
        assert f"error: {message}\n" in capsys.readouterr().err
