"""The options of a command line of ``run`` become values of ``RunOptions``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.runs.run_execution import RunOptions
from dprobes.cli.verbs import run as verb

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = "libc.so.6:malloc { @ = count(); }"


def options_of(line: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    read: list[Any] = []
    monkeypatch.setattr(verb, "run_line", read.append)
    verb.run_command.main(list(line), standalone_mode=False)
    (options,) = read
    assert isinstance(options, RunOptions)
    return options


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], RunOptions()),
        (["-e", TEXT], RunOptions(text=TEXT)),
        (["-e", TEXT, "-c", "ls -l /"], RunOptions(text=TEXT, command_line="ls -l /")),
        (["-e", TEXT, "--duration", "1.5m"], RunOptions(text=TEXT, duration=90)),
        (["-e", TEXT, "-v", "--allow-write"], RunOptions(text=TEXT, verbose=True, allow_write=True)),
        (["--engine", "gdb=localhost:1", "-e", "-p", "-p", "7", "-p", "8"],
         RunOptions(engine_name="gdb=localhost:1", text="-p", pid=8)),
        (["-e", TEXT, "--", "ls", "-l", "--", "/"], RunOptions(text=TEXT, arguments=("ls", "-l", "--", "/"))),
        (["-e", TEXT, "ls"], RunOptions(text=TEXT, arguments=("ls",))),
        (["-e", TEXT, "-e", "end { }", "-e", ""], RunOptions(text=f"{TEXT}\nend {{ }}\n")),
    ],
)  # fmt: skip
def test_options_are_read(line: list[str], expected: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(line, monkeypatch) == expected


def test_there_is_a_value_for_each_parameter() -> None:
    assert {each.name for each in verb.run_command.params} == {field.name for field in fields(RunOptions)}
