"""The keyed tables of a run on standard output: at its end, and while it goes on every so many seconds."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.cli.output.textoutput import print_lines
from dprobes.engines.registry import engine_row
from dprobes.errors import reason_of
from dprobes.keyed.parts import NO_NAMES
from dprobes.keyed.quantities import quantity
from dprobes.keyed.rows import shown_rows
from dprobes.lazydataclass import dataclass
from dprobes.rpn.tables import TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    from dprobes.engines.interface import ControlledSession
    from dprobes.keyed.contents import TableContents
    from dprobes.keyed.parts import Names

__all__ = ["TableOptions", "TableOutput", "lines_of", "short_time"]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """
    Hold what the command line says of tables.

    ``rows`` is how many rows of each are shown, ``interval`` is in seconds. With ``as_json`` each row
    is an object in a line; with ``aside`` standard output is others', and tables go to standard error. ``prometheus``
    is a file that gets them as well.
    """

    rows: int | None = None
    interval: float | None = None
    as_json: bool = False
    aside: bool = False
    prometheus: Path | None = None


class TableOutput:
    """Print the first ``count`` tables of a session, but those with the names in ``left_out``."""

    def __init__(
        self,
        options: TableOptions,
        session: ControlledSession,
        count: int,
        names: Names = NO_NAMES,
        left_out: Container[str] = (),
    ) -> None:
        self._left_out = left_out
        self._names = names
        self._count = count
        self._options = options
        self._session = session
        self._over = threading.Event()
        self.also: Callable[[Sequence[TableContents]], None] | None = None
        """What gets the tables besides every so many seconds."""

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Print the tables every so many seconds, until the end of the context."""
        interval = self._options.interval
        if interval is None:
            yield
            return
        timer = threading.Thread(target=self._repeat, args=(interval,), daemon=True)
        timer.start()
        try:
            yield
        finally:
            self._over.set()
            timer.join()

    def _repeat(self, seconds: float) -> None:
        while not self._over.wait(seconds):
            with contextlib.suppress(BrokenPipeError):
                self.print()
            if self.also is not None and self._count:
                self.also(self._session.tables()[: self._count])

    def print(self) -> None:
        """Print what the tables hold now."""
        if not self._count:
            return
        contents = self._session.tables()[: self._count]
        if self._options.prometheus is not None:
            self._write_exposition(self._options.prometheus, contents, self._names)
        self._print([each for each in contents if each.table.name not in self._left_out], self._options.rows)

    def note_short_times(self, engine: str) -> None:
        """Print a note if what tables keep of ``elapsed`` is of the order of what hits cost the engine."""
        row = engine_row(engine)
        found = short_time(self._session.tables()[: self._count] if self._count else (), row.hit_time)
        if found is not None:
            console.note(
                f"times such as {quantity(found, Unit.NANOSECONDS)} are of the order of what hits cost with the "
                f"{engine} engine, which is in them",
                "'--engine inline' costs a hundredth of it, with -c or -p and in programs and libraries"
                if row.candidacy is not None
                else None,
            )

    def show(self, number: int, rows: int | None) -> None:
        """Print at most ``rows`` rows of a table, or as many as the command line says."""
        self._print([self._session.tables()[number]], self._options.rows if rows is None else rows)

    def _print(self, contents: Sequence[TableContents], rows: int | None) -> None:
        lines = lines_of(contents, rows=rows, as_json=self._options.as_json, names=self._names)
        if not lines:
            return
        if self._options.aside:
            console.write("\n".join(lines))
        else:
            print_lines(lines)

    @staticmethod
    def _write_exposition(path: Path, contents: Sequence[TableContents], names: Names) -> None:
        """Replace a file as a whole: whoever reads it sees all of the old text, or all of the new one."""
        from dprobes.keyed.prometheus import exposition

        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(exposition(contents, names), encoding="utf-8")
            new.replace(path)
        except OSError as error:
            console.error(f"'{path}' cannot be written: {reason_of(error)}")


def short_time(contents: Sequence[TableContents], most: int) -> int | None:
    """Return the shortest time of a call that tables of times have, if it is at most ``most`` nanoseconds."""
    found: list[int] = []
    for each in contents:
        if each.table.unit is not Unit.NANOSECONDS or each.table.kind is TableKind.SUM:
            continue
        for row in shown_rows(each):
            match row.value:
                case {"buckets": [(low, high, *_), *_]}:
                    found.append(low if high is None else high)
                case {"min": least}:
                    found.append(least)
                case {"average": time} | {"value": time}:
                    found.append(int(time))
    shortest = min(found, default=most + 1)
    return shortest if shortest <= most else None


def lines_of(
    contents: Sequence[TableContents], *, rows: int | None = None, as_json: bool = False, names: Names = NO_NAMES
) -> list[str]:
    """Return the lines that show tables."""
    if as_json:
        from dprobes.keyed.json import table_json_lines

        return [line for each in contents for line in table_json_lines(each, rows, names)]
    from dprobes.keyed.text import table_lines

    return [line for each in contents for line in table_lines(each, rows, names)]
