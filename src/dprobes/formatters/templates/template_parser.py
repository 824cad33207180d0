r"""
Parser of template files.

::

    major = 1                        the file's major code; comes first
    minor = 1                        begins a template, which ends where the next one begins
    desc  = "kill_proc entry"        printed first, unchanged
    fmt   = "pid=%d sig=%d"          a line; adjacent strings are joined, as in C

A statement ends with its line. Case does not matter in the words on the left. Comments are those of C.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.diagnostics import Note, did_you_mean
from dprobes.formatters.templates.template_directory import MAJOR_MAX, TokenKind, WordToken, statements
from dprobes.formatters.templates.template_lines import Character, parse_parts
from dprobes.formatters.templates.template_model import (
    Conversion,
    HeaderValue,
    Part,
    Placeholder,
    Template,
)
from dprobes.rpn.rpn_expressions import ExpressionError, parse_number
from dprobes.source_text import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.template_directory import Statement
    from dprobes.source_text import SourceFile

__all__ = ["parse_file"]

LINES_MAX = 1000
"""Maximum number of lines of a template."""

PARTS_MAX = 1000
"""Maximum number of parts in all lines of a template."""

COLUMNS_MAX = 80_000
"""Maximum total width of a template's placeholders."""

_KEYWORDS = ("major", "minor", "desc", "fmt", "probe")

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]+)|([0-7]{1,3})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"} | {c: c for c in "\\\"'?"}
_BYTE_MAX = 0xFF


class TemplateFile:
    """The templates of one file by their minor codes; ``major`` is None if the file does not specify it."""

    def __init__(self) -> None:
        self.major: int | None = None
        self.templates: dict[int, Template] = {}


def parse_file(source: SourceFile, major: int | None, diagnostics: Diagnostics) -> TemplateFile:
    """
    Return the templates of a file that the directory lists for ``major`` (None: without a directory).

    Errors go to ``diagnostics``. Templates with errors are omitted, and so are all of a file for another major code.
    """
    return _Parser(source, major, diagnostics).parse()


class _Draft:
    """A template whose ``fmt`` lines are being parsed."""

    def __init__(self, minor: int | None, span: Span) -> None:
        self.minor = minor
        self.span = span
        self.desc: str | None = None
        self.probe: str | None = None
        self.lines: list[tuple[Part, ...]] = []
        self.parts = 0
        self.columns = 0


def _columns(part: Part) -> int:
    """Return the minimum width of a part, independent of its value."""
    match part:
        case Placeholder(conversion=Conversion.STRING, width=width) | HeaderValue(width=width):
            return width.columns
        case Placeholder(width=width, precision=precision):
            return max(width.columns, precision or 0)
    return 0


