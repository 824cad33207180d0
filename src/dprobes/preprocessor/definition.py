"""
One macro: its definition (C11 6.10.3) and the replacement of its parameters (6.10.3.1 to 6.10.3.3).

The body is checked and classified once, when the macro is defined, so that replacing parameters fails at a limit only.
Other macros are not known here; arguments are expanded by a callable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.preprocessor.problems import DirectiveError, StopError
from dprobes.preprocessor.tokens import BODY, Token, lex, strip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.source import Span

__all__ = ["DYNAMIC", "Macro", "parse_definition"]

DYNAMIC = frozenset({"__LINE__", "__FILE__", "__COUNTER__"})
"""The macros whose text depends on where or when they are used; nobody can define them."""

_PASTE_LIMIT = 1024  # characters, or a long chain of '##' takes quadratic time
_NAME = lazy_pattern(r"[A-Za-z_]\w*", re.ASCII)
_QUOTED = lazy_pattern(r'["\\]')


@dataclass(frozen=True, slots=True)
class Macro:
    """
    Hold a macro; ``parameters`` is None for one without parentheses, and the last takes the rest if ``variadic``.

    To the kinds of tokens a body adds ``parameter``, ``stringise`` (a parameter after ``#``), ``paste`` (``##``), and
    ``optional`` and ``end`` around what ``__VA_OPT__`` has in its parentheses.
    """

    name: Token
    parameters: tuple[str, ...] | None
    variadic: bool
    body: tuple[Token, ...]

    def same_as(self, other: Macro) -> bool:
        """Return whether the definitions are the same, as C11 6.10.3 (2) means it: blanks are all alike."""
        mine, others = ([(t.kind, t.kind == "blank" or t.text) for t in m.body] for m in (self, other))
        return (self.parameters, self.variadic, mine) == (other.parameters, other.variadic, others)

    def replace(
        self, arguments: Mapping[str, list[Token]], expand: Callable[[list[Token]], list[Token]]
    ) -> list[Token]:
        """
        Return the body with the arguments in it; ``expand`` makes of one what replaces a parameter without operator.

        As in GNU C, ``, ## __VA_ARGS__`` pastes nothing, and the comma goes if the variable arguments are left out.
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
        """Return the body with ``__VA_OPT__(...)`` decided: what is in it, or a placemarker (C23 6.10.5.2)."""
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
    """Return the macro that the tokens after ``#define`` define; raise ``DirectiveError`` if they are wrong."""
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
    """Return the body with ``optional`` and ``end`` in place of ``__VA_OPT__``, its parentheses and blanks in them."""
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
    """Return the tokens between the parentheses that follow ``start``, and the index behind them."""
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
    """Return what both together read as; in C more than one token is undefined, in assembler programs it is usual."""
    if not right.text or not left.text:
        return [left if left.text else right]
    text = left.text + right.text
    if len(text) > _PASTE_LIMIT:
        raise StopError(f"'##' makes a token of more than {_PASTE_LIMIT} characters", place)
    return [Token(kind, text, place, BODY, left.hide & right.hide) for kind, text in lex(text)]
