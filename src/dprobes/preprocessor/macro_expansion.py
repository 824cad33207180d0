"""
One macro: its definition (C11 6.10.3) and the replacement of its parameters (6.10.3.1 to 6.10.3.3).

The body is checked and classified once, when the macro is defined. So the replacement of parameters can fail only by
exceeding a limit. A macro does not need the other macros: a callable expands its arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Note
from dprobes.preprocessor.mapped_text import DirectiveError, StopError
from dprobes.source_text import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor.mapped_text import Preprocessed

__all__ = ["Macros", "Token", "strip", "tokenize", "would_join"]

# The place of a token never changes: the character range in the file, or in the definition, where it was written.

# A comment sign is a token, so that two adjacent tokens cannot form one by accident.
_LEXEME = re.compile(
    r"""(?P<blank>[ \t\f\v]+|\n)
    |(?P<character>L?'(?:[^'\\\n]|\\.){1,64}')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"?)
    |(?P<other>//|/\*|\#\#|<<=|>>=|->|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|(?s:.))""",
    re.VERBOSE | re.ASCII,
)


class Use(NamedTuple):
    """The use of a macro that produced a token: its name, its place, and the use that produced it in turn."""

    name: str
    place: Span
    outer: Use | None


BODY = Use("", Span(SourceFile("", ""), 0, 0), None)
"""The placeholder for the use of a macro in the tokens of its definition, which distinguishes them from arguments."""


@dataclass(slots=True, eq=False)
class Token:
    """
    A token; ``kind`` is a group of the pattern above.

    ``hide`` has the names of the macros that must not expand it again.
    """

    kind: str
    text: str
    place: Span
    use: Use | None = None
    hide: frozenset[str] = frozenset()

    def outermost(self) -> Span:
        """Return the place in the program text, outside of all macros."""
        place, use = self.place, self.use
        while use is not None:
            place, use = use.place, use.outer
        return place

    def span(self) -> Span:
        """Return the place of use, with the expansions down to the definitions."""
        span, use = self.place, self.use
        while use is not None:
            span = Span(use.place.file, use.place.start, use.place.end, Expansion(use.name, span))
            use = use.outer
        return span


def tokenize(text: Preprocessed, start: int, end: int) -> list[Token]:
    """Return the tokens, blanks included, of a range of a text without comments."""
    span = text.span
    return [
        Token(str(m.lastgroup), m.group(), span(m.start(), m.end())) for m in _LEXEME.finditer(text.text, start, end)
    ]


def lex(text: str) -> list[tuple[str, str]]:
    """Return pairs of kind and text of the preprocessing tokens in ``text``."""
    return [(str(m.lastgroup), m.group()) for m in _LEXEME.finditer(text)]


def strip(tokens: list[Token]) -> list[Token]:
    """Return the tokens without the blanks at both ends."""
    start, end = 0, len(tokens)
    while start < end and tokens[start].kind == "blank":
        start += 1
    while start < end and tokens[end - 1].kind == "blank":
        end -= 1
    return tokens[start:end]


def would_join(first: Token, second: Token) -> bool:
    """Return whether two tokens, printed without a blank between them, would be read as other tokens."""
    if "blank" in (first.kind, second.kind):
        return False
    if first.use is None and second.use is None and first.place.end == second.place.start:
        return False
    matched = _LEXEME.match(first.text + second.text)
    return matched is not None and matched.end() != len(first.text)


DYNAMIC = frozenset({"__LINE__", "__FILE__", "__COUNTER__"})
"""Macros whose text depends on the place or time of use. They cannot be defined."""

