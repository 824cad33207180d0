"""
The paper's formatting library (seed 000, section 6): initialise, format one record, terminate.

It is for programs that receive records one by one and format them with templates from disk. ``initialise`` reads the
directory file. A file of templates is read for its first record, and stays in memory until ``terminate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.errors import FormatError
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.paper_text import TextFormatter
from dprobes.formatters.templates.template_collection import read_file, source_of
from dprobes.formatters.templates.template_directory import DIRECTORY_FILE, Entry, parse_directory
from dprobes.formatters.templates.template_parser import parse_file
from dprobes.record.record_origin import Place
from dprobes.record.record_origin import wall_offset as current_wall_offset

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from dprobes.formatters.templates.template_model import Template

__all__ = ["TemplateLibrary"]

_NOWHERE = Place("", "")


class TemplateLibrary:
    """
    Formatter of binary records with the templates of a directory.

    ``wall_offset``, in nanoseconds, is added to the time of records to get nanoseconds since 1970. The default is the
    offset of this machine and boot. With ``live``, the records are of processes that may still run, whose mappings
    provide names of addresses.
    """

    def __init__(self, *, wall_offset: int | None = None, live: bool = False) -> None:
        self._wall_offset = wall_offset
        self._live = live
        self._templates: _CachedTemplates | None = None
        self._formatter: TextFormatter | None = None

    @property
    def diagnostics(self) -> Diagnostics:
        """The diagnostics about the files that were read since ``initialise``."""
        return self._templates.diagnostics if self._templates is not None else Diagnostics()

    def initialise(self, directory: str | os.PathLike[str]) -> None:
        """
        Read the template directory file of a directory; templates that were read before are read again.

        Raise ``FormatError`` if it cannot be read, and ``SourceError`` if it has errors.
        """
        templates = _CachedTemplates(Path(directory))
        templates.diagnostics.raise_if_errors()
        offset = self._wall_offset if self._wall_offset is not None else current_wall_offset()
        self._templates = templates
        self._formatter = TextFormatter(offset, templates, AddressSymboliser(None, live=self._live))

    def format(self, record: bytes) -> str:
        """
        Return the text of one record: the header line, and its data by their template, else in hexadecimal.

        Raise ``FormatError`` if the record is invalid. A template with errors is ignored, and reported in
        ``diagnostics``.
        """
        if self._formatter is None:
            raise FormatError("the template library is not initialised", hint="call 'initialise(directory)' before")
        return self._formatter.encoded(record, _NOWHERE)

    def terminate(self) -> None:
        """Free all templates; a later ``initialise`` reads the files again."""
        self._templates = self._formatter = None


class _CachedTemplates:
    def __init__(self, directory: Path) -> None:
        self.diagnostics = Diagnostics()
        self._directory = directory
        self._where = f"{directory}/"
        self._cache: dict[int, Mapping[int, Template]] = {}
        data = read_file(directory / DIRECTORY_FILE)
        source = source_of(f"{self._where}{DIRECTORY_FILE}", data, self.diagnostics)
        self._entries: dict[int, Entry] = parse_directory(source, self.diagnostics) if source is not None else {}

    def find(self, major: int, minor: int) -> Template | None:
        if major not in self._entries:
            return None
        if major not in self._cache:
            self._cache[major] = self._read(major, self._entries[major])
        return self._cache[major].get(minor)

    def _read(self, major: int, entry: Entry) -> Mapping[int, Template]:
        try:
            data = read_file(self._directory / entry.file)
        except FormatError as error:
            self.diagnostics.error(entry.span, error.message)
            return {}
        source = source_of(f"{self._where}{entry.file}", data, self.diagnostics)
        return parse_file(source, major, self.diagnostics).templates if source is not None else {}
