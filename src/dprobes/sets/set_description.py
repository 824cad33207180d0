"""
The description of an instrumentation set: ``set.toml``, read and checked.

Every error has the place in the file. ``tomllib`` reports the place of a syntax error only, so the lines of tables and
keys are found by ``_Places``. A description that is returned has no errors: its names, codes and files are valid. It is
not compared with the set's programs here; ``set_program.broken_promises`` does that.
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.diagnostics import Diagnostics, did_you_mean, either
from dprobes.sets import SET_FILE, is_set_name, is_view_name
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "ENGINES",
    "FIELD_KINDS",
    "GROUPS",
    "NEEDS",
    "TYPES",
    "InstrumentationSet",
    "SetField",
    "SetProbe",
    "SetTest",
    "SetView",
    "parse_set",
]

GROUPS = {
    "requests": "requests and operations, with their arguments",
    "errors": "failures, with their reasons",
    "latency": "durations of operations and of waits",
    "memory": "allocations, releases and uses of memory",
    "locks": "waits for locks, with the owners of the locks",
    "io": "files, and data that are read or written",
    "lifecycle": "beginnings and ends of processes, threads, connections and other objects",
}
"""The groups of probes, the same in all sets, with their meaning."""

TYPES = {
    "begin": "something begins: the entry of a function, the start of a request",
    "end": "something ends: the return of a function, the end of a request",
    "event": "something happens at a moment",
}
"""The types of probes, with their meaning."""

FIELD_KINDS = {
    "int": "a number",
    "time": "a number of nanoseconds",
    "string": "text",
    "address": "an address, which outputs can name",
    "bytes": "bytes of memory",
}
"""The kinds of fields, with their meaning."""

ENGINES = ("inline", "ebpf", "ptrace")
NEEDS = {
    "root": "root",
    "symbols": "the symbols of the module",
    "usdt": "USDT probes in the module",
    "btf": "the kernel's types (BTF)",
    "debuginfo": "debug information of the module",
}
"""The requirements of sets, with their meaning."""

MAJOR_MAX = 16383
_MINOR_MAX = 0xFFFF
_VIEWS_MAX = 15
"""Maximum number of views of a set: a registered set has 16 major codes, of which its probes use the first."""

_PROBE_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){2}")
_FIELD = re.compile(r"(?P<name>[A-Za-z_]\w*):(?P<kind>\w+)", re.ASCII)
_MACRO = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][\w.-]*\.dpc", re.ASCII)


class SetField(NamedTuple):
    """A field of a probe's records; ``kind`` is a word of ``FIELD_KINDS``."""

    name: str
    kind: str


class SetProbe(NamedTuple):
    """
    A probe of a set: its promised name, codes and fields.

    ``file`` is the name of the program with its handler. ``engines`` can run it. ``summary`` is a line for readers.
    """

    name: str
    summary: str
    file: str
    minor: int
    group: str
    type: str
    engines: tuple[str, ...]
    fields: tuple[SetField, ...]
    span: Span


class SetTest(NamedTuple):
    """A shell command, the numbers of records that its run leaves by probe, and the programs that it uses."""

    run: str
    expect: Mapping[str, int]
    programs: tuple[str, ...]


class SetView(NamedTuple):
    """
    A view of a set: its name, the question that it answers, and a program or a query.

    ``file`` is the name of a program in DProbes C, and ``major`` the major code of its records. ``sql`` is a query on a
    trace file with the records of the set, whose tables have the names of probes. One of both is empty.
    """

    name: str
    question: str
    file: str
    sql: str
    major: int
    span: Span


class InstrumentationSet(NamedTuple):
    """
    A set as ``set.toml`` describes it.

    ``modules`` and ``places`` map names of macros to alternatives, of which the first that fits a machine is used.
    """

    name: str
    major: int
    version: int
    summary: str
    needs: tuple[str, ...]
    modules: Mapping[str, tuple[str, ...]]
    places: Mapping[str, tuple[str, ...]]
    probes: tuple[SetProbe, ...]
    tests: tuple[SetTest, ...]
    views: tuple[SetView, ...]
    directory: Path
    major_span: Span

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of its probes, in the order of ``GROUPS``."""
        used = {probe.group for probe in self.probes}
        return tuple(group for group in GROUPS if group in used)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files of its probes, in the order of ``set.toml``."""
        return tuple(dict.fromkeys(probe.file for probe in self.probes))


