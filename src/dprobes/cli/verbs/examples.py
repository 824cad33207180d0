"""The verb ``examples``: the programs that come with DProbes."""

from __future__ import annotations

import click

from dprobes.cli.output.textoutput import print_line, print_lines, print_table
from dprobes.errors import DprobesError

__all__ = ["command"]


@click.command("examples")
@click.argument("name", required=False)
def command(name: str | None) -> int:
    """
    List the example programs, or print the one called NAME.

    'dprobes run NAME' runs it, with its template if it has one. For one of your own, begin with a copy: 'dprobes
    examples NAME > my.rpn'.
    """
    from dprobes.cli.shippedexamples import all_examples, example_directory, find_example
    from dprobes.diagnostics import did_you_mean

    directory = example_directory()
    if directory is None:
        raise DprobesError("this installation has no examples", hint="install dprobes again: its wheel has them")
    if name is None:
        print_table(("name", "what it shows"), [(each.name, each.summary) for each in all_examples()])
        print_line(f"They are in {directory}")
        return 0
    if (path := find_example(name)) is None:
        hint = did_you_mean(name, [each.name for each in all_examples()])
        raise click.UsageError(f"there is no example '{name}'" + (f"; {hint}" if hint else ""))
    print_lines(path.read_text(encoding="utf-8").splitlines())
    return 0
