"""What a run says at its end: the counts of every probepoint, and what has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.engines.base import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.base import Session
    from dprobes.engines.resolve import LeftOutProbe, Probepoint
    from dprobes.rpn.program import Program

__all__ = ["left_out_lines", "place_of", "summary"]

_SHOWN = 20
"""Up to so many probepoints, those without a hit are listed as well."""

_NAMED = 3
"""How many names the summary gives for each reason to leave functions out."""

_MISSED = "there was no room for one more at that moment, or the process was changing its mappings"

_HEADER = ("probe", "place", "hits", "records", "lost", "passed over", "recursed", "executed")


def summary(program: Program, session: Session, counts: Sequence[Counts]) -> str:
    """Return a table of the probepoints in the order of their definitions, and of the definitions without any."""
    probes = session.probes
    # A place is said with its file only where the same name may mean several.
    paths = {probe.path for probe in probes}
    lines = [
        (probe.number, f"{place_of(probe)} in {probe.path}" if len(paths) > 1 else place_of(probe), count)
        for probe, count in zip(probes, counts, strict=True)
    ]
    missing = set(range(len(program.definitions))) - {probe.number for probe in probes}
    lines += [(number, "not resolved", Counts()) for number in missing]
    lines.sort(key=lambda line: line[0])
    rows = [
        (
            f"{program.major},{program.definitions[number].minor}",
            place,
            *(str(value) for value in (count.hits, count.records, count.lost, count.passed, count.recursed)),
            ", ".join(count.executed) or "-",
        )
        for number, place, count in lines
        if count.hits or len(lines) <= _SHOWN
    ]
    text = console.table(_HEADER, rows)
    if hidden := len(lines) - len(rows):
        text += f"\nand {hidden} probepoints that were not hit"
    for number, place, count in lines:
        if count.missed:
            what = f"{count.missed} hit{'s' if count.missed > 1 else ''}"
            text += (
                f"\n{program.major},{program.definitions[number].minor}  {what} of {place} ran no handler: {_MISSED}"
            )
    for number, definition in enumerate(program.definitions):
        mine = [left_out for left_out in session.left_out if left_out.number == number]
        for line in left_out_lines(mine, names=_NAMED):
            text += f"\n{program.major},{definition.minor}  {line}"
    return text


def place_of(probe: Probepoint) -> str:
    """Return a probepoint's place for people."""
    return f"{probe.where} (return)" if probe.definition.at_return else probe.where


def left_out_lines(left_out: Sequence[LeftOutProbe], *, names: int | None) -> Iterator[str]:
    """Iterate over lines that say what was left out and why, each reason with up to ``names`` names."""
    by_reason: dict[str, list[str]] = {}
    for each in left_out:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, found in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        listed = ", ".join(found if names is None else found[:names])
        more = f" and {len(found) - names} more" if names is not None and len(found) > names else ""
        yield f"left out {len(found)}, because {reason}: {listed}{more}"
