"""
The built-in preprocessor: it reads lines, obeys directives (C11 6.10), and writes what macros make of the rest.

A line without macro names is copied without being split into tokens. A malformed directive is a diagnostic and is
otherwise ignored; a limit that is passed ends the text there. It must not know about RPN.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics, Note, did_you_mean
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.preprocessor.clean import Cleaned, clean
from dprobes.preprocessor.condition import evaluate
from dprobes.preprocessor.expansion import Macros
from dprobes.preprocessor.include import Includes
from dprobes.preprocessor.problems import DirectiveError, StopError
from dprobes.preprocessor.textmap import Preprocessed, TextBuilder
from dprobes.preprocessor.tokens import Token, strip, tokenize, would_join
from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["TEXT_LIMIT", "run_directives"]

TEXT_LIMIT = 2 << 20
"""The number of characters, include files and all, beyond which text is refused."""

_DIRECTIVE = lazy_pattern(r"[ \t\f\v]*#")
_WORD = lazy_pattern(r"[A-Za-z_]\w*", re.ASCII)
_CONDITIONALS = frozenset({"if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif"})
_IGNORED = frozenset({"ident"})
_OTHERS = frozenset({"define", "undef", "include", "error", "line", "warning", "pragma"})
_LINE_MAX = 2147483647


def run_directives(
    cleaned: Cleaned, diagnostics: Diagnostics, defines: Sequence[tuple[str, str]], include_dirs: Sequence[Path]
) -> Preprocessed:
    """Return the preprocessed text; errors go to ``diagnostics``."""
    driver = _Driver(cleaned.source, diagnostics, include_dirs)
    try:
        for name, value in defines:
            driver.define(name, value)
        driver.file(cleaned)
    except StopError as error:
        error.report(diagnostics)
    return driver.out.build()


@dataclass(slots=True)
class _Group:
    """Hold the state of one #if … #endif."""

    place: Span
    name: str
    outer: bool  # whether the text around it is active
    active: bool
    taken: bool  # whether a branch was active
    has_else: bool = False


class _File:
    """Hold how far one file is read, and its open conditionals."""

    def __init__(self, cleaned: Cleaned) -> None:
        self.source = cleaned.source
        self.presented = cleaned.source  # under the name and with the line numbers of the last #line
        self.cleaned = cleaned.text
        self.text = cleaned.text.text
        self.problems = cleaned.problems[::-1]
        self.position = 0
        self.groups: list[_Group] = []

    @property
    def active(self) -> bool:
        return not self.groups or self.groups[-1].active

    def source_offset(self, position: int) -> int:
        """Return where a character of the cleaned text stands in the source."""
        return self.cleaned.span(position, position + 1).start

    def line(self) -> tuple[int, int]:
        """Return the range of the next line without its newline, and go on to the one after it."""
        start = self.position
        end = self.text.find("\n", start)
        end = len(self.text) if end < 0 else end
        self.position = min(end + 1, len(self.text))
        return start, end


