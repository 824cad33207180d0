"""
Parser of programs: the ``module`` statement, declarations, functions, and probepoints with their blocks.

::

    program   = { module ";" | declaration | function | probe | tool }
    module    = "module" PLACE { "," NAME [ NUMBER | STRING ] }
    probe     = [ "[" attribute { "," attribute } "]" ] point { "," point } ( [ condition ] block | ";" )
    condition = "when" "(" expression ")"
    attribute = NAME [ NUMBER | STRING ]
    point     = [ "return" ] ( place | "syscall" NAME | "kmod" NAME ":" NAME )
              | "inline" place | "usdt" place | "tracepoint" PLACE
              | "watch" ( "x" | "w" | "rw" | "io" | "in" | "out" ) [ "(" type ")" ] PLACE
              | "sample" ( HERTZ | COUNTER ":" NUMBER ) [ MODULE ]
    place     = PLACE [ "(" parameters ")" ]
    tool      = ( "begin" | "end" | "every" NUMBER ) block

A PLACE is a word up to a blank, bracket, comma or semicolon: ``libc.so.6:malloc+8``, ``"my lib":f``, ``python3:*``.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from dprobes.c_tokens import ParseError, Token, TokenKind
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.syntax.expression_parser import Cursor, TokenStream, string_value
from dprobes.dpc.syntax.statement_parser import StatementParser
from dprobes.dpc.syntax.syntax_tree import PERIOD_MAX, PERIOD_MIN
from dprobes.dpc.tracer_words import condition_of, place_hint, prefix_hint
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX
from dprobes.rpn.performance_counters import period_problem, unknown_counter_hint
from dprobes.rpn.program_text import Header, ValueKind, keywords_of
from dprobes.rpn.rpn_program import quoted, split_patch

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed
    from dprobes.rpn.program_text import Keyword
    from dprobes.source_text import Span

__all__ = ["MODULE_ATTRIBUTES", "POINT_WORDS", "PROBE_ATTRIBUTES", "parse"]

_MODULE_END = re.compile(r'(?P<module>"(?:[^"\\]|\\.)*"|[^":]*?):(?!:)(?P<place>.*)\Z')
_QUOTED_WHOLE = re.compile(r'"(?P<module>\.{0,2}/[^":]*|[^\s":()\[\]{}<>]+):(?!:)(?P<place>(?:[^"\\]|\\.)+)"\Z')
"""A module and a place in one pair of quotes; a colon inside the name of a function comes after a blank."""
_UNQUOTED = re.compile(r"[\w.:*?+@$/-]+\Z")
"""A place that needs no quotes."""
_SOURCE_LINE = re.compile(
    r"[^:\"]+\.(c|cc|cpp|cxx|C|c\+\+|h|hh|hpp|hxx|inl|ipp|tcc|def|rs|go|s|S|asm|y|l|m|mm|d|f|f90|pas|adb|zig|swift|cu)"
    r":[0-9]+(-[0-9]+)?"
)
"""A line of a file in a common language, without a module."""
_MORE_OF_PATH = re.compile(r"(?P<more>(?:[^\s\":]|::)+):(?!:)(?P<place>[^\"]*[A-Za-z_][^\"]*)")
"""The rest of an unquoted path with a second colon, from its first colon on; not a line of a source file."""
_SOURCE_FILE = re.compile(r".+\.[A-Za-z+]{1,4}")
_POINT_OF_OTHERS = re.compile(r"[ \t]+(?P<point>begin|end|[^\s{;=,:.]*[:.][^\s{;=]*)\s*(?:\{|when\b|if\b|/|\Z)")
"""Place of another tracer after a word. Its punctuation distinguishes it from a declared name after a type."""
_ATTRIBUTE = re.compile(r"(?P<name>\w+)\s*[=:]?\s*(?P<value>[0-9]\w*|\"[^\"]*\")?")
_RATE_DIGITS_MAX = 20
_FREQUENCY = re.compile(r"([0-9]+)hz\Z", re.IGNORECASE)
_EVENTS = re.compile(r"([a-z][a-z-]*):([0-9]{1,10})\Z")
_ACCESSES = ("x", "w", "rw", "io", "in", "out")
_NAME = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
"""Names of groups and types of probepoints."""

_STRING_LIMIT = "max_strlen"
_HEADER_WORDS = frozenset(("name", "modtype", "major", "minor", "offset", "address", "sampler", "opcode", "table"))
"""Words with which RPN programs begin."""
_STATEMENTS = ("printf", "print", "clear", "delete", "remove", "skip", "debugger", "core", "crash", "exit")
"""Calls that are allowed in blocks only."""
MODULE_ATTRIBUTES = ("major", "jmpmax", _STRING_LIMIT)
PROBE_ATTRIBUTES = (
    "maxhits", "passcount", "minor", "opcode", "group", "type", "logonfault", "patch", "persist", "idle", "replace",
)  # fmt: skip
"""The attributes of a ``module`` statement, and of a probe."""

_HEADERS = {MODULE_ATTRIBUTES: Header.FILE, PROBE_ATTRIBUTES: Header.POINT}
"""The headers of RPN that have statements with the same names and limits."""

_CALLED = {
    syntax_tree.PointKind.TRACEPOINT: "tracepoint",
    syntax_tree.PointKind.SYSTEM_CALL: "system call",
}
"""Names of the kinds of kernel points in messages."""

_USDT = "a statically defined probe of a module"
_NO_BLOCK = 'write [patch "./fix.so:parse"] MODULE:FUNCTION;'
_TIME = "write every 1s"
"""Hint for a block whose time between two executions is missing or has no unit."""

POINT_WORDS = ("inline", "usdt", "watch", "sample", "tracepoint", "syscall", "kmod", "begin", "end", "every")
"""The words with which probepoints and blocks of the tool begin."""


def parse(text: Preprocessed, diagnostics: Diagnostics) -> syntax_tree.ProgramTree:
    """Return the tree of a program without parts in error, which are reported to ``diagnostics``."""
    return _ProgramParser(Cursor(TokenStream(text, diagnostics), diagnostics)).program()


def split_place(word: str) -> tuple[str, str]:
    """Return the module, without quotes, and the place in it; the module is empty if the word names none."""
    word = _quoted_apart(word)
    match = _MODULE_END.match(word)
    if match is None or _SOURCE_LINE.fullmatch(word):
        return "", word
    module: str = match["module"]
    return re.sub(r"\\(.)", r"\1", module[1:-1]) if module.startswith('"') else module, match["place"]


def _quoted_apart(word: str) -> str:
    """Return a word with separate quotes for module and place if both are in the same quotes."""
    match = _QUOTED_WHOLE.match(word)
    if match is None or _SOURCE_LINE.fullmatch(word[1:-1]):
        return word
    place: str = match["place"]
    return f'"{match["module"]}":{place}' if _UNQUOTED.match(place) else f'"{match["module"]}":"{place}"'


def _hint_about_attributes(place: str, rest: str, *, has_others: bool) -> str:
    inner = rest[1:].partition("]")[0] if rest.startswith("[") else rest
    parts = [_ATTRIBUTE.match(each.strip()) for each in inner.split(",")]
    written = ", ".join(" ".join(filter(None, part.groups())) for part in parts if part is not None)
    whole = f"[{written}, {place.removeprefix('[')}" if has_others else f"[{written}] {place}"
    return f"write attributes before the place: {whole}"


def _hint_about_condition(place: str, rest: str, word: str) -> str:
    condition = rest.removeprefix(word).strip()
    if condition.startswith("(") and condition.endswith(")"):
        condition = condition[1:-1].strip()
    condition = f"!({condition})" if word == "unless" else condition
    if " when (" not in place:
        return f"write {place} when ({condition})"
    return f"write the whole condition in the parentheses after 'when': … && {condition})"


# Errors in places, each with the correct form; ``before`` is the text before the place.


def _end_of_others(module: str, place: str, before: str) -> tuple[str, str] | None:
    function, _, end = place.rpartition(":")
    if not module or not function or end not in ("return", "entry", "exit", "ret"):
        return None
    before = "" if end == "entry" else "return "
    return f"a function has no ':{end}'", f"write {before}{module}:{function}"


def _unquoted_path(module: str, place: str, before: str, *, is_usdt: bool) -> tuple[str, str] | None:
    if not module.startswith(("/", "./", "../")):
        return None
    if is_usdt:  # PROVIDER:NAME has its own colon
        more, _, rest = place.rpartition(":")[0].rpartition(":")
        if not more:
            return None
        before, quoted = "usdt ", f'"{module}:{more}":{rest}:{place.rpartition(":")[2]}'
    elif (match := _MORE_OF_PATH.fullmatch(place)) is None:
        return None
    elif _SOURCE_FILE.fullmatch(match["more"]) is not None:
        quoted = f'{module}:"{place}"'
    else:
        quoted = f'"{module}:{match["more"]}":{match["place"]}'
    return "write names with a ':' in double quotes", f"write {before}{quoted}"


def _other_patterns(module: str, place: str, before: str) -> tuple[str, str] | None:
    if module and re.fullmatch(r"\w+(?:\|\w+)+", place):
        each = ", ".join(f"{before}{module}:{name}" for name in place.split("|"))
        return "several places are separated by ','", f"write {each}"
    if "*" in module or "?" in module:
        hint = f"name the program or library: libc.so.6:{place or 'malloc'}"
        return "a module is named without '*' and '?'", hint
    if module and (match := re.fullmatch(r"/(\^?)(\w*)\.?\*?(\$?)/", place)) is not None:
        pattern = f"{'' if match[1] else '*'}{match[2]}{'' if match[3] else '*'}".replace("**", "*")
        return "functions are not named in slashes", f"write {before}{module}:{pattern}"
    return None


def _other_joints(word: str, before: str) -> tuple[str, str] | None:
    match = re.fullmatch(r"(?P<module>[^!`:]*\.so[\w.-]*|[/\w.-]+)(?:!|`|::)(?P<place>\w+)", word)
    if match is None or not (match["module"].count(".so") or "!" in word or "`" in word):
        match = re.fullmatch(r"(?P<module>[^/:]*\.so(?:\.[0-9]+)*)[./](?P<place>[A-Za-z_]\w*)", word)
    return (
        None if match is None else ("a module and a function are joined by ':'", f"write {before}{match[1]}:{match[2]}")
    )


class _ProgramParser:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._statements = StatementParser(cursor)
        self._declarations = self._statements.declarations

    def program(self) -> syntax_tree.ProgramTree:
        cursor = self._cursor
        module = ""
        attributes: tuple[syntax_tree.Attribute, ...] = ()
        declarations: list[syntax_tree.Declaration] = []
        functions: list[syntax_tree.Function] = []
        probes: list[syntax_tree.Probe] = []
        blocks: list[syntax_tree.ToolBlock] = []
        while cursor.peek().kind is not TokenKind.END:
            try:
                if cursor.accept(";"):
                    continue
                self._refuse_what_begins_no_item()
                if cursor.sees("module") and not cursor.sees("(", "{", distance=1):
                    module, attributes = self._module()
                elif self._is_keyword("begin", "end", "every", "BEGIN", "END"):
                    blocks.append(self._tool_block())
                elif self._is_function():
                    functions.append(self._function())
                elif self._is_declaration():
                    declarations.append(self._declarations.declaration())
                else:
                    probes.append(self._probe())
            except ParseError:
                cursor.skip_item()
        return syntax_tree.ProgramTree(module, attributes, declarations, functions, probes, blocks)

    def _refuse_what_begins_no_item(self) -> None:
        """Raise an error for a statement, or syntax of other tracers, where a probe or declaration may begin."""
        cursor = self._cursor
        token, following = cursor.peek(), cursor.peek(1)
        if token.text == "}" and token.kind is TokenKind.PUNCTUATION:
            raise cursor.wrong("this '}' closes nothing")
        if token.text == "{" and token.kind is TokenKind.PUNCTUATION:
            hint = "write a place before it: MODULE:FUNCTION { … }"
            raise cursor.wrong("expected a place to probe, found '{'", hint=hint)
        is_call = token.text in ("print", "printf") and following.text == "("
        if token.kind is TokenKind.TABLE or (is_call and cursor.peek(2).kind is TokenKind.STRING):
            written = cursor.tokens.text[token.start :].partition("\n")[0].strip("; ")
            hint = f"write it in the block of a probe: MODULE:FUNCTION {{ {written}; }}"
            raise cursor.wrong(f"expected a place to probe, found {token.described}", hint=hint)
        if token.text in ("when", "if") and following.text == "(":
            hint = "write the condition between the place and its block: MODULE:FUNCTION when (…) { … }"
            raise cursor.wrong(f"expected a place to probe, found '{token.text}'", hint=hint)
        if token.text in PROBE_ATTRIBUTES and following.kind is TokenKind.NUMBER:
            hint = f"write attributes in brackets before the place: [{token.text} {following.text}] MODULE:FUNCTION"
            raise cursor.wrong(f"expected a place to probe, found '{token.text}'", hint=hint)
        if token.kind is TokenKind.NAME and token.text not in cursor.typedefs:
            match = _POINT_OF_OTHERS.match(cursor.tokens.text, token.end)
            ours = None if match is None else prefix_hint(token.text, match["point"])
            if ours is not None:
                raise cursor.wrong(f"'{token.text}' must precede a place", hint=f"write '{ours}'")

    def _is_declaration(self) -> bool:
        """Return whether a declaration comes next; an unknown name begins a point."""
        return self._declarations.has_storage() or self._declarations.begins_type()

    def _is_function(self) -> bool:
        """Return whether ``type name(`` comes next."""
        cursor = self._cursor
        if cursor.sees(*POINT_WORDS, "return", "module") or cursor.sees("when", distance=1):
            return False
        if not self._declarations.begins_declaration():
            return False
        distance = 0
        while cursor.peek(distance).kind is TokenKind.NAME or cursor.sees("*", distance=distance):
            distance += 1
        return distance > 1 and cursor.sees("(", distance=distance)

    def _module(self) -> tuple[str, tuple[syntax_tree.Attribute, ...]]:
        cursor = self._cursor
        cursor.take()
        word = cursor.tokens.take_place_word()
        if not word.text:
            raise cursor.wrong(f"expected the name of a module, found {cursor.peek().described}")
        attributes = cursor.listed(partial(self._attribute, MODULE_ATTRIBUTES)) if cursor.accept(",") else []
        cursor.expect(";", "after the module")
        return word.text.strip('"'), tuple(attributes)

    def _attribute(self, known: tuple[str, ...]) -> syntax_tree.Attribute:
        cursor = self._cursor
        name = cursor.expect_name("the name of an attribute")
        value: int | str | None = None
        if cursor.peek().kind is TokenKind.NUMBER:
            value = int(self._number(cursor.take()))
        elif cursor.peek().kind is TokenKind.STRING:
            value = string_value(cursor.take().text)
        span = cursor.span_from(name)
        if name.text in MODULE_ATTRIBUTES and name.text not in known:
            raise cursor.wrong(
                f"'{name.text}' is not an attribute of a probe: all of the program has the same",
                span,
                f"write 'module NAME, {name.text} 5;'",
            )
        if name.text not in known:
            raise cursor.wrong(f"there is no attribute '{name.text}'", span, f"there are {', '.join(known)}")
        if name.text == _STRING_LIMIT:
            if not isinstance(value, int) or not 1 <= value < STRING_SIZE_MAX:
                message = f"'{name.text}' is a number of bytes from 1 to {STRING_SIZE_MAX - 1}"
                raise cursor.wrong(message, span, f"write '{name.text} 64'")
            return syntax_tree.Attribute(name.text, value, span)
        row = keywords_of(_HEADERS[known])[name.text]
        match row.kind:
            case ValueKind.BOOLEAN:
                if value is not None:
                    raise cursor.wrong(f"'{name.text}' has no value", span, f"write '{name.text}'")
                return syntax_tree.Attribute(name.text, "yes", span)
            case ValueKind.PATCH:
                if not isinstance(value, str) or split_patch(value) is None:
                    raise cursor.wrong(f"'{name.text}' needs {row.kind.value}", span, 'write patch "./fix.so:parse"')
                return syntax_tree.Attribute(name.text, quoted(value), span)
            case ValueKind.NAME | ValueKind.NAMES:
                return syntax_tree.Attribute(name.text, self._names(name.text, row, value, span), span)
        if not isinstance(value, int):
            raise cursor.wrong(f"'{name.text}' needs a number", span, f"write '{name.text} 5'")
        if not row.minimum <= value <= row.maximum:
            raise cursor.wrong(f"'{span.text}' is outside {row.minimum} to {row.maximum}", span)
        return syntax_tree.Attribute(name.text, value, span)

    def _names(self, attribute: str, row: Keyword, value: int | str | None, span: Span) -> str:
        names = value.lower().split() if isinstance(value, str) else []
        if not names or not all(_NAME.fullmatch(name) for name in names):
            raise self._cursor.wrong(f"'{attribute}' needs {row.kind.value}", span, f"write '{attribute} \"slow\"'")
        if row.kind is ValueKind.NAME and len(names) > 1:
            raise self._cursor.wrong(f"'{attribute}' takes one name", span, f"write '{attribute} \"{names[0]}\"'")
        return " ".join(names)

    def _number(self, token: Token) -> int:
        from dprobes.dpc.syntax.expression_parser import number_of

        return number_of(self._cursor, token).value

    def _function(self) -> syntax_tree.Function:
        cursor = self._cursor
        first = cursor.peek()
        cursor.accept("static")
        specifier = self._declarations.specifier()
        pointers = 0
        while cursor.accept("*"):
            pointers += 1
        name = cursor.expect_name("the name of a function")
        span = cursor.tokens.span(name)
        type_ = syntax_tree.TypeName(specifier, syntax_tree.Declarator("", pointers, (), span), specifier.span)
        cursor.expect("(", "after the name of a function")
        parameters = self._declarations.parameters()
        body = self._statements.block()
        return syntax_tree.Function(name.text, type_, parameters, body, cursor.span_from(first))

    def _tool_block(self) -> syntax_tree.ToolBlock:
        cursor = self._cursor
        first = cursor.take()
        if first.text in ("BEGIN", "END"):
            raise cursor.wrong(
                f"'{first.text}' is not a place", cursor.tokens.span(first), f"write '{first.text.lower()}'"
            )
        period, written = 0, first.text
        if first.text == "every":
            number = cursor.take() if cursor.peek().kind is TokenKind.NUMBER else None
            if number is None:
                raise cursor.wrong(f"expected a time after 'every', found {cursor.peek().described}", hint=_TIME)
            span = cursor.tokens.span(number)
            if re.fullmatch(r"[0-9]+[num]?s", number.text) is None:
                raise cursor.wrong(f"'{number.text}' is not a time", span, _TIME)
            period, written = self._number(number), f"every {number.text}"
            if not PERIOD_MIN <= period <= PERIOD_MAX:
                raise cursor.wrong(f"'{number.text}' is not from 10ms to one day", span)
        body = self._statements.block()
        kind = syntax_tree.BlockKind(first.text)
        return syntax_tree.ToolBlock(kind, body, cursor.span_from(first), written, period, order=first.start)

    # Points

    def _probe(self) -> syntax_tree.Probe:
        cursor = self._cursor
        first = cursor.peek()
        attributes: list[syntax_tree.Attribute] = []
        if cursor.accept("["):
            attributes = cursor.listed(partial(self._attribute, PROBE_ATTRIBUTES))
            if not cursor.sees("]"):
                message = f"expected ']' after the attributes, found {cursor.peek().described}"
                raise cursor.wrong(message, hint="write [maxhits 5, minor 3]: with ',' between them")
            cursor.take()
            if cursor.sees("["):
                hint = "write [maxhits 5, minor 3]: all of them in one pair of brackets"
                raise cursor.wrong("expected a place to probe, found '['", hint=hint)
            if cursor.peek().kind is TokenKind.END:
                message = "expected a place to probe, found the end of the program"
                raise cursor.wrong(message, cursor.span_from(first), "write attributes before the place")
        points = cursor.listed(self._point)
        is_patch = any(each.name == "patch" for each in attributes)
        if is_patch and cursor.accept(";"):
            span = cursor.span_from(first)
            body = syntax_tree.Block((), span)
            return syntax_tree.Probe(tuple(points), tuple(attributes), None, body, span, order=first.start)
        if is_patch and cursor.sees("when"):
            raise cursor.wrong("a patch has no condition: the patch itself can call the original", hint=_NO_BLOCK)
        condition = None
        if cursor.accept("when"):
            condition = self._statements.condition("when")
        else:
            self._refuse_filter(points[-1])
        if not cursor.sees("{"):
            message = f"expected '{{' at the start of a block, found {cursor.peek().described}"
            raise cursor.wrong(message, hint=self._hint_before_block(first, points[-1]))
        body = self._statements.block()
        return syntax_tree.Probe(
            tuple(points), tuple(attributes), condition, body, cursor.span_from(first), order=first.start
        )

    def _hint_before_block(self, first: Token, point: syntax_tree.Point) -> str:
        """Return a hint for text between a place and its block, or instead of the block."""
        cursor = self._cursor
        found, text = cursor.peek(), cursor.tokens.text
        place = cursor.tokens.written(first.start, cursor.last.end)
        brace = text.find("{", found.start)
        rest = cursor.tokens.written(found.start, brace if brace >= 0 else len(text))
        if found.kind is TokenKind.END:
            if place.startswith("-"):
                return "-e takes the text of a program, in single quotes: -e 'MODULE:FUNCTION { … }'"
            return f"a probe has a block: {place} {{ @ = count(); }}"
        if found.text == "=" and place in _HEADER_WORDS:
            return "a program in RPN is given as a file: dprobes run FILE"
        if found.text == "[" or found.text in PROBE_ATTRIBUTES:
            return _hint_about_attributes(place, rest, has_others=first.text == "[")
        if found.text in ("if", "where", "unless", "&&", "and"):
            return _hint_about_condition(place, rest, found.text)
        if found.text == "return":
            return f"write return {place}"
        if found.text == "(":
            return f"write the block in braces: {place} {{ … }}"
        if found.kind is TokenKind.TABLE or (found.text in _STATEMENTS and cursor.sees("(", distance=1)):
            return f"write the block in braces: {place} {{ {rest} }}"
        if found.kind in (TokenKind.NAME, TokenKind.STRING) and not point.module and point.parameters is None:
            name = re.split(r"[\s({]", rest, maxsplit=1)[0]
            if ":" in name and point.place.startswith(("/", "./", "../")):
                path, _, function = name.partition(":")
                return f'write "{point.place} {path}":{function} {{ … }}'
            if re.fullmatch(r"[\w.*+:-]+", name) is not None:
                return f"write {prefix_hint(point.place, name) or f'{point.place}:{name}'} {{ … }}"
        return f"write the block after the place: {place} {{ … }}"

    def _refuse_filter(self, point: syntax_tree.Point) -> None:
        """
        Raise ``ParseError`` for a condition in slashes, ``/pid == 4/``, at or after a place.

        The error's hint is ``when (pid == 4)``. Do nothing if there is no such condition before the block.
        """
        cursor = self._cursor
        end, distance = cursor.last, 0
        while not cursor.sees("{", distance=distance) and cursor.peek(distance).kind is not TokenKind.END:
            end = cursor.peek(distance)
            distance += 1
        slash = point.place.find("/") if cursor.last.text.endswith(point.place) else -1
        start = cursor.peek().start if slash < 0 else cursor.last.end - len(point.place) + slash
        condition = condition_of(cursor.tokens.written(start, end.end)) if start < end.end else None
        if condition is not None:
            span = cursor.tokens.span(Token(TokenKind.PUNCTUATION, "/", start, start), end)
            raise cursor.wrong("a condition is not written in slashes", span, f"write when ({condition})")

    def _point(self) -> syntax_tree.Point:
        cursor = self._cursor
        first = cursor.peek()
        at_return = self._is_keyword("return") and bool(cursor.accept("return"))
        if at_return and cursor.sees("["):
            raise cursor.wrong("write attributes before the place", hint="write [maxhits 5] return MODULE:FUNCTION")
        if self._is_keyword("syscall"):
            cursor.take()
            name = self._place("the name of a system call")
            return self._in_code(first, syntax_tree.PointKind.SYSTEM_CALL, "", name, at_return=at_return)
        if self._is_keyword("kmod"):
            cursor.take()
            module, place = split_place(self._place("a module of the kernel and a function").text)
            return self._made(first, syntax_tree.PointKind.CODE, f"kmod {module}", place, at_return=at_return)
        for kind in (syntax_tree.PointKind.TRACEPOINT, syntax_tree.PointKind.SAMPLE, syntax_tree.PointKind.WATCH):
            if at_return and self._is_keyword(kind.value):
                hint = "a system call has one: 'return syscall NAME'" if kind.value == "tracepoint" else None
                raise cursor.wrong(f"there is no return of a '{kind.value}'", cursor.span_from(first), hint)
        if at_return and not self._is_keyword(syntax_tree.PointKind.INLINE.value):
            return self._in_code(first, syntax_tree.PointKind.CODE, None, self._place("a function"), at_return=True)
        for kind in (syntax_tree.PointKind.INLINE, syntax_tree.PointKind.USDT):
            if self._is_keyword(kind.value):
                cursor.take()
                what = _USDT if kind is syntax_tree.PointKind.USDT else "a place in a module"
                return self._in_code(first, kind, None, self._place(what), at_return=at_return)
        if self._is_keyword("tracepoint"):
            cursor.take()
            return self._in_code(first, syntax_tree.PointKind.TRACEPOINT, "", self._place("SUBSYSTEM:NAME"))
        if self._is_keyword("watch"):
            return self._watch()
        if self._is_keyword("sample"):
            return self._sample()
        return self._in_code(first, syntax_tree.PointKind.CODE, None, self._place("a place to probe"))

    def _is_keyword(self, *words: str) -> bool:
        """Return whether one of these words comes next as a keyword, not as the name of a module or function."""
        token = self._cursor.peek()
        if token.kind is not TokenKind.NAME or token.text not in words:
            return False
        following = self._cursor.peek(1)
        return following.start > token.end or following.text == "{"

    def _place(self, what: str) -> Token:
        found = self._cursor.peek()
        word = self._cursor.tokens.take_place_word()
        if not word.text:
            hint = "write usdt MODULE:PROVIDER:NAME" if what == _USDT else None
            raise self._cursor.wrong(f"expected {what}, found {found.described}", hint=hint)
        self._cursor.last = word
        return word

    def _in_code(
        self, first: Token, kind: syntax_tree.PointKind, module: str | None, word: Token, *, at_return: bool = False
    ) -> syntax_tree.Point:
        place = word.text.strip('"')
        if module is None:
            module, place = split_place(word.text)
            if (ours := place_hint(word.text.strip('"'))) is not None:
                written = f"return {ours[1]}" if at_return and not ours[1].startswith("return ") else ours[1]
                raise self._cursor.wrong(
                    f"'{ours[0]}' is not a module", self._cursor.tokens.span(word), f"write '{written}'"
                )
            self._refuse_other_marks(kind, module, place, word, at_return=at_return)
        return self._made(first, kind, module, place, at_return=at_return)

    def _refuse_other_marks(
        self, kind: syntax_tree.PointKind, module: str, place: str, word: Token, *, at_return: bool
    ) -> None:
        """Report a place with the syntax of other tracers: ``libc.so.6!malloc``, ``libc.so.6:malloc:return``."""
        if word.text.startswith('"'):
            return
        before = "return " if at_return else ""
        problem = (
            _end_of_others(module, place, before)
            or _unquoted_path(module, place, before, is_usdt=kind is syntax_tree.PointKind.USDT)
            or self._lack_of_function(module, place)
            or _other_patterns(module, place, before)
            or (None if module else _other_joints(word.text, before))
        )
        if problem is not None:
            message, hint = problem
            span = None if message.startswith("expected ") else self._cursor.tokens.span(word)
            raise self._cursor.wrong(message, span, hint)

    def _lack_of_function(self, module: str, place: str) -> tuple[str, str] | None:
        if not module or place:
            return None
        hint = f"write each place in full: {module}:FUNCTION, {module}:FUNCTION"
        return f"expected a function after '{module}:', found {self._cursor.peek().described}", hint

    def _made(
        self, first: Token, kind: syntax_tree.PointKind, module: str, place: str, *, at_return: bool = False
    ) -> syntax_tree.Point:
        cursor = self._cursor
        span = cursor.span_from(first)
        if cursor.sees("(") and kind in (syntax_tree.PointKind.TRACEPOINT, syntax_tree.PointKind.SYSTEM_CALL):
            listed = f"{kind.value}:{place}"
            hint = f"fields have names, as in args.NAME: 'dprobes locate {listed}' lists them"
            raise cursor.wrong(f"a {_CALLED[kind]} has no parameters", hint=hint)
        parameters = self._declarations.parameters() if cursor.accept("(") else None
        return syntax_tree.Point(kind, span, module, place, at_return=at_return, parameters=parameters)

    def _watch(self) -> syntax_tree.Point:
        cursor = self._cursor
        first = cursor.take()
        access = cursor.accept(*_ACCESSES)
        if access is None:
            found = cursor.peek()
            word = cursor.tokens.take_place_word().text
            hint = f"write watch w {word}" if word else "write watch w MODULE:variable"
            message = f"expected x, w, rw, io, in or out after 'watch', found {found.described}"
            raise cursor.wrong(message, cursor.tokens.span(found), hint)
        type_ = None
        if cursor.accept("("):
            type_ = self._declarations.type_name()
            cursor.expect(")", "after the type of what is watched")
        module, place = split_place(self._place("what is watched: MODULE:variable, or an address").text)
        span = cursor.span_from(first)
        return syntax_tree.Point(syntax_tree.PointKind.WATCH, span, module, place, access=access.text, type=type_)

    def _sample(self) -> syntax_tree.Point:
        cursor = self._cursor
        first = cursor.take()
        rate = cursor.tokens.take_place_word()
        counter, number = "", 0
        if (match := _FREQUENCY.match(rate.text)) is not None and len(match[1]) <= _RATE_DIGITS_MAX:
            number = int(match[1])
        elif (match := _EVENTS.match(rate.text)) is not None:
            counter, number = match[1], int(match[2])
            hint = unknown_counter_hint(counter)
            problem = period_problem(number, counter) if hint is None else f"there is no counter '{counter[:40]}'"
            if problem is not None:
                raise cursor.wrong(problem, cursor.tokens.span(rate), hint)
        else:
            digits = rate.text[:_RATE_DIGITS_MAX] if rate.text.isdecimal() else "99"
            message = f"'{rate.text}' is not a number of samples a second"
            if not rate.text:
                message = f"expected a number of samples a second, found {cursor.peek().described}"
            is_counter = unknown_counter_hint(rate.text) is None
            written = f"{rate.text}:100000" if is_counter else f"{digits}hz"
            raise cursor.wrong(message, cursor.tokens.span(rate), f"write sample {written}")
        cursor.last = rate
        module = ""
        if not cursor.sees("{", ",", "when"):
            module = self._place("a module").text.strip('"')
        kind = syntax_tree.PointKind.SAMPLE
        return syntax_tree.Point(kind, cursor.span_from(first), module, counter, number=number)
