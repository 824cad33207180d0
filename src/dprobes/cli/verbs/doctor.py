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
def command() -> int:
    """
    Print what works on this machine, with a reason and a remedy for each "no".

    Each feature is tried; nothing is concluded from version numbers. Exit status 1 means that no probes work at all.
    """
    from dprobes.engines.registry import rows

    with Progress("trying what works here"):
        findings = [finding for row in rows() for finding in row.examine()]
    for finding in findings:
        print_lines(_lines(finding))
    return 0 if all(finding.works for finding in findings if finding.essential) else 1


def _lines(finding: Finding) -> Iterator[str]:
    text = f"{'yes' if finding.works else 'no ':3}  {finding.what}"
    if finding.detail:
        text += f": {finding.detail}"
    yield text
    if not finding.works and finding.remedy:
        yield f"     remedy: {finding.remedy}"
