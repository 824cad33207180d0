"""The verb ``getvars``: the variables of inserted programs."""

from __future__ import annotations

from typing import Any

import click

from dprobes.cli.managed import client, name_option, one_of, print_json
from dprobes.cli.tables import print_table

__all__ = ["command"]


@click.command("getvars")
@name_option
@click.option("-i", "--index", "span", metavar="N1-N2", help="Only the variables with these indices, or a single one.")
@click.option("--local", "wants_locals", is_flag=True, help="Only local and CPU variables.")
@click.option("--global", "wants_globals", is_flag=True, help="Only global variables.")
@click.option("--reset", is_flag=True, help="Set them to zero instead of printing them.")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def command(
    name: str | None,
    everything: bool,
    span: str | None,
    wants_locals: bool,
    wants_globals: bool,
    reset: bool,
    as_json: bool,
) -> int:
    """
    Print the global variables, and the local and CPU variables of inserted programs.

    Global variables are one array for all programs of the manager; they outlive programs. Of CPU variables each CPU has
    its own; the last column is their sum.
    """
    one_of(name, everything=everything)
    both = wants_locals == wants_globals
    arguments: dict[str, Any] = {"name": name, "local": both or wants_locals, "reset": reset}
    arguments["global"] = wants_globals or (both and name is None)
    if span is not None:
        arguments["index"] = _span(span)
    with client() as manager:
        result = manager.ask("getvars", **arguments)
    if reset:
        return 0
    if as_json:
        print_json(result)
        return 0
    _print(result)
    return 0


def _span(text: str) -> list[int]:
    first, dash, last = text.removeprefix("=").partition("-")
    try:
        bounds = [int(first, 0), int(last if dash else first, 0)]
    except ValueError:
        raise click.UsageError(f"--index: expected N1-N2, found '{text}'") from None
    if bounds[0] > bounds[1]:
        raise click.UsageError(f"--index: {bounds[0]} is greater than {bounds[1]}")
    return bounds


def _print(result: dict[str, Any]) -> None:
    first = result["first"]
    if "globals" in result:
        values = result["globals"]["values"]
        _variables("global variables", "gv", first, values)
    for program in result.get("programs", ()):
        if program["locals"]:
            _variables(f"local variables of {program['name']}", "lv", first, program["locals"])
        cpus = program["cpu"]
        if any(cpus):
            count = len(cpus[0])
            rows = [
                (f"cv,{first + n}", *(str(values[n]) for values in cpus), str(sum(values[n] for values in cpus)))
                for n in range(count)
            ]
            header = ("variable", *(f"cpu {n}" for n in range(len(cpus))), "sum")
            print_table(header, rows, f"CPU variables of {program['name']}")


def _variables(title: str, kind: str, first: int, values: list[int]) -> None:
    if not values:
        click.echo(f"no {title}")
        return
    rows = [(f"{kind},{first + n}", str(value), f"{value:#x}") for n, value in enumerate(values)]
    print_table(("variable", "value", "hex"), rows, title)
