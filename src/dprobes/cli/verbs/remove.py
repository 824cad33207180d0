"""The verb ``remove``: remove inserted programs, or single probepoints."""

from __future__ import annotations

import click

from dprobes.cli.managed import client, name_option, one_of
from dprobes.cli.output.textoutput import print_line
from dprobes.cli.verbs.query import counts_table

__all__ = ["command"]


@click.command("remove")
@click.argument("probe", required=False, metavar="[MAJOR,MINOR]")
@name_option
def command(probe: str | None, name: str | None, everything: bool) -> int:
    """
    Remove the program --name NAME, or --all programs, and print the counts of their probepoints.

    With MAJOR,MINOR, remove only the probepoints with these codes, of the program --name NAME or of all programs.
    """
    one_of(name, everything=everything)
    if probe is None and name is None and not everything:
        raise click.UsageError("say what is to be removed: --name NAME, --all, or MAJOR,MINOR")
    with client() as manager:
        if probe is not None:
            count = manager.remove_probepoints(*_codes(probe), name)
            print_line(f"removed {count} probepoint{'s' if count > 1 else ''} {probe}")
            return 0
        removed = manager.remove(name)
    for program in removed:
        counts_table(program, f"removed {program.name}")
    if not removed:
        print_line("no program is inserted")
    return 0


def _codes(text: str) -> tuple[int, int]:
    try:
        major, minor = (int(part, 0) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"expected the codes of a probepoint, MAJOR,MINOR, found '{text}'") from None
    return major, minor
