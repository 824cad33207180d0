"""
The built-in C preprocessor: directives, macros and includes, with the origin of every token.

It is pcpp with other parts where pcpp loses what we need: tokens keep their place and the macros they came out of,
expansion neither recurses nor explodes, ``#if`` computes in 64-bit integers as C does, and every malformed directive
is a diagnostic. What stays pcpp's: reading definitions and substituting arguments. It must not know about RPN.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pcpp import Preprocessor

from dprobes.diagnostics import Diagnostics, Note, did_you_mean
from dprobes.errors import SourceError
from dprobes.rpn.preprocess import TEXT_LIMIT, Preprocessed, Run, clean, read_source, refuse_long_text
from dprobes.source import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.rpn.preprocess import Problem

__all__ = ["run_pcpp"]

_INCLUDE_DEPTH = 64
_MACRO_DEPTH = 200
_ARGUMENT_DEPTH = 50
_EXPANSION_LIMIT = 4 << 20  # characters that macros may produce; a token counts as at least four

_DIRECTIVE = re.compile(r"[ \t\f\v]*#")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DYNAMIC = frozenset({"__LINE__", "__FILE__", "__COUNTER__"})
_CONDITIONALS = frozenset({"if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif"})
_OTHERS = frozenset({"define", "undef", "include", "error", "warning", "pragma", "line", "ident"})

_LEXEMES = re.compile(
    r"""(?P<CPP_WS>[ \t\f\v]+|\n)
    |(?P<CPP_LINECONT>\\[ \t]*\n)
    |(?P<CPP_CHAR>L?'(?:[^'\\\n]|\\.){1,64}')
    |(?P<CPP_ID>[A-Za-z_]\w*)
    |(?P<CPP_INTEGER>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<CPP_STRING>"(?:[^"\\\n]|\\.)*+"?)
    |(?P<CPP_COMMENT1>/\*[^*\n]{0,80}\*/)
    |(?P<CPP_COMMENT2>//[^\n]*)
    |(?P<CPP_DPOUND>\#\#)
    |(?P<CPP_PUNCTUATOR><<=|>>=|->|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|(?s:.))""",
    re.VERBOSE | re.ASCII,
)


class _Use(NamedTuple):
    """Say out of which macro a token came, where that was used, and out of which macro that use came."""

    name: str
    place: Span
    outer: _Use | None


_NO_PLACE = Span(SourceFile("<built-in>", ""), 0, 0)
_BODY = _Use("", _NO_PLACE, None)
"""Mark tokens of a definition, to tell them from arguments after substitution."""


class _Token:
    """Look like a token of ply to pcpp; ``hide`` names the macros that must not expand it again."""

    __slots__ = ("hide", "place", "type", "use", "value")
    source = ""
    lineno = 0

    def __init__(self, kind: str, value: str, place: Span = _NO_PLACE, use: _Use | None = None) -> None:
        self.type = kind
        self.value = value
        self.place = place
        self.use = use
        self.hide: frozenset[str] = frozenset()

    def __copy__(self) -> _Token:
        token = _Token(self.type, self.value, self.place, self.use)
        token.hide = self.hide
        return token

    def outermost(self) -> Span:
        """Return the place in the program text, outside of all macros."""
        place, use = self.place, self.use
        while use is not None:
            place, use = use.place, use.outer
        return place

    def span(self) -> Span:
        """Return the place of use, leading to the definitions."""
        span, use = self.place, self.use
        while use is not None:
            span = Span(use.place.file, use.place.start, use.place.end, Expansion(use.name, span))
            use = use.outer
        return span


class _Lexer:
    """Look like a lexer of ply to pcpp."""

    lineno = 1

    def __init__(self) -> None:
        self._tokens: list[_Token] = []

    def clone(self) -> _Lexer:
        return _Lexer()

    def input(self, text: str) -> None:
        self._tokens = [_Token(str(m.lastgroup), m.group()) for m in _LEXEMES.finditer(text)][::-1]

    def token(self) -> _Token | None:
        token = self._tokens.pop() if self._tokens else None
        if token is not None and token.type == "CPP_LINECONT":
            token.value = token.value[1:-1]
        return token


class _StopError(Exception):
    """End preprocessing after an error that has been reported."""


@dataclass(slots=True)
class _Group:
    """Hold the state of one #if … #endif."""

    place: Span
    name: str
    outer: bool  # whether the text around it is active
    active: bool
    taken: bool
    has_else: bool = False


class _Reader:
    """Hand out the lines of one file."""

    def __init__(self, source: SourceFile, cleaned: Preprocessed, problems: list[Problem]) -> None:
        self.source = source
        self.cleaned = cleaned
        self.problems = problems[::-1]
        self.position = 0
        self.groups: list[_Group] = []

    @property
    def active(self) -> bool:
        return not self.groups or self.groups[-1].active

    def next_line(self) -> tuple[int, int] | None:
        """Return the range of the next line without its newline."""
        text, start = self.cleaned.text, self.position
        if start >= len(text):
            return None
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        self.position = end + 1
        return start, end

    def tokens(self, start: int, end: int) -> list[_Token]:
        span = self.cleaned.span
        return [
            _Token(str(m.lastgroup), m.group(), span(m.start(), m.end()))
            for m in _LEXEMES.finditer(self.cleaned.text, start, end)
        ]


def run_pcpp(
    source: SourceFile,
    diagnostics: Diagnostics,
    defines: Sequence[tuple[str, str]],
    include_dirs: Sequence[Path],
) -> Preprocessed:
    """Return the preprocessed text; errors go to ``diagnostics``."""
    driver = _Driver(diagnostics, include_dirs)
    try:
        for name, value in defines:
            driver.define_on_command_line(name, value)
        driver.file(source)
    except _StopError:
        pass
    return Preprocessed("".join(driver.parts), driver.runs or [Run(0, source, len(source.text), None)])


class _Macros(Preprocessor):  # type: ignore[misc]  # pcpp has no types
    """Hold and expand macros."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.place: Span | None = None  # of the directive being handled, for the errors of pcpp
        self.defined_at: dict[str, Span] = {}
        self._owed = 0  # newlines taken out of the current line
        self._counter = 0
        self._produced = 0
        self._depth = 0
        super().__init__(_Lexer())

    def on_error(self, _file: object, _line: object, message: str) -> None:
        """Report an error that pcpp found in a directive."""
        self.diagnostics.error(self.place, message[:1].lower() + message[1:])

    def tokenize(self, text: str) -> list[_Token]:
        """Return the tokens of a built-in definition."""
        return [_Token(str(m.lastgroup), m.group()) for m in _LEXEMES.finditer(text)]

    def define(self, tokens: str | list[_Token]) -> None:
        """Define a macro from the tokens after ``#define``."""
        if isinstance(tokens, str):
            tokens = self.tokenize(tokens)
        name = tokens[0] if tokens else None
        if name is None or name.type != "CPP_ID":
            self.diagnostics.error(self.place, "malformed #define directive", hint="write '#define NAME TEXT'")
            return
        if name.value == "defined" or name.value in _DYNAMIC:
            self.diagnostics.error(name.place, f"'{name.value}' cannot be the name of a macro")
            return
        for token in tokens:
            token.use = _BODY
        before = self.macros.pop(name.value, None)
        errors = len(self.diagnostics)
        try:
            super().define(tokens)
        except (LookupError, AttributeError):
            self.diagnostics.error(self.place, "malformed #define directive")
        macro = self.macros.get(name.value)
        if macro is None or len(self.diagnostics) > errors:
            return
        parameters = macro.arglist or []
        if len(set(parameters)) < len(parameters):
            self.diagnostics.error(self.place, f"macro '{name.value}' has two parameters of the same name")
        if macro.arglist is None:
            self._prepare_pasting(macro)
        if before is not None and _text(before) != _text(macro):
            old = self.defined_at.get(name.value)
            self.diagnostics.warning(
                name.place,
                f"macro '{name.value}' is redefined",
                notes=(Note("the previous definition is here", old),) if old is not None else (),
            )
        self.defined_at[name.value] = name.place

    def is_defined(self, name: str) -> bool:
        return name in self.macros or name in _DYNAMIC

    def expand_macros(self, tokens: list[_Token], _expanding_from: object = ()) -> list[_Token]:
        """Return the tokens after expansion; pcpp calls this for arguments."""
        self._depth += 1
        if self._depth > _ARGUMENT_DEPTH:
            place = tokens[0].span() if tokens else self.place
            self._stop(place, f"macro arguments nest more than {_ARGUMENT_DEPTH} deep")
        result = self.expand(tokens, None)
        self._depth -= 1
        return result

    def expand(self, tokens: list[_Token], more: Callable[[], list[_Token]] | None) -> list[_Token]:
        """
        Return the tokens after expansion; ``more`` gives the next line's when a call does not end on this one.

        This is Prosser's algorithm: a macro's output goes back in front of the tokens still to be read, and each of
        its tokens remembers the macros that it must not expand again.
        """
        stack = tokens[::-1]
        out: list[_Token] = []
        while stack:
            token = stack.pop()
            name = token.value
            if token.type != "CPP_ID":
                out.append(token)
                if name == "\n" and self._owed:
                    out += [_Token("CPP_WS", "\n", token.place)] * self._owed
                    self._owed = 0
            elif name in _DYNAMIC:
                out.append(self._dynamic(token))
            elif (macro := self.macros.get(name)) is None or name in token.hide:
                out.append(token)
            elif macro.arglist is None:
                body = self.macro_expand_args(macro, []) if macro.has_pasting else macro.value
                self._push(stack, body, token, token.place, token.hide)
            elif (call := self._call(stack, token, more)) is None:
                out.append(token)
            else:
                found, close = call
                arguments = self._checked(macro, found, token)
                if arguments is not None:
                    body = self.macro_expand_args(macro, arguments)
                    place = token.place.to(close.place) if close.use is token.use else token.place
                    self._push(stack, body, token, place, token.hide & close.hide)
        return out

    def _push(self, stack: list[_Token], body: list[_Token], token: _Token, place: Span, hide: frozenset[str]) -> None:
        hide = hide | {token.value}
        if len(hide) > _MACRO_DEPTH:
            self._stop(token.outermost(), f"macros nest more than {_MACRO_DEPTH} deep")
        self._produced += 4 + sum(max(4, len(t.value)) for t in body)
        if self._produced > _EXPANSION_LIMIT:
            self._stop(token.outermost(), f"macros produce more than {_EXPANSION_LIMIT >> 20} MiB of text")
        use = _Use(token.value, place, token.use)
        for old in reversed(body):
            new = _Token(old.type, old.value, old.place, use if old.use is _BODY else old.use)
            new.hide = old.hide | hide if old.hide else hide
            stack.append(new)

    def _call(
        self, stack: list[_Token], name: _Token, more: Callable[[], list[_Token]] | None
    ) -> tuple[list[list[_Token]], _Token] | None:
        """Take the arguments of a call off the stack; each separating comma is an argument of its own."""
        blanks: list[_Token] = []
        while not stack or stack[-1].type == "CPP_WS":
            if stack:
                blanks.append(stack.pop())
            elif more is not None and (line := more()):
                stack.extend(reversed(line))
            else:
                break
        if not stack or stack[-1].value != "(":
            stack.extend(reversed(blanks))
            return None
        self._owed += sum(t.value == "\n" for t in blanks)
        stack.pop()
        arguments: list[list[_Token]] = [[]]
        nesting = 1
        while True:
            if not stack:
                if more is not None and (line := more()):
                    stack.extend(reversed(line))
                    continue
                self._stop(name.span(), f"the arguments of macro '{name.value}' have no ')'")
            token = stack.pop()
            if token.value == "\n":
                self._owed += 1
                token = _Token("CPP_WS", " ", token.place, token.use)
            nesting += (token.value == "(") - (token.value == ")")
            if nesting == 0:
                return arguments, token
            if token.value == "," and nesting == 1:
                arguments += [[token], []]
            else:
                arguments[-1].append(token)

    def _checked(self, macro: Any, found: list[list[_Token]], name: _Token) -> list[list[_Token]] | None:
        """Return the arguments as pcpp wants them; report a wrong number and return None."""
        arguments = [self.tokenstrip(list(argument)) for argument in found[::2]]
        wanted = len(macro.arglist)
        if not wanted and arguments == [[]]:
            return []
        if macro.variadic and len(arguments) >= wanted:
            rest = [t for argument in found[2 * (wanted - 1) :] for t in argument]
            return [*arguments[: wanted - 1], self.tokenstrip(rest)]
        if macro.variadic and len(arguments) == wanted - 1:
            return [*arguments, []]
        if len(arguments) == wanted:
            return arguments
        least = "at least " if macro.variadic else ""
        count = wanted - 1 if macro.variadic else wanted
        where = self.defined_at.get(name.value)
        self.diagnostics.error(
            name.span(),
            f"macro '{name.value}' takes {least}{count} argument{'s' * (count != 1)}, but {len(arguments)} given",
            notes=(Note("the macro is defined here", where),) if where is not None else (),
        )
        return None

    def _dynamic(self, token: _Token) -> _Token:
        place = token.outermost()
        if token.value == "__LINE__":
            kind, value = "CPP_INTEGER", str(place.line)
        elif token.value == "__COUNTER__":
            kind, value = "CPP_INTEGER", str(self._counter)
            self._counter += 1
        else:
            name = place.file.name.replace("\\", "\\\\").replace('"', '\\"')
            kind, value = "CPP_STRING", f'"{name}"'
        return _Token(kind, value, token.place, token.use)

    def _prepare_pasting(self, macro: Any) -> None:
        """Let ``##`` work in a macro without parameters, which pcpp forgets."""
        macro.has_pasting = any(t.type == "CPP_DPOUND" for t in macro.value)
        macro.patch, macro.str_patch, macro.var_comma_patch = [], [], []
        if macro.has_pasting:
            kept: list[_Token] = []
            for token in macro.value:
                if token.type == "CPP_DPOUND" and kept and kept[-1].type == "CPP_WS":
                    kept.pop()
                if token.type != "CPP_WS" or not kept or kept[-1].type != "CPP_DPOUND":
                    kept.append(token)
            macro.value = kept

    def _stop(self, span: Span | None, message: str, notes: tuple[Note, ...] = ()) -> None:
        self.diagnostics.error(span, message, notes=notes)
        raise _StopError


class _Driver(_Macros):
    """Read files, obey directives, and write the result."""

    def __init__(self, diagnostics: Diagnostics, include_dirs: Sequence[Path]) -> None:
        super().__init__(diagnostics)
        self.include_dirs = [str(directory) for directory in include_dirs]
        self.parts: list[str] = []
        self.runs: list[Run] = []
        self._size = 0
        self._read = 0
        self._files: dict[str, tuple[SourceFile, Preprocessed, list[Problem]]] = {}
        self._once: set[str] = set()
        self._including: list[tuple[str, Span]] = []
        self._reader: _Reader

    def define_on_command_line(self, name: str, value: str) -> None:
        """Define what ``-D name=value`` says."""
        source = SourceFile("<command line>", f"-D {name}={value}".replace("\n", " "))
        cleaned, problems = clean(source)
        for problem in problems:
            self.diagnostics.error(problem.span, problem.message)
        tokens = _Reader(source, cleaned, []).tokens(3, len(cleaned.text))
        tokens[1] = _Token("CPP_WS", " ")  # instead of the equals sign
        self.define(tokens)

    def file(self, source: SourceFile) -> None:
        """Preprocess one file."""
        if source.name not in self._files:
            self._files[source.name] = (source, *clean(source))
        source, cleaned, problems = self._files[source.name]
        self._read += len(source.text)
        if self._read > TEXT_LIMIT:
            refuse_long_text(source, self.diagnostics, self._including[-1][1] if self._including else None)
            raise _StopError
        self._reader = reader = _Reader(source, cleaned, problems)
        text = cleaned.text
        while (line := reader.next_line()) is not None:
            start, end = line
            directive = _DIRECTIVE.match(text, start, end)
            self._report_problems(reader, end)
            if directive is not None:
                self._directive(reader, directive.end() - 1, end)
                self._reader = reader
            elif reader.active:
                words = _WORD.findall(text, start, end)
                if any(w in self.macros or w in _DYNAMIC for w in words):
                    self._expand_line(reader, start, end)
                    continue
                self._copy(cleaned, start, end)
            self._copy(cleaned, end, min(end + 1, len(text)))
        self._report_problems(reader, len(text))
        for group in reader.groups:
            self.diagnostics.error(group.place, f"unterminated #{group.name}")

    def _report_problems(self, reader: _Reader, end: int) -> None:
        while reader.problems and reader.problems[-1].offset <= end:
            problem = reader.problems.pop()
            if reader.active or problem.message != "unterminated string":
                self.diagnostics.error(problem.span, problem.message)

    def _expand_line(self, reader: _Reader, start: int, end: int) -> None:
        text = reader.cleaned.text

        def line_tokens(start: int, end: int) -> list[_Token]:
            return reader.tokens(start, min(end + 1, len(text)))

        def more() -> list[_Token]:
            if _DIRECTIVE.match(text, reader.position):
                return []
            line = reader.next_line()
            if line is None:
                return []
            self._report_problems(reader, line[1])
            return line_tokens(*line)

        self._owed = 0
        previous: _Token | None = None
        for token in self.expand(line_tokens(start, end), more):
            if previous is not None and _would_join(previous, token):
                self._write(" ", token.span())
            self._write_token(token)
            previous = token

    def _write_token(self, token: _Token) -> None:
        place = token.place
        if token.use is not None or place.end - place.start != len(token.value) or place.text != token.value:
            self._write(token.value, token.span())
            return
        last = self.runs[-1] if self.runs else None
        if (
            last is None
            or last.span is not None
            or last.file is not place.file
            or last.source + self._size - last.start != place.start
        ):
            self.runs.append(Run(self._size, place.file, place.start, None))
        self.parts.append(token.value)
        self._size += len(token.value)

    def _write(self, text: str, span: Span) -> None:
        if text:
            self.runs.append(Run(self._size, span.file, span.start, span))
            self.parts.append(text)
            self._size += len(text)

    def _copy(self, cleaned: Preprocessed, start: int, end: int) -> None:
        for run, first, last in cleaned.runs(start, end):
            self.runs.append(Run(self._size, run.file, run.source + first - run.start, run.span))
            self.parts.append(cleaned.text[first:last])
            self._size += last - first

    def _directive(self, reader: _Reader, start: int, end: int) -> None:
        text = reader.cleaned.text
        self.place = place = reader.cleaned.span(start, start + len(text[start:end].rstrip()))
        tokens = self.tokenstrip(reader.tokens(start + 1, end))
        if not tokens or tokens[0].type == "CPP_INTEGER":  # "#" alone, and the line markers of another preprocessor
            return
        name, arguments = tokens[0].value, self.tokenstrip(tokens[1:])
        if name in _CONDITIONALS:
            self._conditional(reader, name, arguments, place)
        elif not reader.active or name in ("pragma", "line", "ident"):
            if reader.active and name == "pragma" and arguments and arguments[0].value == "once":
                self._once.add(os.path.realpath(reader.source.name))
        elif name == "define":
            self.define(arguments)
        elif name == "undef":
            if self._name(name, arguments):
                self.macros.pop(arguments[0].value, None)
        elif name == "include":
            self._include(reader, arguments, place)
        elif name in ("error", "warning"):
            message = text[start:end].strip()
            (self.diagnostics.error if name == "error" else self.diagnostics.warning)(place, message)
        else:
            known = [f"#{n}" for n in sorted(_CONDITIONALS | _OTHERS)]
            hint = did_you_mean(f"#{name}", known)
            self.diagnostics.error(place, f"unknown directive '#{name}'", hint=hint)

    def _name(self, directive: str, arguments: list[_Token]) -> bool:
        """Return whether the directive names a macro; report it if not."""
        if arguments and arguments[0].type == "CPP_ID":
            return True
        self.diagnostics.error(self.place, f"malformed #{directive} directive", hint=f"write '#{directive} NAME'")
        return False

    def _conditional(self, reader: _Reader, name: str, arguments: list[_Token], place: Span) -> None:
        groups = reader.groups
        if name in ("if", "ifdef", "ifndef"):
            outer = reader.active
            active = outer and self._condition(name, arguments)
            groups.append(_Group(place, name, outer, active, active))
            return
        if not groups:
            self.diagnostics.error(place, f"#{name} without #if")
            return
        group = groups[-1]
        if name == "endif":
            groups.pop()
            return
        if group.has_else:
            self.diagnostics.error(place, f"#{name} after #else", notes=(Note("the #if is here", group.place),))
        group.active = False
        if name == "else":
            group.has_else = True
            group.active = group.outer and not group.taken
        elif group.outer and not group.taken:
            group.active = self._condition(name.removeprefix("el"), arguments, name)
        group.taken = group.taken or group.active

    def _condition(self, name: str, arguments: list[_Token], shown: str | None = None) -> bool:
        shown = shown or name
        if name == "if":
            return self._evaluate(shown, arguments)
        if not self._name(shown, arguments):
            return False
        return self.is_defined(arguments[0].value) == (name == "ifdef")

    def _evaluate(self, name: str, tokens: list[_Token]) -> bool:
        if not tokens:
            self.diagnostics.error(self.place, f"malformed #{name} directive", hint=f"write '#{name} EXPRESSION'")
            return False
        try:
            expanded = self.expand(self._replace_defined(tokens), None)
            return _Condition(self._replace_defined(expanded)).evaluate()
        except _ConditionError as error:
            span = error.token.span() if error.token is not None else self.place
            self.diagnostics.error(span, f"malformed #{name} directive: {error}")
            return False

    def _replace_defined(self, tokens: list[_Token]) -> list[_Token]:
        result: list[_Token] = []
        rest = [t for t in tokens if t.type != "CPP_WS"][::-1]
        while rest:
            token = rest.pop()
            if token.value == "defined":
                parenthesis = bool(rest) and rest[-1].value == "(" and bool(rest.pop())
                if not rest or rest[-1].type != "CPP_ID":
                    raise _ConditionError("'defined' needs a name", token)
                value = str(int(self.is_defined(rest.pop().value)))
                if parenthesis and (not rest or rest.pop().value != ")"):
                    raise _ConditionError("'defined(' has no ')'", token)
                token = _Token("CPP_INTEGER", value, token.place, token.use)
            result.append(token)
        return result

    def _include(self, reader: _Reader, arguments: list[_Token], place: Span) -> None:
        if arguments and arguments[0].value != "<" and arguments[0].type != "CPP_STRING":
            arguments = self.tokenstrip(self.expand(arguments, None))
        values = [t.value for t in arguments]
        if arguments and arguments[0].type == "CPP_STRING":
            name = values[0][1:-1]
            here = [str(Path(reader.source.name).parent)]
        elif values and values[0] == "<" and ">" in values:
            name = "".join(values[1 : values.index(">")])
            here = []
        else:
            name, here = "", []
        if not name:
            self.diagnostics.error(place, "malformed #include directive", hint="write '#include \"FILE\"'")
            return
        directories = [*here, *self.include_dirs]
        try:
            source = self._find(name, directories)
        except SourceError as error:
            first = error.diagnostics[0]
            self.diagnostics.error(place, first.message, notes=first.notes, hint=first.hint)
            return
        if source is None:
            shown = ", ".join(f"'{d}'" for d in dict.fromkeys(directories))
            self.diagnostics.error(
                place,
                f"cannot find include file '{name}'",
                notes=(Note(f"searched in {shown}" if shown else "there are no include directories"),),
                hint="name its directory with '-I DIR'",
            )
        elif os.path.realpath(source.name) not in self._once:
            self._enter(source, reader, place)

    def _find(self, name: str, directories: list[str]) -> SourceFile | None:
        for directory in directories:
            path = str(Path(directory, name))
            if path in self._files:
                return self._files[path][0]
            try:
                readable = Path(path).exists() and not Path(path).is_dir()
            except OSError:  # such as a directory that may not be searched
                readable = False
            if readable:
                return read_source(Path(path))
        return None

    def _enter(self, source: SourceFile, reader: _Reader, place: Span) -> None:
        self._including.append((reader.source.name, place))
        if len(self._including) > _INCLUDE_DEPTH:
            names = [name for name, _ in self._including]
            first = max((i for i, name in enumerate(names) if name == source.name), default=len(names) - 1)
            notes = tuple(Note(f"included from '{n}'", p) for n, p in reversed(self._including[first:-1]))
            self._stop(place, f"'{source.name}' is included more than {_INCLUDE_DEPTH} files deep", notes)
        self.file(source)
        self._including.pop()


def _text(macro: Any) -> tuple[object, ...]:
    return macro.arglist, macro.variadic, [" " if t.type == "CPP_WS" else t.value for t in macro.value]


def _would_join(first: _Token, second: _Token) -> bool:
    """Return whether two tokens that are not neighbours in the source would read as others when put together."""
    if first.type == "CPP_WS" or second.type == "CPP_WS":
        return False
    if first.use is None and second.use is None and first.place.end == second.place.start:
        return False
    matched = _LEXEMES.match(first.value + second.value)
    return matched is not None and matched.end() != len(first.value)


class _ConditionError(Exception):
    """Say what is wrong with the expression of an #if."""

    def __init__(self, message: str, token: _Token | None = None) -> None:
        super().__init__(message)
        self.token = token


class _Number(NamedTuple):
    """Hold a 64-bit integer; ``unsigned`` if C would make it uintmax_t."""

    value: int
    unsigned: bool

    @classmethod
    def of(cls, value: int, unsigned: bool) -> _Number:
        value &= (1 << 64) - 1
        return cls(value - (1 << 64) if not unsigned and value >> 63 else value, unsigned)


_LEVELS = "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"
_PRECEDENCE = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators.split()}
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)([uU]?[lL]{0,2}|[lL]{1,2}[uU])")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11}


