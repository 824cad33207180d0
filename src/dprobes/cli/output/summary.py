"""The summary of a run: the counts of every probepoint, and the places without one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.engines.interface import Counts
from dprobes.escapes import escaped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.interface import Session
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.program import Program

__all__ = ["faulted_runs", "left_out_lines", "place_of", "skipped_hits", "summary"]

_SHOWN = 20
"""Up to so many probepoints, those without a hit are listed as well."""

_NAMED = 3
"""How many names the summary gives for each reason to leave functions out."""

_MISSED = (
    "there was no room for one more at that moment, the processor ran a handler, the process was changing its "
    "mappings, or no breakpoint could be where a tail call returns to"
)

_PLACE = 1
"""The column of places."""

_RARE = ("passed", "recursed")
"""Columns that are left out where the table is too wide and they hold zeros."""

_HEADER = ("probe", "place", "hits", "records", "lost", "passed", "recursed", "executed")


def summary(program: Program, session: Session, counts: Sequence[Counts], width: int | None = None) -> str:
    """
    Return a table of the probepoints in the order of their definitions, and of the definitions without any.

    It is made to fit into ``width`` columns.
    """
    probes = session.probes
    unused = _unused_files(probes, counts)
    # A place is said with its file only where the same name may mean several.
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.path not in unused))
    lines = [
        (probe.number, f"{place_of(probe)} in {probe.path}" if len(paths) > 1 else place_of(probe), count)
        for probe, count in zip(probes, counts, strict=True)
        if probe.path not in unused
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
    text = _table(rows, paths if len(paths) > 1 else [], width)
    if unused:
        text += f"\nnothing was hit in {escaped(', '.join(unused))}"
    if hidden := len(lines) - len(rows):
        text += f"\nand {f'{hidden} probepoints that were' if hidden > 1 else '1 probepoint that was'} not hit"
    for number, place, count in lines:
        if count.missed:
            what = f"{count.missed} hit{'s' if count.missed > 1 else ''}"
            codes = f"{program.major},{program.definitions[number].minor}"
            text += f"\n{codes}  {what} of {escaped(place)} ran no handler: {_MISSED}"
        if count.skipped:
            codes = f"{program.major},{program.definitions[number].minor}"
            text += f"\n{codes}  {skipped_hits(count, escaped(place))}"
        if count.faulted:
            codes = f"{program.major},{program.definitions[number].minor}"
            text += f"\n{codes}  {faulted_runs(count, escaped(place))}"
    for number, definition in enumerate(program.definitions):
        mine = [left_out for left_out in session.left_out if left_out.number == number]
        for line in left_out_lines(mine, names=_NAMED):
            text += f"\n{program.major},{definition.minor}  {escaped(line)}"
    return text


def _unused_files(probes: Sequence[Probepoint], counts: Sequence[Counts]) -> list[str]:
    """Return the files in which nothing happened, where something did in another one."""
    paths = dict.fromkeys(probe.path for probe in probes)
    if len(paths) < 2:
        return []
    used = {probe.path for probe, count in zip(probes, counts, strict=True) if replace(count, executed=()) != Counts()}
    return [path for path in paths if path not in used] if used else []


def _table(rows: Sequence[tuple[str, ...]], paths: Sequence[str], width: int | None) -> str:
    """
    Return the table; if it is too wide, without columns that say nothing, and with the files below it.

    What is too wide even so has places on lines of their own.
    """
    text = console.table(_HEADER, rows)
    if width is None or _width(text) <= width:
        return text
    kept = [n for n, name in enumerate(_HEADER) if name not in _RARE or any(row[n] != "0" for row in rows)]
    header = [_HEADER[n] for n in kept]
    narrow = [[row[n] for n in kept] for row in rows]
    below = ""
    for number, path in enumerate(paths, 1):
        below += f"\n[{number}] {escaped(path)}"
        for row in narrow:
            if row[_PLACE].endswith(f" in {path}"):
                row[_PLACE] = f"{row[_PLACE].removesuffix(f' in {path}')} [{number}]"
    text = console.table(header, narrow)
    over = _width(text) - width
    if over <= 0:
        return text + below
    room = max(max(len(row[_PLACE]) for row in narrow) - over, len("place"))
    is_long = [len(row[_PLACE]) > room for row in narrow]
    cells = [["", "", *row[_PLACE + 1 :]] if long else row for row, long in zip(narrow, is_long, strict=True)]
    head, *lines = console.table(header, cells).splitlines()
    broken = [f"{row[0]}  {escaped(row[_PLACE])}\n" if long else "" for row, long in zip(narrow, is_long, strict=True)]
    return "\n".join([head, *(place + line for place, line in zip(broken, lines, strict=True))]) + below


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def faulted_runs(counts: Counts, place: str) -> str:
    """Return what to say of handler runs that left no record because of a fault."""
    runs = f"{counts.faulted} handler run{'s' if counts.faulted > 1 else ''}"
    return f"{runs} at {place} left no record, because the instruction faulted"


def skipped_hits(counts: Counts, place: str) -> str:
    """Return what to say of hits that ran no handler to save time."""
    hits = f"{counts.skipped} hit{'s' if counts.skipped > 1 else ''}"
    return f"{hits} of {place} ran no handler: more would have taken too much of a CPU (--overhead)"


def place_of(probe: Probepoint) -> str:
    """Return a probepoint's place for people."""
    return f"{probe.where} (return)" if probe.at_return else probe.where


def left_out_lines(left_out: Sequence[LeftOutProbe], *, names: int | None) -> Iterator[str]:
    """Iterate over lines that say what was left out and why, each reason with up to ``names`` names."""
    by_reason: dict[str, list[str]] = {}
    for each in left_out:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, found in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        listed = ", ".join(found if names is None else found[:names])
        more = f" and {len(found) - names} more" if names is not None and len(found) > names else ""
        yield f"left out {len(found)}, because {reason}: {listed}{more}"
