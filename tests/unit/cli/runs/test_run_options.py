"""Lines that are read without click say what click makes of them; what is not for them is left to it."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.runs.run_options import FLAGS, VALUES, RunOptions, options_of
from dprobes.cli.verbs import run as verb

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = "libc.so.6:malloc { @ = count(); }"
WORDS = {"text": TEXT, "pid": str(os.getpid()), "command_line": "ls -l /", "engine_name": "ptrace", "duration": "1.5m"}
SHORT = [
    ["-e", TEXT],
    *(["-e", TEXT, option, WORDS[name]] for option, (name, _) in VALUES.items()),
    *(["-e", TEXT, option] for option in FLAGS),
    ["-v", "--engine", "gdb=localhost:1", "-e", TEXT, "-e", "-p", "-p", "7", "-p", "8"],
    ["-e", TEXT, "--", "ls", "-l", "--", "/"],
    ["-e", TEXT, "--"],
    ["-e", TEXT, "-e", "every 1s { }", "-p", "7"],
    ["-e", "--", "--duration", "10", "--", "sleep", "1"],
]
LONG = [
    [],
    ["program.rpn"],
    ["-p", "7"],
    ["-e"],
    ["-e", TEXT, "ls"],
    ["-e", TEXT, "-p7"],
    ["-e", TEXT, "--pid=7"],
    ["-e", TEXT, "-p", "0"],
    ["-e", TEXT, "-p", "+7"],
    ["-e", TEXT, "-p", "bash"],
    ["-e", TEXT, "--engine", "nothing"],
    ["-e", TEXT, "--duration", "soon"],
    ["-e", TEXT, "--top"],
    ["-e", TEXT, "--help"],
]


def by_click(line: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    read: list[Any] = []
    monkeypatch.setattr(verb, "carry_out", read.append)
    verb.run_command.main(list(line), standalone_mode=False)
    (options,) = read
    assert isinstance(options, RunOptions)
    return options


@pytest.mark.parametrize("line", SHORT)
def test_a_short_line_says_what_click_makes_of_it(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(["run", *line])
    assert options is not None
    assert options == by_click(line, monkeypatch)


@pytest.mark.parametrize("line", LONG)
def test_other_lines_are_left_to_click(line: list[str]) -> None:
    assert options_of(["run", *line]) is None


def test_several_texts_are_one_program_in_their_order() -> None:
    options = options_of(["run", "-e", TEXT, "-v", "-e", "end { }", "-e", ""])
    assert options is not None
    assert options.text == f"{TEXT}\nend {{ }}\n"


def test_other_verbs_are_left_to_click() -> None:
    assert options_of(["check", "-e", TEXT]) is None
    assert options_of([]) is None


def test_there_is_a_value_for_each_parameter() -> None:
    assert {each.name for each in verb.run_command.params} == {field.name for field in fields(RunOptions)}