class _Condition:
    """Evaluate the expression of an #if, after expansion, as C does."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._rest = tokens[::-1]
        self._depth = 0

    def evaluate(self) -> bool:
        result = self._ternary(live=True)
        if self._rest:
            raise _ConditionError(f"unexpected '{self._rest[-1].value}'", self._rest[-1])
        return result.value != 0

    def _accept(self, value: str) -> _Token | None:
        return self._rest.pop() if self._rest and self._rest[-1].value == value else None

    def _ternary(self, *, live: bool) -> _Number:
        self._depth += 1
        if self._depth > 60:
            raise _ConditionError("the expression nests too deep")
        result = self._binary(0, live=live)
        if self._accept("?"):
            yes = self._ternary(live=live and result.value != 0)
            if not self._accept(":"):
                raise _ConditionError("'?' without ':'")
            no = self._ternary(live=live and result.value == 0)
            result = _Number.of((yes if result.value else no).value, yes.unsigned or no.unsigned)
        self._depth -= 1
        return result

    def _binary(self, level: int, *, live: bool) -> _Number:
        left = self._unary(live=live)
        while self._rest and _PRECEDENCE.get(self._rest[-1].value, -1) >= level:
            operator = self._rest.pop()
            name = operator.value
            needed = live and not (name == "&&" and not left.value) and not (name == "||" and left.value)
            right = self._binary(_PRECEDENCE[name] + 1, live=needed)
            left = _apply(operator, left, right, live=needed)
        return left

    def _unary(self, *, live: bool) -> _Number:
        if not self._rest:
            raise _ConditionError("the expression ends too early")
        signs: list[str] = []
        while self._rest and self._rest[-1].value in "+-!~":
            signs.append(self._rest.pop().value)
        if self._accept("("):
            result = self._ternary(live=live)
            if not self._accept(")"):
                raise _ConditionError("a '(' has no ')'")
        elif self._rest:
            result = _constant(self._rest.pop())
        else:
            raise _ConditionError("the expression ends too early")
        for sign in reversed(signs):
            if sign == "!":
                result = _Number(int(not result.value), False)
            elif sign != "+":
                result = _Number.of(-result.value if sign == "-" else ~result.value, result.unsigned)
        return result


def _constant(token: _Token) -> _Number:
    text = token.value
    if token.type == "CPP_ID":
        return _Number(0, False)
    if token.type == "CPP_CHAR" and (
        m := re.fullmatch(r"L?'(?:([^\\])|\\([0-7]{1,3})|\\x([\da-fA-F]{1,8})|\\(.))'", text)
    ):
        plain, octal, hexadecimal, escape = m.groups()
        if plain:
            return _Number(ord(plain), False)
        if escape:
            return _Number(_ESCAPES.get(escape, ord(escape)), False)
        return _Number(int(octal, 8) if octal else int(hexadecimal, 16), False)
    if (m := _INTEGER.fullmatch(text)) and len(text) < 100:
        digits = m.group(1)
        octal_digits = digits[0] == "0" and digits.isdigit()
        value = int(digits, 8) if octal_digits else int(digits, 0)
        return _Number.of(value, "u" in m.group(2).lower() or value >> 63 != 0)
    raise _ConditionError(f"unexpected '{text}'", token)


def _apply(operator: _Token, left: _Number, right: _Number, *, live: bool) -> _Number:
    name, a, b = operator.value, left.value, right.value
    if name in ("&&", "||"):
        return _Number(int(bool(a and b) if name == "&&" else bool(a or b)), False)
    if name in ("<<", ">>"):
        if b < 0:
            name, b = "<<>>".replace(name, ""), -b
        shifted = a << min(b, 64) if name == "<<" else a >> min(b, 64)
        return _Number.of(shifted, left.unsigned)
    unsigned = left.unsigned or right.unsigned
    a, b = _Number.of(a, unsigned).value, _Number.of(b, unsigned).value
    if name in ("==", "!=", "<", "<=", ">", ">="):
        order = {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}
        return _Number(int(order[name]), False)
    if name in ("/", "%"):
        if b == 0:
            if live:
                raise _ConditionError("division by zero", operator)
            return _Number(0, unsigned)
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return _Number.of(quotient if name == "/" else a - quotient * b, unsigned)
    table = {"|": a | b, "^": a ^ b, "&": a & b, "+": a + b, "-": a - b, "*": a * b}
    return _Number.of(table[name], unsigned)
