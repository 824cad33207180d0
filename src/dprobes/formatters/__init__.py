"""Formatters, which convert log records to text. Each is a function of the record and the place of its probepoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.record.record_origin import Place

if TYPE_CHECKING:
    from dprobes.formatters.address_names import AddressSymboliser
    from dprobes.formatters.line_formatter import TerminalColumns
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import RecordSource
    from dprobes.trace.carried_names import CarriedNames

__all__ = ["FORMATS", "LOG_FORMATS", "WITHOUT_TEMPLATES", "Formatter", "Place", "formatter"]

FORMATS = ("text", "dprobes", "dump", "hex", "json", "csv")
"""The valid names for ``--format``."""

LOG_FORMATS = (*FORMATS, "binary")
"""Formats of log targets: those of formatters, and ``binary``, the bytes of the records."""

WITHOUT_TEMPLATES = ("dump", "hex")
"""The formats that show data without templates."""


class Formatter(Protocol):
    """
    Function that converts a record to text without a final line end.

    ``wall_offset`` plus a record's time (CLOCK_MONOTONIC) is the time in nanoseconds since 1970; it may be changed. If
    ``heading`` is not empty, it must be printed once before all records; it has no line end.
    """

    wall_offset: int

    @property
    def heading(self) -> str:
        """The text to print before all records, or an empty string."""

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` in this format, without a final line end."""

    def encoded(self, record: bytes, place: Place) -> str:
        """Return an encoded record of the probepoint ``place`` in this format; raise ``FormatError`` if invalid."""


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

    ``live`` is True if the records are of processes of this machine that may still run, whose mappings then provide
    names of addresses. ``carried`` has the names in the records' trace file. ``host`` is the name of the records'
    machine, or empty. ``columns`` and ``is_brief`` are as in ``LineFormatter``.
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