class _Driver:
    """Preprocess files."""

    def __init__(self, source: SourceFile, diagnostics: Diagnostics, include_dirs: Sequence[Path]) -> None:
        self.out = TextBuilder(source)
        self._diagnostics = diagnostics
        self._macros = Macros(diagnostics)
        self._includes = Includes(include_dirs)
        self._read = 0

    def define(self, name: str, value: str) -> None:
        """Define what ``-D name=value`` says."""
        source = SourceFile("<command line>", f"-D {name}={value}".replace("\n", " "))
        _, text, problems = clean(source)
        for problem in problems:
            self._diagnostics.error(problem.span, problem.message)
        start = len("-D ")
        end = start + len(name)
        blank = Token("blank", " ", text.span(end, end + 1))
        try:
            self._macros.define([*tokenize(text, start, end), blank, *tokenize(text, end + 1, len(text.text))])
        except DirectiveError as error:
            error.report(self._diagnostics)

    def file(self, cleaned: Cleaned) -> None:
        """Preprocess one file."""
        self._read += len(cleaned.source.text)
        if self._read > TEXT_LIMIT:
            raise StopError(
                f"'{cleaned.source.name}' has more than {TEXT_LIMIT >> 20} MiB of text, "
                "too much for the built-in preprocessor",
                self._includes.place,
                hint="remove directives, macros and names that begin with '__', or use '--cpp \"gcc -E\"'",
            )
        file = _File(cleaned)
        while file.position < len(file.text):
            start, end = file.line()
            directive = _DIRECTIVE.match(file.text, start, end)
            self._report_problems(file, end)
            if directive is not None:
                self._directive(file, directive.end() - 1, end)
            elif file.active:
                if any(word in self._macros for word in _WORD.findall(file.text, start, end)):
                    self._expand(file, start)
                    continue
                self.out.copy(file.cleaned, start, end)
            self.out.copy(file.cleaned, end, file.position)
        self._report_problems(file, len(file.text))
        for group in file.groups:
            self._diagnostics.error(group.place, f"unterminated #{group.name}")

    def _report_problems(self, file: _File, end: int) -> None:
        while file.problems and file.problems[-1].offset <= end:
            problem = file.problems.pop()
            if file.active or not problem.message.startswith("unterminated string"):
                place = Span(file.presented, problem.span.start, problem.span.end)
                self._diagnostics.error(place, problem.message)

    def _expand(self, file: _File, start: int) -> None:
        """Write the line from ``start``, and those after it that a macro takes its arguments from."""

        def more() -> list[Token]:
            if file.position == len(file.text) or _DIRECTIVE.match(file.text, file.position):
                return []
            start, end = file.line()
            self._report_problems(file, end)
            return tokenize(file.cleaned, start, file.position)

        previous: Token | None = None
        newlines = 0
        for token in self._macros.expand(tokenize(file.cleaned, start, file.position), more):
            span = token.span()
            if previous is not None and would_join(previous, token):
                self.out.put(" ", span)
            self.out.put(token.text, span)
            newlines += token.text == "\n"
            previous = token
        owed = file.text.count("\n", start, file.position) - newlines
        self.out.put("\n" * owed, file.cleaned.span(file.position - 1, file.position))

    def _directive(self, file: _File, start: int, end: int) -> None:
        text = file.text[start:end].strip()
        place = file.cleaned.span(start, start + len(text))
        tokens = strip(tokenize(file.cleaned, start + 1, end))
        if not tokens:
            return
        if tokens[0].kind == "number":  # the line markers of another preprocessor
            tokens = [Token("name", "line", tokens[0].place), *tokens]
        name, arguments = tokens[0].text, strip(tokens[1:])
        try:
            if name in _CONDITIONALS:
                self._conditional(file, name, arguments, place)
            elif file.active:
                self._obey(file, name, arguments, place, text)
        except DirectiveError as error:
            error.report(self._diagnostics, place)

    def _obey(self, file: _File, name: str, arguments: list[Token], place: Span, text: str) -> None:
        if name == "define":
            self._macros.define(arguments)
        elif name == "undef":
            self._macros.undefine(_macro_name(name, arguments))
        elif name == "include":
            if arguments and arguments[0].text != "<" and arguments[0].kind != "string":
                arguments = strip(self._macros.expand(arguments))
            source = self._includes.find(arguments, file.source)
            if source is not None:
                with self._includes.entered(source, file.source, place):
                    self.file(clean(source))
        elif name == "line":
            self._renumber(file, strip(self._macros.expand(arguments)))
        elif name == "error":
            self._diagnostics.error(place, text)
        elif name == "warning":
            self._diagnostics.warning(place, text)
        elif name == "pragma":
            if arguments and arguments[0].text == "once":
                self._includes.read_once(file.source)
        elif name not in _IGNORED:
            known = [f"#{known}" for known in sorted(_CONDITIONALS | _OTHERS | _IGNORED)]
            hint = did_you_mean(f"#{name}", known) or "a comment is written '// ...' or '/* ... */'"
            raise DirectiveError(f"unknown directive '#{name}'", hint=hint)

    def _renumber(self, file: _File, arguments: list[Token]) -> None:
        """Obey ``#line NUMBER ["FILE"]`` (C11 6.10.4): the next line has that number, in a file of that name."""
        words = [token for token in arguments if token.kind != "blank"]
        is_number = bool(words) and words[0].kind == "number" and words[0].text.isdecimal()
        number = int(words[0].text) if is_number and len(words[0].text) <= len(str(_LINE_MAX)) else 0
        if not 1 <= number <= _LINE_MAX or (len(words) > 1 and words[1].kind != "string"):
            hint = f"write '#line NUMBER' or '#line NUMBER \"FILE\"', with a number from 1 to {_LINE_MAX}"
            raise DirectiveError("malformed #line directive", hint=hint)
        name = re.sub(r"\\(.)", r"\1", words[1].text[1:-1]) if len(words) > 1 else file.presented.name
        file.presented = file.source.renamed(name, file.source_offset(file.position), number)
        file.cleaned = file.cleaned.presented_as(file.presented)

    def _conditional(self, file: _File, name: str, arguments: list[Token], place: Span) -> None:
        groups = file.groups
        if name in ("if", "ifdef", "ifndef"):
            outer = file.active
            active = outer and self._holds(name, arguments, place)
            groups.append(_Group(place, name, outer, active, active))
            return
        if not groups:
            raise DirectiveError(f"#{name} without #if")
        group = groups[-1]
        if name == "endif":
            groups.pop()
            return
        if group.has_else:
            self._diagnostics.error(place, f"#{name} after #else", notes=(Note("the #if is here", group.place),))
        group.has_else = group.has_else or name == "else"
        open_ = group.outer and not group.taken
        group.active = open_ and (name == "else" or self._holds(name, arguments, place))
        group.taken = group.taken or group.active

    def _holds(self, name: str, arguments: list[Token], place: Span) -> bool:
        """Return whether the condition is true; report a wrong one and take it for false."""
        kind = name.removeprefix("el")
        try:
            if kind == "if":
                return evaluate(name, arguments, self._macros)
            return (_macro_name(name, arguments) in self._macros) == (kind == "ifdef")
        except DirectiveError as error:
            error.report(self._diagnostics, place)
            return False


def _macro_name(directive: str, arguments: list[Token]) -> str:
    if not arguments or arguments[0].kind != "name":
        raise DirectiveError(f"malformed #{directive} directive", hint=f"write '#{directive} NAME'")
    return arguments[0].text
