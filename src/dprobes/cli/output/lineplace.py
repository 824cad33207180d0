"""Lines of the source as ``locate`` shows them: the instructions that begin them, as programs name them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.target.location import Module

__all__ = ["LinesOfSource", "describe_lines", "split_lines"]


class LinesOfSource(NamedTuple):
    """Lines of a source file of a module."""

    module: str
    path: str
    first: int
    last: int


def split_lines(place: str) -> LinesOfSource | None:
    """Take ``MODULE:FILE:LINE`` or ``MODULE:FILE:LINE-LINE`` apart; None if that is something else."""
    from dprobes.dpc.modules.debugplaces import SOURCE_LINES

    module, _, text = place.partition(":")
    lines = SOURCE_LINES.fullmatch(text)
    if not module or lines is None or Path(place.rpartition(":")[0]).is_file():
        return None  # a path may have a colon in it, and a file offset behind it
    first = int(lines["first"])
    return LinesOfSource(module, lines["path"], first, int(lines["last"] or first))


def describe_lines(module: Module, lines: LinesOfSource, symbols: Path | None) -> Iterator[str]:
    """
    Give the instructions that begin lines; those that are cheap to probe are marked with '+'.

    Raise ``TargetError`` if there are none.
    """
    from dprobes.cli.output.placecost import costs_at
    from dprobes.dpc.modules.debugplaces import DebugPlaces, place_of
    from dprobes.target.code.instructions import decode_at
    from dprobes.target.location import FileSymbols

    finder = DebugPlaces(lambda _name: module.elf, FileSymbols(symbols))
    found, by_line = finder.addresses_of_lines(lines.module, lines.path, lines.first, lines.last)
    rows = [(line, address) for line, addresses in by_line.items() for address in addresses]
    decoded = [decode_at(found, found.file_offset(address)) for _, address in rows]
    costs = list(costs_at(found, decoded))
    file = lines.path.rpartition("/")[2]
    for number, ((line, address), instruction, cost) in enumerate(zip(rows, decoded, costs, strict=True)):
        if not number or rows[number - 1][0] != line:
            yield ""
            yield f"{file}:{line}"
        mark = "+" if cost.is_cheap else " "
        place = f"offset = {place_of(found, address)}"
        yield f"   {instruction.offset:8x} {mark} {place:<34} {instruction.text}"
