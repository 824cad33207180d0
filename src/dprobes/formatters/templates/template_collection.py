"""Templates of one directory, on disk or in a file, and templates of one program."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol, Self

from dprobes.diagnostics import Diagnostics, Note
from dprobes.errors import FormatError, reason_of
from dprobes.escapes import escaped
from dprobes.formatters.templates.data_extraction import compiled_of, fits
from dprobes.formatters.templates.template_directory import DIRECTORY_FILE, Entry, directory_text, parse_directory
from dprobes.formatters.templates.template_model import Placeholder
from dprobes.formatters.templates.template_parser import parse_file
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from pathlib import Path

    from dprobes.formatters.templates.template_model import Part, Template
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import RecordSource

__all__ = [
    "ProgramTemplates",
    "TemplateFinder",
    "Templates",
    "probe_names",
    "read_file",
    "source_of",
    "templates_in",
    "templates_of",
]

FILE_MAX = 1 << 20
"""Maximum size of a template file in bytes, to limit memory."""


class TemplateFinder(Protocol):
    """A collection of templates that can be searched by major and minor code."""

    def find(self, major: int, minor: int) -> Template | None:
        """Return the template of the records with these codes, or None if there is none."""


class Templates:
    """Templates of records, found by major and minor code."""

    def __init__(self) -> None:
        self.diagnostics = Diagnostics()
        self._by_major: dict[int, Mapping[int, Template]] = {}
        self._files: dict[int, tuple[str, bytes]] = {}

    def __bool__(self) -> bool:
        return any(self._by_major.values())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Return the templates in template files, which include the directory file; an empty mapping has none."""
        found = cls()
        if files:
            found._read_all("", files.get, None)
        return found

    @classmethod
    def from_directory(cls, directory: Path, majors: Container[int] | None = None) -> Self:
        """
        Return the templates of a directory on disk. If ``majors`` is given, only these codes count.

        Raise ``FormatError`` if there is no directory file, or a file cannot be read.
        """

        def read(name: str) -> bytes | None:
            path = directory / name
            return read_file(path) if name == DIRECTORY_FILE or path.exists() else None

        found = cls()
        found._read_all(f"{directory}/", read, majors)
        return found

    def find(self, major: int, minor: int) -> Template | None:
        """Return the template of the records with these codes, or None if there is none."""
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
        Return the files to save with a program whose records have certain major codes; None means any code.

        These are the files for the codes, and a directory file with only their entries.
        """
        files = self._files
        wanted = sorted(files) if majors is None else sorted(set(majors) & files.keys())
        if not wanted:
            return {}
        directory = directory_text((major, files[major][0]) for major in wanted)
        return {DIRECTORY_FILE: directory, **dict(files[major] for major in wanted)}

    def over(self, others: Templates) -> dict[str, bytes]:
        """Return the files of these templates, and the files of ``others`` for major codes without one here."""
        files: dict[str, bytes] = {}
        names: list[tuple[int, str]] = []
        for major, (name, data) in sorted({**others._files, **self._files}.items()):
            unique = name
            while unique in files or unique == DIRECTORY_FILE:
                unique = f"{major}-{unique}"
            files[unique] = data
            names.append((major, unique))
        return {DIRECTORY_FILE: directory_text(names), **files} if files else {}

    def _read_all(self, where: str, read: Callable[[str], bytes | None], majors: Container[int] | None) -> None:
        """Read the directory file and the files in it for ``majors``; ``where`` is a prefix of names in messages."""
        diagnostics = self.diagnostics
        data = read(DIRECTORY_FILE)
        if data is None:
            hint = f"'{DIRECTORY_FILE}' has a line 'major file' for each"
            diagnostics.error(None, f"there are templates, but no '{DIRECTORY_FILE}'", hint=hint)
            return
        source = source_of(f"{where}{DIRECTORY_FILE}", data, diagnostics)
        entries = parse_directory(source, diagnostics) if source is not None else {}
        users: dict[str, Entry] = {}
        for major, entry in entries.items():
            if majors is not None and major not in majors:
                continue
            if entry.file in users:
                note = Note("it is named here before", users[entry.file].span)
                diagnostics.error(entry.span, "a file has the templates of one major code", notes=(note,))
                continue
            users[entry.file] = entry
            data = read(entry.file)
            if data is None:
                diagnostics.error(entry.span, f"there is no file '{where}{entry.file}'")
                continue
            self._files[major] = entry.file, data
            if (source := source_of(f"{where}{entry.file}", data, diagnostics)) is not None:
                self._by_major[major] = parse_file(source, major, diagnostics).templates


def templates_of(files: Mapping[str, bytes]) -> Templates:
    """Return the templates in a directory's files, given by name and contents; recent results are cached."""
    return _kept_templates(tuple(files.items()))


