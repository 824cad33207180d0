"""Formatters: from a log record to text. Each is a function of the record and what is known of its probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.record.record_origin import Place

if TYPE_CHECKING:
    from dprobes.formatters.address_names import AddressSymboliser
    from dprobes.formatters.line_formatter import TerminalColumns
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import RecordSource
    from dprobes.trace.carried_names import CarriedNames

__all__ = ["FORMATS", "WITHOUT_TEMPLATES", "Formatter", "Place", "formatter"]

FORMATS = ("text", "dprobes", "dump", "hex", "json", "csv")
"""The names that ``--format`` takes."""

WITHOUT_TEMPLATES = ("dump", "hex")
"""Those that show data as it is."""


class Formatter(Protocol):
    """
    Turn one record into text without a final line end.

    ``wall_offset`` is added to a record's time, CLOCK_MONOTONIC, to get nanoseconds since 1970; it may be set.
    ``heading`` is to stand once before all records of an output if it is not empty, without its line end.
    """

    wall_offset: int

    @property
    def heading(self) -> str:
        """What stands before all records, or nothing."""

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the same for an encoded record; raises ``FormatError`` if it is none."""


def formatter(
    name: str,
    *,
    wall_offset: int,
    source: RecordSource | None = None,
    live: bool = False,
    carried: CarriedNames | None = None,
    host: str = "",
    columns: TerminalColumns | None = None,
    is_brief: bool = False,
) -> Formatter:
    """
    Return the formatter called ``name``, one of ``FORMATS``, for records of one program.

    ``live`` says that the records are of processes of this machine that may still run: they are asked for the names of
    addresses. ``carried`` are the names that the records' trace file has. ``host`` is the name of the machine that they
    are of, if it is known. ``columns`` and ``is_brief`` are those of ``LineFormatter``.
    """
    match name:
        case "text":
            from dprobes.formatters.line_formatter import LineFormatter

            return LineFormatter(wall_offset, source, live=live, carried=carried, columns=columns, is_brief=is_brief)
        case "dump":
            from dprobes.formatters.paper_text import DumpFormatter

            return DumpFormatter(wall_offset)
        case "hex":
            from dprobes.formatters.paper_text import HexFormatter

            return HexFormatter(wall_offset)
        case "dprobes" if source is None or not source.templates:
            from dprobes.formatters.paper_text import HexFormatter

            return HexFormatter(wall_offset)
        case "dprobes" | "json" | "csv":
            from dprobes.formatters.address_names import AddressSymboliser

            symboliser = AddressSymboliser(source, live=live, carried=carried)
            return _with_templates(name, wall_offset, source, symboliser, host=host)
    raise KeyError(name)


def _with_templates(
    name: str, wall_offset: int, source: RecordSource | None, symboliser: AddressSymboliser, *, host: str
) -> Formatter:
    from dprobes.formatters.templates.template_collection import ProgramTemplates

    templates = ProgramTemplates.of_source(source)
    program = source.name if source is not None else ""
    if name == "json":
        from dprobes.formatters.json_formatter import JsonFormatter

        return JsonFormatter(wall_offset, templates, symboliser, program, host)
    if name == "csv":
        from dprobes.formatters.json_formatter import CsvFormatter

        return CsvFormatter(wall_offset, templates, symboliser, program, host)
    from dprobes.formatters.paper_text import TextFormatter

    return TextFormatter(wall_offset, templates.written, symboliser)