_PASTE_LIMIT = 1024  # characters, because a long chain of '##' takes quadratic time
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUOTED = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Macro:
    """
    Macro of a program.

    ``parameters`` is None for a macro without parentheses. If it is ``variadic``, the last parameter gets all further
    arguments.

    A body has further kinds of tokens: ``parameter``, ``stringise`` (a parameter after ``#``), ``paste`` (``##``), and
    ``optional`` and ``end`` around the contents of the parentheses of ``__VA_OPT__``.
    """

    name: Token
    parameters: tuple[str, ...] | None
    variadic: bool
    body: tuple[Token, ...]

    def same_as(self, other: Macro) -> bool:
        """Return whether the definitions are equal in the sense of C11 6.10.3 (2): all blanks count as equal."""
        mine, others = ([(t.kind, t.kind == "blank" or t.text) for t in m.body] for m in (self, other))
        return (self.parameters, self.variadic, mine) == (other.parameters, other.variadic, others)

    def replace(
        self, arguments: Mapping[str, list[Token]], expand: Callable[[list[Token]], list[Token]]
    ) -> list[Token]:
        """
        Return the body with the arguments in it; ``expand`` expands the argument of a parameter without an operator.

        As in GNU C, ``, ## __VA_ARGS__`` pastes nothing, and the comma is removed without variable arguments.
        """
        out: list[Token] = []
        expanded: dict[str, list[Token]] = {}
        body = self._body_for(arguments, expand)
        for index, token in enumerate(body):
            if token.kind == "paste":
                continue
            pasted = index > 0 and body[index - 1].kind == "paste"
            value = [token]
            if token.kind == "stringise":
                value = [_stringise(arguments.get(token.text, []), token)]
            elif token.kind == "parameter":
                value = arguments.get(token.text, [])
                if pasted or (index + 1 < len(body) and body[index + 1].kind == "paste"):
                    value = value or [Token("blank", "", token.place, BODY)]  # a placemarker, C11 6.10.3.3 (2)
                else:
                    if token.text not in expanded:
                        expanded[token.text] = expand(value)
                    value = expanded[token.text]
            if pasted and self._follows_comma(token, out[-1]):
                if token.text not in arguments:
                    out.pop()
            elif pasted:
                place = body[index - 2].place.to(token.place)
                value = [*_paste(out.pop(), value[0], place), *value[1:]]
            out += value
        return [token for token in out if token.text]

    def _body_for(
        self, arguments: Mapping[str, list[Token]], expand: Callable[[list[Token]], list[Token]]
    ) -> Sequence[Token]:
        """
        Return the body with each ``__VA_OPT__(...)`` replaced by its contents or a placemarker (C23 6.10.5.2).

        ``arguments`` are those of the call by parameter; ``expand`` expands the macros in the variable ones.
        """
        if not any(token.kind == "optional" for token in self.body):
            return self.body
        assert self.parameters is not None
        is_given = any(token.kind != "blank" for token in expand(arguments.get(self.parameters[-1], [])))
        body: list[Token] = []
        is_inside, size = False, 0
        for token in self.body:
            if token.kind == "optional":
                is_inside, size = True, len(body)
            elif token.kind == "end":
                is_inside = False
                if len(body) == size:
                    body.append(Token("blank", "", token.place, BODY))
            elif is_given or not is_inside:
                body.append(token)
        return body

    def _follows_comma(self, token: Token, before: Token) -> bool:
        return (
            self.variadic
            and self.parameters is not None
            and (token.kind, token.text) == ("parameter", self.parameters[-1])
            and (before.text, before.use) == (",", BODY)
        )


def parse_definition(tokens: list[Token]) -> Macro:
    """Return the macro that the tokens after ``#define`` define; raise ``DirectiveError`` if they are malformed."""
    if not tokens or tokens[0].kind != "name":
        raise DirectiveError("malformed #define directive", hint="write '#define NAME TEXT'")
    name, rest = tokens[0], tokens[1:]
    if name.text == "defined" or name.text in DYNAMIC:
        raise DirectiveError(f"'{name.text}' cannot be the name of a macro", name.place)
    parameters: tuple[str, ...] | None = None
    variadic = False
    if rest and rest[0].text == "(":
        end = next((i for i, token in enumerate(rest) if token.text == ")"), 0)
        if not end:
            raise DirectiveError("missing ')' in macro arguments")
        parameters, variadic = _parse_parameters(name.text, "".join(token.text for token in rest[1:end]))
        rest = rest[end + 1 :]
    body = _parse_body(strip(rest), parameters)
    return Macro(name, parameters, variadic, tuple(_mark_optional(body) if variadic else body))


def _parse_parameters(macro: str, text: str) -> tuple[tuple[str, ...], bool]:
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    variadic = bool(names) and names[-1].endswith("...")
    if variadic:
        names[-1] = names[-1].removesuffix("...").rstrip() or "__VA_ARGS__"
    if not all(_NAME.fullmatch(name) for name in names):
        raise DirectiveError("malformed #define directive")
    if len(set(names)) < len(names):
        raise DirectiveError(f"macro '{macro}' has two parameters of the same name")
    return tuple(names), variadic


def _parse_body(tokens: list[Token], parameters: tuple[str, ...] | None) -> list[Token]:
    body: list[Token] = []
    names = frozenset(parameters or ())
    sign: Token | None = None  # a '#' that waits for its parameter
    for token in tokens:
        kind, place = token.kind, token.place
        operator = sign is not None or (bool(body) and body[-1].kind == "paste")
        if kind == "blank" and operator:
            continue
        if sign is not None:
            if token.text not in names:
                break
            kind, place, sign = "stringise", sign.place.to(place), None
        elif token.text == "#" and parameters is not None:
            sign = token
            continue
        elif token.text == "##":
            kind = "paste"
            if body and body[-1].kind == "blank":
                body.pop()
        elif token.text in names:
            kind = "parameter"
        body.append(Token(kind, token.text, place, BODY))
    if sign is not None:
        raise DirectiveError("'#' is not followed by a parameter of the macro", sign.place)
    for token in body[:1] + body[-1:]:
        if token.kind == "paste":
            raise DirectiveError("'##' cannot be at either end of a macro", token.place)
    return body


