"""The verb ``getvars``: the variables of inserted programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.cli.managed import client, name_option, one_of, print_json
from dprobes.cli.output.textoutput import print_line, print_lines, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.manager.results import ManagedVariables

__all__ = ["command"]


@click.command("getvars")
@name_option
@click.option(
    "-i", "--index", "span", metavar="N1-N2", help="Only the variables with these indices, or with a single index."
)
@click.option("--local", "wants_locals", is_flag=True, help="Only local and CPU variables.")
@click.option("--global", "wants_globals", is_flag=True, help="Only global variables.")
@click.option("--reset", is_flag=True, help="Set them to zero instead of printing them.")
@click.option(
    "--clear",
    "clears",
    multiple=True,
    metavar="TABLE",
    help="Empty the keyed tables of this name, or of names that match a pattern, instead of printing: '*' is all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def command(
    name: str | None,
    everything: bool,
    span: str | None,
    wants_locals: bool,
    wants_globals: bool,
    reset: bool,
    clears: tuple[str, ...],
    as_json: bool,
) -> int:
    """
    Print the global variables, and the local and CPU variables and keyed tables of inserted programs.

    All programs of the manager share one array of global variables, which outlives programs. Each CPU has its own CPU
    variables; the last column is their sum.
    """
    one_of(name, everything=everything)
    if clears and (reset or wants_globals or span is not None):
        raise click.UsageError("--clear is about keyed tables: leave out --reset, --global and --index")
    both = wants_locals == wants_globals
    with client() as manager:
        result = manager.variables(
            name,
            wants_locals=both or wants_locals,
            wants_globals=wants_globals or (both and name is None and not clears),
            index=None if span is None else _span(span),
            resets=reset,
            clears=clears,
        )
    if reset or clears:
        return 0
    if as_json:
        print_json(_with_tables(result))
        return 0
    _print(result)
    return 0


def _with_tables(result: ManagedVariables) -> dict[str, Any]:
    """Return the answer with the rows of keyed tables as objects."""
    answer = dict(result.answer)
    programs = [dict(each) for each in answer.get("programs") or ()]
    for shown, program in zip(programs, result.programs, strict=True):
        if program.tables is not None:
            shown["tables"] = [row for table in program.keyed_tables().values() for row in table.to_dicts()]
    if "programs" in answer:
        answer["programs"] = programs
    return answer


def _span(text: str) -> tuple[int, int]:
    first, dash, last = text.removeprefix("=").partition("-")
    try:
        bounds = int(first, 0), int(last if dash else first, 0)
    except ValueError:
        raise click.UsageError(f"--index: expected N1-N2, found '{text}'") from None
    if bounds[0] > bounds[1]:
        raise click.UsageError(f"--index: {bounds[0]} is greater than {bounds[1]}")
    return bounds


def _print(result: ManagedVariables) -> None:
    first = result.first
    if result.globals is not None:
        _variables("global variables", "gv", first, result.globals)
    for program in result.programs:
        if program.local:
            _variables(f"local variables of {program.name}", "lv", first, program.local)
        if any(program.cpu):
            rows = [
                (f"cv,{first + n}", *map(str, values), str(sum(values)))
                for n, values in enumerate(zip(*program.cpu, strict=True))
            ]
            header = ("variable", *(f"cpu {n}" for n in range(len(program.cpu))), "sum")
            print_table(header, rows, f"CPU variables of {program.name}")
        if program.tables is not None:
            print_line(f"tables of {program.name}")
            print_lines(line for table in program.keyed_tables().values() for line in str(table).split("\n"))


def _variables(title: str, kind: str, first: int, values: Sequence[int]) -> None:
    if not values:
        print_line(f"no {title}" + (f" from index {first} on" if first else ""))
        return
    rows = [(f"{kind},{first + n}", str(value), f"{value:#x}") for n, value in enumerate(values)]
    print_table(("variable", "value", "hex"), rows, title)