def parse_set(directory: Path, text: str) -> InstrumentationSet:
    """Return the set in a directory, whose ``set.toml`` is ``text``; raise ``SourceError`` with all of its errors."""
    source = SourceFile(str(directory / SET_FILE), text)
    diagnostics = Diagnostics()
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        diagnostics.error(_syntax_span(source, str(error)), _without_place(str(error)), hint="the format is TOML 1.0")
        diagnostics.raise_if_errors()
        raise AssertionError from error
    found = _Reader(source, content, diagnostics).read(directory)
    diagnostics.raise_if_errors()
    return found


_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def _syntax_span(source: SourceFile, message: str) -> Span:
    """Return the place that a message of ``tomllib`` names, or the end of the file."""
    match = _PLACE.search(message)
    if match is None or match[1] is None:
        return Span(source, len(source.text), len(source.text))
    start = min(source.line_start(int(match[1])) + int(match[2]) - 1, len(source.text))
    return Span(source, start, min(start + 1, len(source.text)))


def _without_place(message: str) -> str:
    message = _PLACE.sub("", message)
    return message[:1].lower() + message[1:]


_HEADER = re.compile(r"\s*\[\[?\s*([\w.-]+)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w-]+)\s*=\s*")


class _Places:
    """The places of tables and keys of a file in TOML."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._tables: dict[tuple[str, int], Span] = {}
        self._keys: dict[tuple[str, int, str], Span] = {}
        counts: dict[str, int] = {}
        table, number, start = "", 0, 0
        for line in source.text.splitlines(keepends=True):
            stripped = line.rstrip()
            if (header := _HEADER.fullmatch(stripped)) is not None:
                table = header[1]
                number = counts.get(table, 0)
                counts[table] = number + 1
                self._tables[table, number] = Span(source, start, start + len(stripped))
            elif (key := _KEY.match(stripped)) is not None:
                self._keys.setdefault(
                    (table, number, key[1]), Span(source, start + key.start(1), start + len(stripped))
                )
            start += len(line)

    def of_table(self, table: str, number: int = 0) -> Span:
        """Return the place of the header of a table, the ``number``-th of its name; the start of the file if absent."""
        return self._tables.get((table, number)) or Span(self._source, 0, 0)

    def of_key(self, table: str, number: int, key: str) -> Span:
        """Return the place of a key of a table, or that of the table if it is elsewhere."""
        return self._keys.get((table, number, key)) or self.of_table(table, number)


class _Table(NamedTuple):
    """A table of the file: the ``number``-th of its name, with its values."""

    name: str
    number: int
    values: Mapping[str, Any]


_TOP = {"set": dict, "modules": dict, "places": dict, "probe": list, "view": list, "test": list}
_LISTS = tuple(name for name, kind in _TOP.items() if kind is list)
_SET_KEYS = ("name", "major", "version", "summary", "needs")
_PROBE_KEYS = ("name", "summary", "file", "minor", "group", "type", "engines", "fields")
_VIEW_KEYS = ("name", "question", "file", "sql")
_TEST_KEYS = ("run", "expect", "programs")


class _Reader:
    """The checks of a description, which add errors to ``diagnostics`` and continue."""

    def __init__(self, source: SourceFile, content: Mapping[str, Any], diagnostics: Diagnostics) -> None:
        self._source = source
        self._content = content
        self._diagnostics = diagnostics
        self._places = _Places(source)

    def read(self, directory: Path) -> InstrumentationSet:
        """Return the set; it is valid if no error was added."""
        for key, value in self._content.items():
            kind = _TOP.get(key)
            if kind is None:
                span = self._places.of_key("", 0, key) if not isinstance(value, dict | list) else self._place_of(key)
                self._unknown(span, "table", key, _TOP)
            elif not isinstance(value, kind) or (kind is list and not all(isinstance(each, dict) for each in value)):
                form = f"[[{key}]]" if kind is list else f"[{key}]"
                self._diagnostics.error(self._place_of(key), f"expected a table '{form}'", hint=f"write it as {form}")
        head = self._table("set")
        self._check_keys(head, _SET_KEYS)
        name = self._text(head, "name")
        if name and not is_set_name(name):
            self._wrong(head, "name", f"expected a name such as 'sqlite' or 'net.tcp', found '{name}'")
        if name and name != directory.name:
            self._wrong(
                head, "name", f"the set '{name}' is in a directory '{directory.name}'", "give both the same name"
            )
        probes = [self._probe(each, name) for each in self._tables("probe")]
        if not probes and not self._diagnostics.has_errors:
            self._diagnostics.error(None, f"'{self._source.name}' has no probe", hint="write one as [[probe]]")
        self._check_unique(probes)
        major = self._number(head, "major", 0, MAJOR_MAX)
        return InstrumentationSet(
            name,
            major,
            self._number(head, "version", 1, 1 << 16),
            self._text(head, "summary"),
            self._words(head, "needs", NEEDS, optional=True),
            self._macros("modules"),
            self._macros("places"),
            tuple(probes),
            tuple(self._test(each, {probe.name for probe in probes}) for each in self._tables("test")),
            self._views(major),
            directory,
            self._places.of_key("set", 0, "major"),
        )

    def _probe(self, table: _Table, set_name: str) -> SetProbe:
        self._check_keys(table, _PROBE_KEYS)
        name = self._text(table, "name")
        if name and (_PROBE_NAME.fullmatch(name) is None or not name.startswith(f"{set_name}.")):
            parts = "object.event" if "." not in set_name else "event"
            self._wrong(table, "name", f"expected a name such as '{set_name}.{parts}', found '{name}'")
        file = self._text(table, "file")
        if file and _FILE.fullmatch(file) is None:
            self._wrong(table, "file", f"expected a file of the set in DProbes C, such as 'main.dpc', found '{file}'")
        return SetProbe(
            name,
            self._text(table, "summary"),
            file,
            self._number(table, "minor", 1, _MINOR_MAX),
            self._word(table, "group", GROUPS),
            self._word(table, "type", TYPES),
            self._words(table, "engines", ENGINES),
            tuple(self._field(table, each) for each in self._list(table, "fields")),
            self._places.of_table(table.name, table.number),
        )

    def _field(self, table: _Table, text: str) -> SetField:
        match = _FIELD.fullmatch(text)
        if match is None:
            self._wrong(table, "fields", f"expected a field as 'name:kind', found '{text}'", _kinds())
            return SetField(text, "int")
        if match["kind"] not in FIELD_KINDS:
            self._wrong(table, "fields", f"unknown kind '{match['kind']}' of the field '{match['name']}'", _kinds())
        return SetField(match["name"], match["kind"])

    def _test(self, table: _Table, probes: Iterable[str]) -> SetTest:
        self._check_keys(table, _TEST_KEYS)
        expect = table.values.get("expect")
        if not isinstance(expect, dict) or not expect:
            self._wrong(table, "expect", "expected numbers of records by probe", 'write expect = { "NAME" = 3 }')
            expect = {}
        known = set(probes)
        for name, count in expect.items():
            if name not in known:
                self._wrong(table, "expect", f"the set has no probe '{name}'", did_you_mean(name, known))
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                self._wrong(table, "expect", f"expected a number of records for '{name}', found {_shown(count)}")
        programs = tuple(self._list(table, "programs", optional=True))
        return SetTest(self._text(table, "run"), expect, programs)

    def _views(self, major: int) -> tuple[SetView, ...]:
        """Return the views; the records of each have one of the major codes after that of the set."""
        tables = self._tables("view")
        views = [self._view(table, major + number) for number, table in enumerate(tables, 1)]
        for number, view in enumerate(views):
            if view.name and any(view.name == other.name for other in views[:number]):
                message = f"there are two views '{view.name}'"
                self._diagnostics.error(self._places.of_key("view", number, "name"), message, hint="rename one of them")
        if len(views) > _VIEWS_MAX:
            span = self._places.of_table("view", _VIEWS_MAX)
            self._diagnostics.error(span, f"a set has at most {_VIEWS_MAX} views, found {len(views)}")
        return tuple(views)

    def _view(self, table: _Table, major: int) -> SetView:
        self._check_keys(table, _VIEW_KEYS)
        name = self._text(table, "name")
        if name and not is_view_name(name):
            self._wrong(table, "name", f"expected a name such as 'queries' or 'off-cpu', found '{name}'")
        if ("file" in table.values) == ("sql" in table.values):
            has = "both 'file' and" if "sql" in table.values else "neither 'file' nor"
            message = f"the view '{name}' has {has} 'sql'"
            hint = "file is a program of the set in DProbes C, sql a query on the records of its probes"
            self._diagnostics.error(self._places.of_table(table.name, table.number), message, hint=hint)
            return SetView(name, "", "", "", major, self._places.of_table(table.name, table.number))
        file = self._text(table, "file") if "file" in table.values else ""
        if file and _FILE.fullmatch(file) is None:
            self._wrong(table, "file", f"expected a file of the set in DProbes C, such as 'view.dpc', found '{file}'")
        sql = str(self._value(table, "sql", str, "a string") or "") if "sql" in table.values else ""
        span = self._places.of_table(table.name, table.number)
        return SetView(name, self._text(table, "question"), file, sql, major, span)

    def _macros(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return the macros of ``[modules]`` or ``[places]``, with their alternatives."""
        table = self._table(name)
        found = {}
        for macro in table.values:
            if _MACRO.fullmatch(macro) is None:
                self._wrong(table, macro, f"expected the name of a macro in capitals, found '{macro}'")
            found[macro] = tuple(self._list(table, macro))
            if not found[macro]:
                self._wrong(table, macro, f"'{macro}' has no alternative", "name at least one")
        return found

    def _check_unique(self, probes: Sequence[SetProbe]) -> None:
        for number, probe in enumerate(probes):
            for other in probes[:number]:
                if probe.name and probe.name == other.name:
                    span = self._places.of_key("probe", number, "name")
                    self._diagnostics.error(span, f"there are two probes '{probe.name}'", hint="rename one of them")
                if probe.minor == other.minor and probe.minor:
                    span = self._places.of_key("probe", number, "minor")
                    message = f"'{probe.name}' has the minor code {probe.minor} of '{other.name}'"
                    self._diagnostics.error(span, message, hint="give each probe a code of its own")

    # Values of tables

    def _place_of(self, table: str) -> Span:
        return self._places.of_table(table)

    def _table(self, name: str) -> _Table:
        values = self._content.get(name, {})
        return _Table(name, 0, values if isinstance(values, dict) else {})

    def _tables(self, name: str) -> list[_Table]:
        values = self._content.get(name, [])
        found = values if isinstance(values, list) else []
        return [_Table(name, number, each) for number, each in enumerate(found) if isinstance(each, dict)]

    def _check_keys(self, table: _Table, known: Sequence[str]) -> None:
        for key in table.values:
            if key not in known:
                self._unknown(self._places.of_key(table.name, table.number, key), "key", key, known)

    def _unknown(self, span: Span, what: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        self._diagnostics.error(
            span, f"unknown {what} '{name}'", hint=did_you_mean(name, names) or f"there are: {', '.join(names)}"
        )

    def _wrong(self, table: _Table, key: str, message: str, hint: str | None = None) -> None:
        self._diagnostics.error(self._places.of_key(table.name, table.number, key), message, hint=hint)

    def _value(self, table: _Table, key: str, kind: type, expected: str, *, optional: bool = False) -> Any:
        """Return a value of a type; None with an error if it is another one, or missing and not ``optional``."""
        if key not in table.values:
            if not optional:
                header = f"[[{table.name}]]" if table.name in _LISTS else f"[{table.name}]"
                span = self._places.of_table(table.name, table.number)
                self._diagnostics.error(span, f"'{header}' has no '{key}'", hint=f"add {key} = {expected}")
            return None
        value = table.values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            self._wrong(table, key, f"expected {expected} as '{key}', found {_shown(value)}")
            return None
        return value

    def _text(self, table: _Table, key: str) -> str:
        text = self._value(table, key, str, "a string")
        if text is not None and (not text or not text.isprintable()):
            self._wrong(table, key, f"expected a line of text as '{key}'")
        return text or ""

    def _number(self, table: _Table, key: str, least: int, most: int) -> int:
        number: int | None = self._value(table, key, int, "a number")
        if number is not None and not least <= number <= most:
            self._wrong(table, key, f"expected a number from {least} to {most} as '{key}', found {number}")
        return number or 0

    def _list(self, table: _Table, key: str, *, optional: bool = False) -> list[str]:
        """Return a list of lines of text."""
        values = self._value(table, key, list, "a list of strings", optional=optional) or []
        for value in values:
            if not isinstance(value, str) or not value or not value.isprintable():
                self._wrong(table, key, f"expected a list of strings as '{key}', found {_shown(value)} in it")
        return [value for value in values if isinstance(value, str)]

    def _word(self, table: _Table, key: str, known: Iterable[str]) -> str:
        word = self._text(table, key)
        names = list(known)
        if word and word not in names:
            self._wrong(table, key, f"unknown {key} '{word}'", f"expected {either(names)}")
        return word

    def _words(self, table: _Table, key: str, known: Iterable[str], *, optional: bool = False) -> tuple[str, ...]:
        words = self._list(table, key, optional=optional)
        names = list(known)
        for word in words:
            if word not in names:
                self._wrong(table, key, f"unknown word '{word}' in '{key}'", f"expected {either(names)}")
        if not words and not optional and key in table.values:
            self._wrong(table, key, f"'{key}' is empty", f"expected {either(names)}")
        return tuple(words)


def _kinds() -> str:
    return f"kinds are: {', '.join(FIELD_KINDS)}"


def _shown(value: object) -> str:
    """Return a value of TOML for a message."""
    match value:
        case str():
            return f"'{value}'"
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return str(value)