def _mark_optional(body: list[Token]) -> list[Token]:
    """Return the body with ``optional`` and ``end`` around the contents of ``__VA_OPT__``, without its parentheses."""
    marked: list[Token] = []
    index = 0
    while index < len(body):
        token = body[index]
        index += 1
        if token.text != "__VA_OPT__":
            marked.append(token)
            continue
        inside, index = _parenthesised(body, index, token)
        if any(inner.text == "__VA_OPT__" for inner in inside):
            raise DirectiveError("'__VA_OPT__' inside '__VA_OPT__'", token.place)
        for inner in inside[:1] + inside[-1:]:
            if inner.kind == "paste":
                raise DirectiveError("'##' cannot be at either end of '__VA_OPT__'", inner.place)
        marked += [Token("optional", "", token.place, BODY), *inside, Token("end", "", token.place, BODY)]
    return marked


def _parenthesised(body: list[Token], start: int, name: Token) -> tuple[list[Token], int]:
    """
    Return the tokens between the parentheses after index ``start`` of a body, and the index after them.

    ``name`` is the token that needs the parentheses, for the error.
    """
    while start < len(body) and body[start].kind == "blank":
        start += 1
    depth = 0
    for index in range(start, len(body)):
        depth += (body[index].text == "(") - (body[index].text == ")")
        if depth == 0:
            if index > start:
                return strip(body[start + 1 : index]), index + 1
            break
    raise DirectiveError(f"'{name.text}' needs tokens in parentheses after it", name.place)


def _stringise(argument: list[Token], operator: Token) -> Token:
    parts: list[str] = []
    for token in argument:
        if token.kind == "blank":
            parts += " " if parts[-1] != " " else ""
        elif token.kind in ("string", "character"):
            parts.append(_QUOTED.sub(r"\\\g<0>", token.text))
        else:
            parts.append(token.text)
    return Token("string", f'"{"".join(parts)}"', operator.place, BODY)


def _paste(left: Token, right: Token, place: Span) -> list[Token]:
    """
    Return the tokens of ``left`` and ``right`` joined by ``##``; ``place`` is that of the macro call.

    More than one token is undefined in C, but common in assembler programs.
    """
    if not right.text or not left.text:
        return [left if left.text else right]
    text = left.text + right.text
    if len(text) > _PASTE_LIMIT:
        raise StopError(f"'##' makes a token of more than {_PASTE_LIMIT} characters", place)
    return [Token(kind, text, place, BODY, left.hide & right.hide) for kind, text in lex(text)]


# Prosser's algorithm (from which C11 6.10.3.4 was written): the replacement of a macro is put back in front of the
# unread tokens, and records the macros that must not expand it again. So it always ends; limits bound its time.

_MACRO_DEPTH = 200
_ARGUMENT_DEPTH = 50
_EXPANSION_LIMIT = 4 << 20  # characters that macros may produce; a token counts as at least four


