"""The help of the command as a whole."""

from __future__ import annotations

from click.testing import CliRunner

from dprobes.cli.command_group import command_group
from dprobes.cli.option_values import find_example


def test_the_help_names_an_example_that_is_there() -> None:
    result = CliRunner().invoke(command_group, ["--help"])
    lines = [line.split("dprobes run ")[1] for line in result.stdout.splitlines() if "A first probe:" in line]
    assert len(lines) == 1
    assert find_example(lines[0].split()[0]) is not None
