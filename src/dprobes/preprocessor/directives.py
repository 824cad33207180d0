"""
The built-in preprocessor: it reads lines, executes directives (C11 6.10), and expands macros in the other lines.

A line without macro names is copied without being split into tokens. A malformed directive is reported and otherwise
ignored; an exceeded limit ends the text there. The module must not depend on RPN.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics, Note, did_you_mean
from dprobes.errors import SourceError
from dprobes.preprocessor.macro_expansion import Macros, Token, strip, tokenize, would_join
from dprobes.preprocessor.mapped_text import Cleaned, DirectiveError, Preprocessed, StopError, TextBuilder, clean
from dprobes.preprocessor.source_reader import read_source
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["run_directives"]

_DEPTH = 60
_LEVELS = "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"
_PRECEDENCE = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators.split()}
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)([uU]?[lL]{0,2}|[lL]{1,2}[uU])")
_CHARACTER = re.compile(r"L?'(?:([^\\])|\\([0-7]{1,3})|\\x([\da-fA-F]{1,8})|\\(.))'")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11}


def evaluate(directive: str, tokens: list[Token], macros: Macros) -> bool:
    """
    Return whether the expression ``tokens`` of ``#directive`` is true, after the expansion of its macros.

    Raise ``DirectiveError`` if it is malformed.
    """
    if not tokens:
        raise DirectiveError(f"malformed #{directive} directive", hint=f"write '#{directive} EXPRESSION'")
    try:
        expanded = macros.expand(_replace_defined(tokens, macros))
        return _Expression(_replace_defined(expanded, macros)).evaluate()
    except DirectiveError as error:
        raise DirectiveError(f"malformed #{directive} directive: {error}", error.span) from error


def _replace_defined(tokens: list[Token], macros: Macros) -> list[Token]:
    """Return the tokens without blanks, with 1 or 0 for ``defined NAME``, which macros may produce as in GNU C."""
    result: list[Token] = []
    rest = [token for token in tokens if token.kind != "blank"][::-1]
    while rest:
        token = rest.pop()
        if token.text == "defined":
            parenthesis = bool(rest) and rest[-1].text == "(" and bool(rest.pop())
            if not rest or rest[-1].kind != "name":
                raise DirectiveError("'defined' needs a name", token.span())
            value = str(int(rest.pop().text in macros))
            if parenthesis and (not rest or rest.pop().text != ")"):
                raise DirectiveError("'defined(' has no ')'", token.span())
            token = Token("number", value, token.place, token.use)
        result.append(token)
    return result


class _Number(NamedTuple):
    """A 64-bit integer; ``unsigned`` if its type in C is uintmax_t."""

    value: int
    unsigned: bool = False

    @classmethod
    def wrap(cls, value: int, unsigned: bool) -> _Number:
        value &= (1 << 64) - 1
        return cls(value - (1 << 64) if not unsigned and value >> 63 else value, unsigned)


class _Expression:
    """Evaluator of an expression. ``live`` is False for operands whose value is not needed."""

    def __init__(self, tokens: list[Token]) -> None:
        self._rest = tokens[::-1]
        self._depth = 0

    def evaluate(self) -> bool:
        result = self._ternary(live=True)
        if self._rest:
            raise _unexpected(self._rest[-1])
        return result.value != 0

    def _accept(self, text: str) -> bool:
        return bool(self._rest) and self._rest[-1].text == text and bool(self._rest.pop())

    def _ternary(self, *, live: bool) -> _Number:
        self._depth += 1
        if self._depth > _DEPTH:
            raise DirectiveError("the expression nests too deep")
        result = self._binary(0, live=live)
        if self._accept("?"):
            yes = self._ternary(live=live and result.value != 0)
            if not self._accept(":"):
                raise DirectiveError("'?' without ':'")
            no = self._ternary(live=live and result.value == 0)
            result = _Number.wrap((yes if result.value else no).value, yes.unsigned or no.unsigned)
        self._depth -= 1
        return result

    def _binary(self, level: int, *, live: bool) -> _Number:
        left = self._unary(live=live)
        while self._rest and _PRECEDENCE.get(self._rest[-1].text, -1) >= level:
            operator = self._rest.pop()
            skips = {"&&": not left.value, "||": left.value != 0}.get(operator.text, False)
            right = self._binary(_PRECEDENCE[operator.text] + 1, live=live and not skips)
            if operator.text in ("/", "%") and right.value == 0:
                if live:
                    raise DirectiveError("division by zero", operator.span())
                right = _Number(1, right.unsigned)
            left = _apply(operator.text, left, right)
        return left

    def _unary(self, *, live: bool) -> _Number:
        signs: list[str] = []
        while self._rest and self._rest[-1].text in ("+", "-", "!", "~"):
            signs.append(self._rest.pop().text)
        if self._accept("("):
            result = self._ternary(live=live)
            if not self._accept(")"):
                raise DirectiveError("a '(' has no ')'")
        elif self._rest:
            result = _constant(self._rest.pop())
        else:
            raise DirectiveError("the expression ends too early")
        for sign in reversed(signs):
            if sign == "!":
                result = _Number(int(not result.value))
            elif sign != "+":
                result = _Number.wrap(-result.value if sign == "-" else ~result.value, result.unsigned)
        return result


def _constant(token: Token) -> _Number:
    if token.kind == "name":
        return _Number(0)
    if matched := _CHARACTER.fullmatch(token.text):
        plain, octal, hexadecimal, escape = matched.groups()
        if plain or escape:
            return _Number(ord(plain) if plain else _ESCAPES.get(escape, ord(escape)))
        return _Number(int(octal, 8) if octal else int(hexadecimal, 16))
    if len(token.text) < 100 and (matched := _INTEGER.fullmatch(token.text)):
        digits, suffix = matched.groups()
        value = int(digits, 8 if digits[0] == "0" and digits.isdigit() else 0)
        return _Number.wrap(value, "u" in suffix.lower() or value >> 63 != 0)
    raise _unexpected(token)


def _apply(operator: str, left: _Number, right: _Number) -> _Number:
    a, b = left.value, right.value
    if operator in ("<<", ">>"):
        count = min(abs(b), 64)
        return _Number.wrap(a << count if (operator == "<<") == (b >= 0) else a >> count, left.unsigned)
    unsigned = left.unsigned or right.unsigned
    if operator not in ("&&", "||"):
        a, b = _Number.wrap(a, unsigned).value, _Number.wrap(b, unsigned).value
    match operator:
        case "&&" | "||":
            return _Number(int(bool(a and b) if operator == "&&" else bool(a or b)))
        case "==" | "!=":
            return _Number(int((a == b) == (operator == "==")))
        case "<" | ">=":
            return _Number(int((a < b) == (operator == "<")))
        case ">" | "<=":
            return _Number(int((a > b) == (operator == ">")))
        case "/" | "%":
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # rounded towards zero, unlike Python's
            return _Number.wrap(quotient if operator == "/" else a - quotient * b, unsigned)
    value = {"|": a | b, "^": a ^ b, "&": a & b, "+": a + b, "-": a - b, "*": a * b}[operator]
    return _Number.wrap(value, unsigned)


def _unexpected(token: Token) -> DirectiveError:
    return DirectiveError(f"unexpected '{token.text}'", token.span())


_INCLUDE_DEPTH = 64


class Includes:
    """A finder of include files in ``directories``, and the stack of the files that are open."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = [str(directory) for directory in directories]
        self._open: list[tuple[str, Span]] = []  # names of the including files, and the directives there
        self._once: set[str] = set()

    @property
    def place(self) -> Span | None:
        """The directive that included the current file; None in the first file."""
        return self._open[-1][1] if self._open else None

    def find(self, arguments: list[Token], current: SourceFile) -> SourceFile | None:
        """
        Return the file that the ``arguments`` of ``#include`` name, or None if ``#pragma once`` excludes it.

        ``current`` is the file with the directive. Raise ``DirectiveError`` if the file is absent.
        """
        strings = [token.text for token in arguments]
        directories = self._directories
        name = ""
        if strings and arguments[0].kind == "string":
            name = strings[0].strip('"')
            directories = [str(Path(current.name).parent), *directories]
        elif strings and strings[0] == "<" and ">" in strings:
            name = "".join(strings[1 : strings.index(">")])
        if not name:
            raise DirectiveError("malformed #include directive", hint="write '#include \"FILE\"'")
        path = next((p for d in directories if _is_file(p := Path(d, name))), None)
        if path is None:
            shown = ", ".join(f"'{directory}'" for directory in dict.fromkeys(directories))
            note = Note(f"searched in {shown}" if shown else "there are no include directories")
            hint = "name its directory with '-I DIR'"
            raise DirectiveError(f"cannot find include file '{name}'", notes=(note,), hint=hint)
        if os.path.realpath(path) in self._once:
            return None
        try:
            return read_source(path, allow_pipe=False)
        except SourceError as error:
            first = error.diagnostics[0]
            raise DirectiveError(first.message, notes=first.notes, hint=first.hint) from error

    def read_once(self, file: SourceFile) -> None:
        """Exclude a file from later inclusion, as ``#pragma once`` requests."""
        self._once.add(os.path.realpath(file.name))

    @contextmanager
    def entered(self, source: SourceFile, current: SourceFile, place: Span) -> Iterator[None]:
        """Count ``source`` as open; raise ``StopError`` if too many files are open."""
        self._open.append((current.name, place))
        if len(self._open) > _INCLUDE_DEPTH:
            names = [name for name, _ in self._open]
            first = max((i for i, name in enumerate(names) if name == source.name), default=len(names) - 1)
            notes = tuple(Note(f"included from '{n}'", p) for n, p in reversed(self._open[first:-1]))
            raise StopError(f"'{source.name}' is included more than {_INCLUDE_DEPTH} files deep", place, notes=notes)
        yield
        self._open.pop()


