"""The verb ``doctor``: what this machine allows, found out by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli.output.textoutput import print_lines
from dprobes.cli.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.findings import Finding

__all__ = ["command"]


@click.command("doctor")
@click.option(
    "--engine", "engine", metavar="NAME=ENDPOINT", help="Try what is behind an endpoint, such as a stub, instead."
)
def command(engine: str | None) -> int:
    """
    Print what works on this machine, with a reason and a remedy for each "no".

    Each feature is tried; nothing is concluded from version numbers. Exit status 1 means that no probes work at all.
    What stands behind an endpoint is let go on behind that.
    """
    from dprobes.engines.registry import rows

    with Progress("trying what works here"):
        findings = [finding for row in rows() for finding in row.examine()] if engine is None else _behind(engine)
    for finding in findings:
        print_lines(_lines(finding))
    return 0 if all(finding.works for finding in findings if finding.essential) else 1


def _behind(engine: str) -> list[Finding]:
    """Return what was found behind an endpoint; raise a usage error if nothing can be tried there."""
    from dprobes.engines.registry import engine_row, named_engine, rows

    name, argument = named_engine(engine)
    row = engine_row(name)
    if argument is None or row.trial is None:
        known = ", ".join(each.usage for each in rows() if each.trial is not None)
        raise click.UsageError(f"'{engine}' names nothing that can be tried: give {known}")
    return row.examine_behind(argument)


def _lines(finding: Finding) -> Iterator[str]:
    text = f"{'yes' if finding.works else 'no ':3}  {finding.what}"
    if finding.detail:
        text += f": {finding.detail}"
    yield text
    if not finding.works and finding.remedy:
        yield f"     remedy: {finding.remedy}"
