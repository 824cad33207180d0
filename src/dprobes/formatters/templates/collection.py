"""The templates of one directory, be it on disk or carried by a file."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, Self

from dprobes.diagnostics import Diagnostics, Note
from dprobes.errors import FormatError, reason_of
from dprobes.formatters.templates.directory import DIRECTORY_FILE, Entry, directory_text, parse_directory
from dprobes.formatters.templates.parser import parse_file
from dprobes.source import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dprobes.formatters.templates.model import Template

__all__ = ["FILE_MAX", "TemplateFinder", "Templates", "read_file", "source_of", "templates_of"]

FILE_MAX = 1 << 20
"""Bytes of the longest file: a longer one would only fill memory."""


class TemplateFinder(Protocol):
    """Know templates."""

    def find(self, major: int, minor: int) -> Template | None:
        """Return the template of the records with these codes."""


class Templates:
    """
    Hold templates by major and minor code.

    Wrong templates are left out, and ``diagnostics`` says what is wrong with them. ``files`` is what they were made of:
    the directory file, and the files that it names.
    """

    def __init__(self) -> None:
        self.diagnostics = Diagnostics()
        self.files: dict[str, bytes] = {}
        self._by_major: dict[int, Mapping[int, Template]] = {}
        self._file_names: dict[int, str] = {}

    def __bool__(self) -> bool:
        return any(self._by_major.values())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str = "") -> Self:
        """
        Return the templates of files, the directory file among them; nothing is no templates.

        ``where`` stands before the names of files in messages.
        """
        found = cls()
        found._read(files, where)
        return found

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Return the templates of a directory on disk; raise ``FormatError`` if it has no directory file."""
        files = {DIRECTORY_FILE: read_file(directory / DIRECTORY_FILE)}
        where = f"{directory}/"
        source = source_of(where, DIRECTORY_FILE, files, Diagnostics())
        entries = parse_directory(source, Diagnostics()) if source is not None else {}
        for entry in entries.values():
            path = directory / entry.file
            if entry.file not in files and path.exists():
                files[entry.file] = read_file(path)
        return cls.from_files(files, where)

    def find(self, major: int, minor: int) -> Template | None:
        """Return the template of the records with these codes."""
        templates = self._by_major.get(major)
        return templates.get(minor) if templates is not None else None

    def all(self) -> tuple[Template, ...]:
        """Return all templates, by major and minor code."""
        return tuple(
            template
            for _, templates in sorted(self._by_major.items())
            for _, template in sorted(templates.items())
        )  # fmt: skip

    def carried(self, majors: Iterable[int] | None) -> dict[str, bytes]:
        """
        Return what is to travel with a program whose records have certain major codes (None: any).

        That is the files of these, and a directory file that names them and no others.
        """
        names = self._file_names
        wanted = sorted(names) if majors is None else sorted(set(majors) & names.keys())
        if not wanted:
            return {}
        files = {names[major]: self.files[names[major]] for major in wanted}
        return {DIRECTORY_FILE: directory_text((major, names[major]) for major in wanted), **files}

    def _read(self, files: Mapping[str, bytes], where: str) -> None:
        diagnostics = self.diagnostics
        if not files:
            return
        self.files = dict(files)
        if DIRECTORY_FILE not in files:
            hint = f"'{DIRECTORY_FILE}' has a line 'major file' for each"
            diagnostics.error(None, f"there are templates, but no '{DIRECTORY_FILE}'", hint=hint)
            return
        source = source_of(where, DIRECTORY_FILE, files, diagnostics)
        if source is None:
            return
        entries = parse_directory(source, diagnostics)
        users: dict[str, Entry] = {}
        for major, entry in entries.items():
            if entry.file not in files:
                diagnostics.error(entry.span, f"there is no file '{where}{entry.file}'")
            elif entry.file in users:
                note = Note("it is named here before", users[entry.file].span)
                diagnostics.error(entry.span, "a file has the templates of one major code", notes=(note,))
            else:
                users[entry.file] = entry
                self._file_names[major] = entry.file
                if (source := source_of(where, entry.file, files, diagnostics)) is not None:
                    self._by_major[major] = parse_file(source, major, diagnostics).templates


def templates_of(files: Mapping[str, bytes]) -> Templates:
    """Return the templates of files; those of the files that were asked for last are kept."""
    return _kept_templates(tuple(files.items()))


@lru_cache(maxsize=16)
def _kept_templates(files: tuple[tuple[str, bytes], ...]) -> Templates:
    return Templates.from_files(dict(files))


def read_file(path: Path) -> bytes:
    """Return the bytes of a template file; raise ``FormatError`` if that is not possible."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MAX + 1)
    except OSError as error:
        hint = None
        if path.name == DIRECTORY_FILE:
            hint = f"a directory of templates has a file '{DIRECTORY_FILE}' with lines 'major file'"
        raise FormatError(f"'{path}': {reason_of(error)}", hint=hint) from error
    return data


def source_of(where: str, name: str, files: Mapping[str, bytes], diagnostics: Diagnostics) -> SourceFile | None:
    """Return the text of a file; None if its bytes are no text, and ``diagnostics`` says why."""
    shown, data = f"{where}{name}", files[name]
    if len(data) > FILE_MAX:
        diagnostics.error(None, f"'{shown}' has more than {FILE_MAX} bytes")
        return None
    try:
        return SourceFile(shown, data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        diagnostics.error(None, f"'{shown}' is no UTF-8 text: byte {data[error.start]:#04x} in line {line}")
    return None