@lru_cache(maxsize=16)
def _kept_templates(files: tuple[tuple[str, bytes], ...]) -> Templates:
    return Templates.from_files(dict(files))


def probe_names(source: RecordSource) -> dict[int, str]:
    """Return the names of the probes of a program that come from an instrumentation set, by their minor codes."""
    return {each.minor: escaped(each.probe) for each in templates_of(source.templates).all() if each.probe}


def templates_in(text: str, major: int) -> Mapping[int, Template]:
    """Return the templates of a file without a directory by their minor codes; those with errors are omitted."""
    diagnostics = Diagnostics()
    source = source_of("", text.encode("utf-8", "replace"), diagnostics)
    return parse_file(source, major, diagnostics).templates if source is not None else {}


def read_file(path: Path) -> bytes:
    """Return the bytes of a template file; raise ``FormatError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MAX + 1)
    except OSError as error:
        hint = None
        if path.name == DIRECTORY_FILE:
            hint = f"a directory of templates has a file '{DIRECTORY_FILE}' with lines 'major file'"
        raise FormatError(f"'{path}': {reason_of(error)}", hint=hint) from error
    return data


def source_of(name: str, data: bytes, diagnostics: Diagnostics) -> SourceFile | None:
    """Return the text of a file. If it is not UTF-8, or exceeds FILE_MAX, add an error and return None."""
    if len(data) > FILE_MAX:
        diagnostics.error(None, f"'{name}' has more than {FILE_MAX} bytes")
        return None
    data = data.removeprefix(BOM_UTF8)
    try:
        return SourceFile(name, data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        diagnostics.error(None, f"'{name}' is not UTF-8 text: byte {data[error.start]:#04x} in line {line}")
    return None


# The templates of one program: those that a user wrote, and for other records those derived from its handlers.


class ProgramTemplates:
    """
    Written and derived templates of a program.

    A derived template applies to a record only if it covers all of its data, because a handler that has ended early has
    logged less.
    """

    def __init__(
        self, written: Mapping[str, bytes] | None = None, derived: Mapping[int, str] | None = None, major: int = 0
    ) -> None:
        self._files = written or {}
        self._texts = derived or {}
        self._major = major

    @classmethod
    def of_source(cls, source: RecordSource | None) -> ProgramTemplates:
        """Return the templates of the program of a source; none without a source."""
        return cls() if source is None else cls(source.templates, source.derived, source.major)

    @cached_property
    def written(self) -> Templates:
        """The templates that a user wrote."""
        return templates_of(self._files)

    @cached_property
    def _derived(self) -> Mapping[int, Mapping[int, Template]]:
        """The derived templates, by word size and minor code."""
        return {size: templates_in(text, self._major) for size, text in self._texts.items()}

    def of(self, record: LogRecord) -> Template | None:
        """Return the template of a record by its codes, or None if there is none, and for a stack trace."""
        if record.is_stack_trace:
            return None
        major, minor = record.major or 0, record.minor or 0
        if (written := self.written.find(major, minor)) is not None:
            return written
        derived = self.derived(record.word_size, major, minor)
        if derived is None:
            return None
        compiled = compiled_of(derived, record.word_size, record.byte_order)
        if compiled is None or record.is_cut:
            return derived if fits(derived, record) else None
        return derived if len(record.data) == compiled.layout.size else None

    def derived(self, word_size: int, major: int, minor: int) -> Template | None:
        """Return the derived template of records with these codes, or None if there is none."""
        template = self._derived.get(word_size, {}).get(minor)
        return template if template is not None and template.major == major else None

    def find(self, major: int, minor: int) -> Template | None:
        """
        Return the template of all records with these codes: the written one, or the derived one.

        Return None if the derived templates of both word sizes differ. A record may be too short for the derived one.
        """
        if (written := self.written.find(major, minor)) is not None:
            return written
        derived = [found for size in (8, 4) if (found := self.derived(size, major, minor)) is not None]
        return derived[0] if derived and len({_parts_of(each) for each in derived}) == 1 else None

    def all(self) -> Iterator[Template]:
        """Iterate over all templates; the derived ones are mostly the same for both word sizes."""
        yield from self.written.all()
        seen = set()
        for templates in self._derived.values():
            for template in templates.values():
                key = template.minor, _parts_of(template)
                if self.written.find(template.major, template.minor) is None and key not in seen:
                    seen.add(key)
                    yield template


def _parts_of(template: Template) -> tuple[tuple[Part, ...], ...]:
    """Return the lines of a template without their source positions, for comparison."""
    return tuple(
        tuple(replace(part, span=None) if isinstance(part, Placeholder) else part for part in line)
        for line in template.lines
    )
