"""
The defined macros and their expansion, by Prosser's algorithm (the one that C11 6.10.3.4 was written from).

What a macro produces goes back in front of the tokens still to be read, and each of its tokens remembers the macros
that must not expand it again. So expansion does not recurse, but for arguments, and it always ends; three limits keep
the end near. Files and directives are not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.preprocessor.definition import DYNAMIC, Macro, parse_definition
from dprobes.preprocessor.problems import StopError
from dprobes.preprocessor.tokens import BODY, Token, Use, strip

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.diagnostics import Diagnostics
    from dprobes.source import Span

__all__ = ["Macros"]

_MACRO_DEPTH = 200
_ARGUMENT_DEPTH = 50
_EXPANSION_LIMIT = 4 << 20  # characters that macros may produce; a token counts as at least four


class Macros:
    """Hold and expand the macros of one program; uses with a wrong number of arguments go to ``diagnostics``."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._macros: dict[str, Macro] = {}
        self._counter = 0
        self._produced = 0
        self._depth = 0

    def __contains__(self, name: str) -> bool:
        return name in self._macros or name in DYNAMIC

    def define(self, tokens: list[Token]) -> None:
        """Define a macro from the tokens after ``#define``; raise ``DirectiveError`` if they are wrong."""
        macro = parse_definition(tokens)
        name, before = macro.name, self._macros.get(macro.name.text)
        if before is not None and not before.same_as(macro):
            notes = (Note("the previous definition is here", before.name.place),)
            self._diagnostics.warning(name.place, f"macro '{name.text}' is redefined", notes=notes)
        self._macros[name.text] = macro

    def undefine(self, name: str) -> None:
        """Forget the macro, if there is one."""
        self._macros.pop(name, None)

    def expand(self, tokens: list[Token], more: Callable[[], list[Token]] | None = None) -> list[Token]:
        """
        Return the tokens after expansion; raise ``StopError`` when they become too many.

        When the arguments of a macro may go on, ``more`` is called for the tokens of the next line.
        """
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
        """Put the replaced body of the macro ``name``, used at ``place``, back in front of the rest."""
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
        """Take the arguments of a call and its ')' off the stack; without '(' return None."""
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
        """Return the arguments by parameter, without variable ones left out; report a wrong number and return None."""
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