class Macros:
    """The macros of one program, and their expansion; ``diagnostics`` receives calls with wrong arguments."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._macros: dict[str, Macro] = {}
        self._counter = 0
        self._produced = 0
        self._depth = 0

    def __contains__(self, name: str) -> bool:
        return name in self._macros or name in DYNAMIC

    def define(self, tokens: list[Token]) -> None:
        """Define a macro from the tokens after ``#define``; raise ``DirectiveError`` if they are malformed."""
        macro = parse_definition(tokens)
        name, before = macro.name, self._macros.get(macro.name.text)
        if before is not None and not before.same_as(macro):
            notes = (Note("the previous definition is here", before.name.place),)
            self._diagnostics.warning(name.place, f"macro '{name.text}' is redefined", notes=notes)
        self._macros[name.text] = macro

    def undefine(self, name: str) -> None:
        """Remove the definition of a macro, as ``#undef`` does; do nothing if there is none."""
        self._macros.pop(name, None)

    def expand(self, tokens: list[Token], more: Callable[[], list[Token]] | None = None) -> list[Token]:
        """Return the expanded tokens; raise ``StopError`` at a limit. ``more`` returns the tokens of the next line."""
        stack = tokens[::-1]
        out: list[Token] = []
        while stack:
            token = stack.pop()
            if token.kind != "name":
                out.append(token)
            elif token.text in DYNAMIC:
                out.append(self._dynamic(token))
            elif (macro := self._macros.get(token.text)) is None or token.text in token.hide:
                out.append(token)
            elif macro.parameters is None:
                self._push(stack, macro.replace({}, self._expand_argument), token, token.place, token.hide)
            elif (call := self._call(stack, macro, token, more)) is None:
                out.append(token)
            elif (arguments := self._bind(macro, call[0], token)) is not None:
                close = call[1]
                place = token.place.to(close.place) if close.use is token.use else token.place
                body = macro.replace(arguments, self._expand_argument)
                self._push(stack, body, token, place, token.hide & close.hide)
        return out

    def _expand_argument(self, tokens: list[Token]) -> list[Token]:
        self._depth += 1
        if self._depth > _ARGUMENT_DEPTH:
            place = tokens[0].span() if tokens else None
            raise StopError(f"macro arguments nest more than {_ARGUMENT_DEPTH} deep", place)
        result = self.expand(tokens)
        self._depth -= 1
        return result

    def _push(self, stack: list[Token], body: list[Token], name: Token, place: Span, hide: frozenset[str]) -> None:
        """
        Push a macro's body, with arguments substituted, onto the stack of unread tokens for rescanning.

        ``name`` is the replaced token, ``place`` that of the macro call. ``hide`` are the macros that are not expanded
        in the body (Prosser's algorithm).
        """
        hide |= {name.text}
        if len(hide) > _MACRO_DEPTH:
            raise StopError(f"macros nest more than {_MACRO_DEPTH} deep", name.outermost())
        self._produced += 4 + sum(max(4, len(token.text)) for token in body)
        if self._produced > _EXPANSION_LIMIT:
            raise StopError(f"macros produce more than {_EXPANSION_LIMIT >> 20} MiB of text", name.outermost())
        use = Use(name.text, place, name.use)
        for token in reversed(body):
            new_use = use if token.use is BODY else token.use
            stack.append(Token(token.kind, token.text, token.place, new_use, token.hide | hide))

    def _call(
        self, stack: list[Token], macro: Macro, name: Token, more: Callable[[], list[Token]] | None
    ) -> tuple[list[list[Token]], Token] | None:
        """
        Remove the arguments of a macro call and its ')' from ``stack``, and return both; return None if no '(' follows.

        ``more`` returns the tokens of the next line, none at the end; None as ``more`` means that the call has to end
        in ``stack``.
        """
        blanks: list[Token] = []
        while not stack or stack[-1].kind == "blank":
            if stack:
                blanks.append(stack.pop())
            elif more is not None and (line := more()):
                stack.extend(reversed(line))
            else:
                break
        if not stack or stack[-1].text != "(":
            stack.extend(reversed(blanks))
            return None
        stack.pop()
        assert macro.parameters is not None
        arguments: list[list[Token]] = [[]]
        nesting = 1
        while True:
            if not stack:
                if more is None or not (line := more()):
                    raise StopError(f"the arguments of macro '{name.text}' have no ')'", name.span())
                stack.extend(reversed(line))
            token = stack.pop()
            if token.text == "\n":
                token = Token("blank", " ", token.place, token.use)
            nesting += (token.text == "(") - (token.text == ")")
            if nesting == 0:
                return arguments, token
            separates = not macro.variadic or len(arguments) < len(macro.parameters)
            if token.text == "," and nesting == 1 and separates:
                arguments.append([])
            else:
                arguments[-1].append(token)

    def _bind(self, macro: Macro, found: list[list[Token]], name: Token) -> dict[str, list[Token]] | None:
        """
        Return the arguments of a call by parameter, without omitted variable ones.

        ``found`` are the arguments between the commas. Report a wrong number of them, and return None.
        """
        assert macro.parameters is not None
        arguments = [strip(argument) for argument in found]
        wanted = len(macro.parameters)
        if arguments == [[]] and wanted == macro.variadic:
            arguments = []
        if len(arguments) == wanted or (macro.variadic and len(arguments) == wanted - 1):
            return dict(zip(macro.parameters, arguments, strict=False))
        least = "at least " if macro.variadic else ""
        wanted -= macro.variadic
        self._diagnostics.error(
            name.span(),
            f"macro '{name.text}' takes {least}{wanted} argument{'s' * (wanted != 1)}, but {len(arguments)} given",
            notes=(Note("the macro is defined here", macro.name.place),),
        )
        return None

    def _dynamic(self, token: Token) -> Token:
        place = token.outermost()
        kind, text = "number", str(place.line)
        if token.text == "__COUNTER__":
            text = str(self._counter)
            self._counter += 1
        elif token.text == "__FILE__":
            name = place.file.name.replace("\\", "\\\\").replace('"', '\\"')
            kind, text = "string", f'"{name}"'
        return Token(kind, text, token.place, token.use)