def _is_file(path: Path) -> bool:
    """Return whether a path exists and is not a directory, such as a file or a pipe."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # such as a directory without search permission
        return False


TEXT_LIMIT = 2 << 20
"""Maximum number of characters of text, include files included."""

_DIRECTIVE = re.compile(r"[ \t\f\v]*#")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CONDITIONALS = frozenset({"if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif"})
_IGNORED = frozenset({"ident"})
_OTHERS = frozenset({"define", "undef", "include", "error", "line", "warning", "pragma"})
_LINE_MAX = 2147483647


def run_directives(
    cleaned: Cleaned, diagnostics: Diagnostics, defines: Sequence[tuple[str, str]], include_dirs: Sequence[Path]
) -> Preprocessed:
    """
    Return the text after execution of its directives and macro expansion; errors go to ``diagnostics``.

    ``defines`` are the names and values of macros, ``include_dirs`` the directories of ``#include``.
    """
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
    """The state of one #if … #endif, which begins at ``place``; with ``active``, the present branch is compiled."""

    place: Span
    name: str
    outer: bool  # state of the text around it
    active: bool
    taken: bool  # True after an active branch
    has_else: bool = False


class _File:
    """The reading position in one file, and its open conditionals."""

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
        """Return the offset in the source of the character at ``position`` of the cleaned text."""
        return self.cleaned.span(position, position + 1).start

    def line(self) -> tuple[int, int]:
        """Return the range of the next line without its newline, and advance to the following one."""
        start = self.position
        end = self.text.find("\n", start)
        end = len(self.text) if end < 0 else end
        self.position = min(end + 1, len(self.text))
        return start, end


class _Driver:
    """The execution of the directives of a source file and of the files that it includes."""

    def __init__(self, source: SourceFile, diagnostics: Diagnostics, include_dirs: Sequence[Path]) -> None:
        self.out = TextBuilder(source)
        self._diagnostics = diagnostics
        self._macros = Macros(diagnostics)
        self._includes = Includes(include_dirs)
        self._read = 0

    def define(self, name: str, value: str) -> None:
        """Define a macro as by ``-D name=value``."""
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
        """Preprocess one file, and append its text to the result; raise ``StopError`` if the result is too long."""
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
        """Expand and write the line from ``start``, and following lines with arguments of its macros."""

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
        """
        Apply ``#line NUMBER ["FILE"]`` (C11 6.10.4): the next line has that number, in a file of that name.

        ``arguments`` are the tokens after ``#line``.
        """
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
        """
        Return True if the condition of ``#name`` is true: an ``if``, ``ifdef``, ``ifndef``, or an ``elif`` of these.

        A malformed condition is reported at ``place``, and counts as false.
        """
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