class _Parser:
    def __init__(self, source: SourceFile, major: int | None, diagnostics: Diagnostics) -> None:
        self._expected = major
        self._diagnostics = diagnostics
        self._errors_at_start = self._errors_before = diagnostics.error_count
        self._source = source
        self._file = TemplateFile()
        self._draft: _Draft | None = None
        self._major_span: Span | None = None
        self._major_is_other = False

    def parse(self) -> TemplateFile:
        last: Statement = []
        for statement in statements(self._source, self._diagnostics):
            # A string at the beginning of a line continues the previous one.
            if statement[0].kind is TokenKind.STRING and last:
                last += statement
                continue
            if last:
                self._statement(last)
            last = statement
        if last:
            self._statement(last)
        self._end_template()
        if self._major_span is None and not self._has_errors:
            hint = f"major = {self._expected}" if self._expected is not None else "major = 1"
            self._error(Span(self._source, 0, 0), "the file does not say its major code", hint)
        if self._major_is_other:
            self._file.templates.clear()
        return self._file

    @property
    def _has_errors(self) -> bool:
        return self._diagnostics.error_count > self._errors_at_start

    def _place(self, start: int, end: int) -> Span:
        return Span(self._source, start, end)

    def _span(self, first: WordToken, last: WordToken | None = None) -> Span:
        return Span(self._source, first.start, (last or first).end)

    def _error(self, span: Span | None, message: str, hint: str | None = None) -> None:
        self._diagnostics.error(span, message, hint=hint)

    def _statement(self, statement: Statement) -> None:
        first, *rest = statement
        keyword = first.word
        if keyword not in _KEYWORDS or first.kind is not TokenKind.NAME:
            hint = did_you_mean(keyword, _KEYWORDS) or f"keywords are {', '.join(_KEYWORDS)}"
            return self._error(self._span(first), f"unknown keyword '{first.text}'", hint)
        if not rest or not rest[0].is_punctuation("="):
            return self._error(self._span(first), f"expected '=' after '{first.text}'")
        values = rest[1:]
        if not values:
            return self._error(self._span(first, rest[0]), f"expected a value after '{first.text} ='")
        match keyword:
            case "major":
                return self._major(first, values)
            case "minor":
                self._end_template()
                return self._minor(first, values)
        return self._text(first, values)

    def _major(self, keyword: WordToken, values: Sequence[WordToken]) -> None:
        span = self._span(keyword, values[-1])
        if self._major_span is not None:
            note = Note("the first one is here", self._major_span)
            self._diagnostics.error(span, "a file has the templates of one major code", notes=(note,))
            return
        self._major_span = span
        if self._draft is not None:
            self._error(span, "'major =' comes before the first 'minor ='")
        value = self._code("major", values)
        if value is None:
            return
        self._file.major = value
        if self._expected is not None and value != self._expected:
            message = f"the file is for major {value}, but the directory names it for {self._expected}"
            self._error(self._span(values[0]), message)
            self._major_is_other = True

    def _minor(self, keyword: WordToken, values: Sequence[WordToken]) -> None:
        value = self._code("minor", values)
        self._draft = _Draft(value, self._span(keyword, values[-1]))

    def _code(self, what: str, values: Sequence[WordToken]) -> int | None:
        if len(values) > 1:
            self._error(self._span(values[1]), f"expected the end of the line after the {what} code")
            return None
        token = values[0]
        span = self._span(token)
        if token.kind is not TokenKind.NUMBER:
            self._error(span, f"expected a {what} code, found '{token.text}'")
            return None
        try:
            value = parse_number(token)
        except ExpressionError as error:
            self._error(span, error.message, error.hint)
            return None
        if value > MAJOR_MAX:
            self._error(span, f"expected a {what} code from 0 to {MAJOR_MAX}, found {token.text}")
            return None
        return value

    def _text(self, keyword: WordToken, values: Sequence[WordToken]) -> None:
        draft = self._draft
        if draft is None:
            hint = "a template begins with 'minor ='"
            return self._error(self._span(keyword), f"'{keyword.text}' outside of a template", hint)
        if (bad := next((token for token in values if token.kind is not TokenKind.STRING), None)) is not None:
            hint = f'{keyword.text} = "..."'
            return self._error(self._span(bad), f"expected a string, found '{bad.text}'", hint)
        characters = [character for token in values for character in self._characters(token)]
        if keyword.word == "probe":
            if draft.probe is not None:
                return self._error(self._span(keyword), "a template has one 'probe'")
            draft.probe = "".join(character.text for character in characters)
            return None
        if keyword.word == "desc":
            if draft.desc is not None:
                return self._error(self._span(keyword), "a template has one 'desc'")
            draft.desc = "".join(character.text for character in characters)
            return None
        parts = parse_parts(characters, self._place, self._diagnostics, PARTS_MAX - draft.parts)
        draft.parts += len(parts)
        if draft.parts > PARTS_MAX or len(draft.lines) >= LINES_MAX:
            if draft.parts <= PARTS_MAX or draft.parts - len(parts) <= PARTS_MAX:
                message = f"a template has at most {LINES_MAX} lines, and {PARTS_MAX} strings and place-holders in them"
                self._error(self._span(keyword), message)
            return None
        draft.columns += sum(map(_columns, parts))
        if draft.columns > COLUMNS_MAX:
            message = f"the widths and precisions of a template are at most {COLUMNS_MAX} together"
            return self._error(self._span(keyword), message)
        draft.lines.append(parts)
        return None

    def _characters(self, token: WordToken) -> list[Character]:
        """Return the characters of a string, each with its position."""
        found: list[Character] = []
        body = token.text[1:-1]
        position = 0
        while position < len(body):
            escape = _ESCAPE.match(body, position)
            end = escape.end() if escape is not None else position + 1
            first = token.start + 1
            text = body[position] if escape is None else self._escaped(escape, first)
            if text is not None:
                found.append(Character(text, first + position, first + end))
            position = end
        return found

    def _escaped(self, escape: re.Match[str], first: int) -> str | None:
        """Return the character of an escape, None if invalid; ``first`` is the position of its string."""
        hexadecimal, octal, simple = escape.groups()
        span = self._place(first + escape.start(), first + escape.end())
        if simple is not None:
            if simple not in _SIMPLE:
                self._error(span, f"unknown escape '{escape.group()}'", "escapes are those of C")
            return _SIMPLE.get(simple)
        value = int(hexadecimal, 16) if hexadecimal is not None else int(octal, 8)
        if value > _BYTE_MAX:
            self._error(span, f"'{escape.group()}' is not a byte")
            return None
        return chr(value)

    def _end_template(self) -> None:
        draft, self._draft = self._draft, None
        has_error = self._diagnostics.error_count > self._errors_before
        self._errors_before = self._diagnostics.error_count
        if draft is None or draft.minor is None or has_error:
            return
        first = self._file.templates.get(draft.minor)
        if first is not None:
            note = Note("the first one is here", first.span)
            message = f"minor {draft.minor} is there already; the first template is taken"
            self._diagnostics.warning(draft.span, message, notes=(note,))
            return
        major = self._file.major if self._file.major is not None else self._expected or 0
        self._file.templates[draft.minor] = Template(
            major, draft.minor, draft.desc or "", tuple(draft.lines), draft.span, draft.probe or ""
        )
