"""Printing of the records of trace files, with warnings about lost records and damage."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.record_options import say_problems
from dprobes.errors import FormatError
from dprobes.formatters import WITHOUT_TEMPLATES, Formatter, formatter
from dprobes.formatters.line_formatter import columns_of
from dprobes.sinks.local import console_target
from dprobes.trace.trace_content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.formatters.templates.template_collection import Templates
    from dprobes.record.record_origin import RecordSource
    from dprobes.trace.trace_content import Damage, TraceProgram, TraceRecord

__all__ = ["DamageReport", "Printer", "skip_damaged_option"]

# The option ``--skip-damaged`` of verbs that read trace files, and messages about damage.

_SAID_MAX = 5
"""Maximum number of damaged places of a file that are reported one by one."""


def skip_damaged_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds ``--skip-damaged``, with which readers continue after damage."""
    return click.option(
        "--skip-damaged", is_flag=True, help="Skip damaged parts of trace files, and report how much was skipped."
    )


class DamageReport:
    """A report of skipped damage: warnings about the first places one by one, and about the others by ``finish``."""

    def __init__(self) -> None:
        self._places: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()

    def __call__(self, damage: Damage) -> None:
        """Print a warning about a damaged place of a trace file, or only count it if many were printed."""
        self._places[damage.file] += 1
        if self._places[damage.file] > _SAID_MAX:
            self._unsaid[damage.file] += damage.size
            return
        console.warning(f"{damage.problem}: {damage.size} bytes from byte {damage.offset} on are skipped")
        if not damage.offset:
            console.warning(f"'{damage.file}' described its clock there: times may be wrong")

    def finish(self) -> None:
        """Print a warning about the places that were only counted."""
        for file, size in self._unsaid.items():
            count = self._places[file] - _SAID_MAX
            console.warning(f"'{file}': {size} bytes at {count} more damaged places are skipped")
        self._unsaid.clear()


_TOGETHER = 256
"""Number of records that are written by one call."""


class Printer:
    """
    A printer of records with a formatter for each program, which uses the program's templates.

    ``templates`` take precedence over those of the programs.
    """

    def __init__(self, format_name: str, templates: Templates | None = None) -> None:
        self._format_name = format_name
        self._templates = templates
        self._outlet = console_target.console()
        self._columns = columns_of(sys.stdout)
        self._formatters: dict[TraceProgram, tuple[RecordSource, Formatter]] = {}
        self._blamed: set[str] = set()
        self._strings: list[str] = []
        self._has_heading = False

    def print(self, found: Iterable[TraceRecord | LostRecords]) -> int:
        """Print records, and return their number. They are flushed at the end, also after an error."""
        count = 0
        try:
            for each in found:
                if isinstance(each, LostRecords):
                    self._flush()
                    warn_of_lost(each.program.name, each.count, " here")
                    continue
                self._strings.append(self._text(each))
                count += 1
                if len(self._strings) >= _TOGETHER:
                    self._write()
        finally:
            self._flush()
        return count

    def _text(self, record: TraceRecord) -> str:
        program = record.program
        chosen = self._formatter_of(program)
        chosen.wall_offset = record.wall_offset
        place = program.place(record.probe).in_module(program.source.module)
        try:
            text = chosen.encoded(record.record, place)
        except FormatError as error:
            raise FormatError(f"'{program.origin.file}' holds a damaged record: {error.message}") from None
        if self._has_heading:
            return text
        self._has_heading = True
        return f"{chosen.heading}\n{text}" if chosen.heading else text

    def _formatter_of(self, program: TraceProgram) -> Formatter:
        source, chosen = self._formatters.get(program, (None, None))
        if chosen is None or source is not program.source:
            source = self._with_templates(program.source)
            chosen = formatter(
                self._format_name,
                wall_offset=0,
                source=source,
                live=program.may_run,
                carried=program.names,
                host=program.origin.host,
                columns=self._columns,
                is_brief=True,  # trace files contain all items, for any reader
            )
            self._formatters[program] = program.source, chosen
        return chosen

    def _with_templates(self, source: RecordSource) -> RecordSource:
        if not source.templates and self._templates is None:
            return source
        from dprobes.formatters.templates.template_collection import templates_of

        carried = templates_of(source.templates)
        if self._format_name not in WITHOUT_TEMPLATES and source.name not in self._blamed:
            self._blamed.add(source.name)
            say_problems(carried, f"the program '{source.name}'")
        return source if self._templates is None else replace(source, templates=self._templates.over(carried))

    def _write(self) -> None:
        strings, self._strings = self._strings, []
        if strings:
            self._outlet.write(strings)

    def _flush(self) -> None:
        self._write()
        self._outlet.flush()


def warn_of_lost(name: str, count: int, where: str = "") -> None:
    """Print a warning that ``count`` records of the program ``name`` were lost. ``where`` follows in the message."""
    what = "1 record of '{}' was" if count == 1 else f"{count} records of '{{}}' were"
    console.warning(f"{what.format(name)} lost{where}")


def warn_of_all(lost: Counter[str]) -> None:
    """Print warnings about all lost records, by program."""
    for name, count in sorted(lost.items()):
        warn_of_lost(name, count)
