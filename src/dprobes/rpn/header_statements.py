"""
``key = value`` statements of a probe program: their values, and the header to which each belongs.

``program_text`` lists the keywords.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.globs import is_pattern
from dprobes.rpn.keyed_tables import (
    BUCKETS_MAX,
    KEYS_MAX,
    ROOM,
    ROOM_MAX,
    VALUE_KINDS,
    Key,
    KeyKind,
    Range,
    Table,
    TableKind,
    Unit,
)
from dprobes.rpn.operands import StatementError
from dprobes.rpn.performance_counters import period_problem, unknown_counter_hint
from dprobes.rpn.program_text import KEYWORD_ALIASES, LOCATION_KEYWORDS, Header, Keyword, ValueKind, keywords_of
from dprobes.rpn.rpn_expressions import ExpressionError, TokenKind, parse_expression, parse_readable, unquote
from dprobes.rpn.rpn_program import (
    Access,
    Address,
    Expression,
    Glob,
    Location,
    ModuleType,
    Offset,
    Sampler,
    Tracepoint,
    Usdt,
    split_patch,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.rpn.rpn_expressions import WordToken

__all__ = ["HeaderValue", "find_keyword", "is_keyword", "parse_table", "parse_value", "starts_definition"]

# The statement ``table =``: from words to a ``Table``.
#
# ::
#
#     table = NAME, KIND[(LOW, HIGH, STEP)], KEY, ... [, room = N] [, unit = UNIT] [, value = KEY]
#
#     table = latency, hist, comm, unit = ns
#     table = sizes, lhist(0, 4096, 512), str[32], ustack[5], room = 100
#     table = names, last, word, value = str[32]


if TYPE_CHECKING:
    Words = Sequence[WordToken]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SIGNED_MAX = (1 << 63) - 1
_FORM = "write 'table = NAME, KIND, KEY, ...'"


def parse_table(tokens: Words) -> Table:
    """Return the table described after ``table =``; raise ``StatementError`` if the tokens describe none."""
    parts = _split(tokens)
    if len(parts) < 2:
        raise StatementError("'table =' needs a name and a kind", tokens, _FORM)
    name = _name(parts[0], "the name of a table")
    if not _NAME.fullmatch(name):
        raise StatementError(f"'{name}' cannot be the name of a table", parts[0], "a name has letters, digits and '_'")
    kind, of_range = _kind(parts[1])
    keys: list[Key] = []
    room, unit, value = ROOM, Unit.NONE, None
    for part in parts[2:]:
        if len(part) > 1 and part[1].is_punctuation("="):
            match part[0].word:
                case "room":
                    room = _between(part[2:], part, 1, ROOM_MAX)
                case "unit":
                    unit = _unit(part)
                case "value":
                    value = _value(part, kind)
                case _:
                    hint = "what may follow the keys is 'room = N', 'unit = UNIT' and 'value = KIND'"
                    raise StatementError(f"'{part[0].text} =' is not known of a table", part, hint)
        else:
            keys.append(_key(part))
    if value is not None and len(keys) == KEYS_MAX:
        raise StatementError(f"a table with 'value =' has at most {KEYS_MAX - 1} keys, found {KEYS_MAX}", tokens)
    if len(keys) > KEYS_MAX:
        raise StatementError(f"a table has at most {KEYS_MAX} keys, found {len(keys)}", tokens)
    return Table(name, kind, tuple(keys), of_range, room, unit, value=value)


def _split(tokens: Words) -> list[Words]:
    """Return the parts of a value between commas; commas in brackets do not separate."""
    parts: list[list[WordToken]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if token.is_punctuation(",") and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    if not all(parts):
        raise StatementError("a part of 'table =' is missing next to ','", tokens, _FORM)
    return list(parts)


def _word(part: Words, what: str) -> str:
    return _name(part, what).lower()


def _name(part: Words, what: str) -> str:
    if len(part) != 1 or part[0].kind is not TokenKind.NAME:
        written = " ".join(token.text for token in part)
        raise StatementError(f"expected {what}, found '{written[:40]}'", part)
    return part[0].text


def _kind(part: Words) -> tuple[TableKind, Range | None]:
    words = [kind.value for kind in TableKind]
    word = part[0].word
    if word not in words:
        hint = did_you_mean(word, words) or f"the kinds are {', '.join(words)}"
        raise StatementError(f"'{part[0].text}' is not a kind of table", part[:1], hint)
    kind = TableKind(word)
    if kind is not TableKind.LHIST:
        if len(part) > 1:
            raise StatementError(f"'{word}' takes nothing in parentheses", part)
        return kind, None
    inner = part[2:-1]
    if len(part) < 3 or not part[1].is_punctuation("(") or not part[-1].is_punctuation(")"):
        raise StatementError("'lhist' needs its range", part, "write 'lhist(LOW, HIGH, STEP)'")
    bounds = [_number(each, part) for each in _split(inner)]
    if len(bounds) != 3:
        raise StatementError("'lhist' needs its range", part, "write 'lhist(LOW, HIGH, STEP)'")
    found = Range(*bounds)
    if not -_SIGNED_MAX <= found.low < found.high <= _SIGNED_MAX or not 1 <= found.step <= _SIGNED_MAX:
        raise StatementError("'lhist' needs a lower bound below the upper one, and a step of at least 1", part)
    if found.buckets > BUCKETS_MAX:
        raise StatementError(f"'lhist' has {found.buckets} buckets, more than {BUCKETS_MAX}", part, "make them wider")
    return kind, found


def _key(part: Words) -> Key:
    words = [kind.value for kind in KeyKind]
    word = part[0].word
    if word not in words:
        hint = did_you_mean(word, words) or f"the kinds are {', '.join(words)}"
        raise StatementError(f"'{part[0].text}' is not a kind of key", part[:1], hint)
    kind = KeyKind(word)
    if len(part) == 1:
        return Key(kind, kind.sizes[0] if kind.sizes is not None else 0)
    if kind.sizes is None or not part[1].is_punctuation("[") or not part[-1].is_punctuation("]"):
        written = " ".join(token.text for token in part[1:])
        raise StatementError(f"'{word}' is followed by '{written[:40]}', not by ','", part[1:])
    return Key(kind, _between(part[2:-1], part, 1, kind.sizes[1]))


def _value(part: Words, kind: TableKind) -> Key:
    words = [each.value for each in VALUE_KINDS]
    if len(part) == 2 or part[2].word not in words:
        written = " ".join(token.text for token in part[2:])
        hint = f"the kinds of values are {', '.join(words)}"
        raise StatementError(f"expected what a table keeps, found '{written[:40]}'", part, hint)
    found = _key(part[2:])
    if not kind.takes_value:
        raise StatementError(f"'{kind.value}' takes no value", part)
    if kind is not TableKind.LAST and found.kind is not KeyKind.LONG:
        hint = "strings and stacks are kept by 'last'"
        raise StatementError(f"'{kind.value}' keeps numbers, not '{found.kind.value}'", part, hint)
    return found


def _unit(part: Words) -> Unit:
    words = [unit.value for unit in Unit if unit.value]
    word = _word(part[2:] or part[:1], "a unit")
    if word not in words or len(part) == 2:
        raise StatementError(f"the unit '{word}' is not known", part, f"the units are {' and '.join(words)}")
    return Unit(word)


def _between(tokens: Words, part: Words, low: int, high: int) -> int:
    value = _number(tokens, part)
    if not low <= value <= high:
        raise StatementError(f"{value} is outside {low} to {high}", part)
    return value


def _number(tokens: Words, part: Words) -> int:
    if not tokens:
        raise StatementError("expected a number", part)
    try:
        value = parse_expression(tokens)
    except ExpressionError as error:
        raise StatementError(error.message, [error.token or tokens[-1]], error.hint) from None
    if value.symbol is not None:
        raise StatementError(f"expected a number, found '{value.symbol}'", tokens)
    return value.addend


HeaderValue = int | bool | str | tuple[str, ...] | tuple[Table, ...] | ModuleType | Access | Location

_NAME_MAX = 4095
"""Maximum length of a path in bytes, without its NUL (PATH_MAX)."""

_TRACEPOINT = re.compile(r"([A-Za-z_]\w*):([A-Za-z_]\w*)", re.ASCII)

_USDT = re.compile(r"usdt:([A-Za-z0-9_$.*?\[\]!-]+):([A-Za-z0-9_$.*?\[\]!-]+)", re.ASCII)
_USDT_PREFIX = re.compile(r"usdt:(?!:)")

_GLOB = re.compile(r"[A-Za-z0-9_$.@*?\[\]!:~<>,-]+")


def find_keyword(token: WordToken, header: Header) -> Keyword:
    """
    Return the keyword for ``token`` in ``header``, also for an old spelling.

    Raise ``StatementError`` if there is none.
    """
    word = KEYWORD_ALIASES.get(token.word, token.word)
    keyword = keywords_of(header).get(word)
    if keyword is not None:
        return keyword
    if word in keywords_of(Header.POINT if header is Header.FILE else Header.FILE):
        raise _misplaced(token, word, header)
    hint = did_you_mean(token.text, sorted(_all_keywords()))
    raise StatementError(f"unknown keyword '{token.text[:40]}'", [token], hint)


def _misplaced(token: WordToken, word: str, header: Header) -> StatementError:
    # Example 6 of the man page writes "type =" where "typedef =" is correct.
    twin = {"type": "typedef", "group": "groupdef", "typedef": "type", "groupdef": "group"}.get(word)
    if header is Header.FILE:
        hint = f"did you mean '{twin}'?" if twin else "write it below 'offset =', which starts a probe definition"
        return StatementError(f"'{word}' belongs to a probepoint header, not to the file header", [token], hint)
    hint = f"did you mean '{twin}'?" if twin else "write it above the first probe definition"
    return StatementError(f"'{word}' belongs to the file header, not to a probepoint header", [token], hint)


def parse_value(keyword: Keyword, tokens: Sequence[WordToken]) -> HeaderValue:
    """Return the value of a header statement; raise ``StatementError`` if ``tokens`` are not of the keyword's kind."""
    if not tokens:
        raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}")
    match keyword.kind:
        case ValueKind.NUMBER:
            return _header_number(keyword, tokens)
        case ValueKind.BOOLEAN:
            return _header_word(keyword, tokens, {"yes": True, "no": False})
        case ValueKind.MODTYPE:
            return _header_word(keyword, tokens, {m.value: m for m in ModuleType})
        case ValueKind.ACCESS:
            return _header_word(keyword, tokens, {a.value: a for a in Access})
        case ValueKind.MODULE:
            return _module_name(tokens)
        case ValueKind.NAMES | ValueKind.NAME:
            names = _names(keyword, tokens)
            return names[0] if keyword.kind is ValueKind.NAME else names
        case ValueKind.LOCATION:
            return _location(tokens)
        case ValueKind.RANGE:
            return _range(tokens)
        case ValueKind.SAMPLING:
            return _sampler(keyword, tokens)
        case ValueKind.WORD_SIZE:
            return _header_word(keyword, tokens, {"4": 4, "8": 8})
        case ValueKind.TABLE:
            return (parse_table(tokens),)
        case ValueKind.PATCH:
            return _patch(keyword, tokens)


def _expression(tokens: Sequence[WordToken]) -> Expression:
    try:
        return parse_expression(tokens)
    except ExpressionError as error:
        raise StatementError(error.message, [error.token or tokens[-1]], error.hint) from None


def _header_number(keyword: Keyword, tokens: Sequence[WordToken]) -> int:
    value = _expression(tokens)
    if value.symbol is not None:
        raise StatementError(f"'{keyword.name} =' needs a number, found '{value.symbol}'", tokens)
    if not keyword.minimum <= value.addend <= keyword.maximum:
        raise StatementError(
            f"'{keyword.name} = {value.addend}' is outside {keyword.minimum} to {keyword.maximum}", tokens
        )
    return value.addend


def _header_word(keyword: Keyword, tokens: Sequence[WordToken], words: Mapping[str, HeaderValue]) -> HeaderValue:
    if len(tokens) == 1 and tokens[0].word in words:
        return words[tokens[0].word]
    written = " ".join(t.text for t in tokens)
    raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{written[:40]}'", tokens)


def _module_name(tokens: Sequence[WordToken]) -> str:
    if len(tokens) == 1 and tokens[0].kind is TokenKind.STRING:
        name = unquote(tokens[0])
        # "replace" counts a byte that is not valid UTF-8, which Python represents as a surrogate, as one byte.
        if (size := len(name.encode(errors="replace"))) > _NAME_MAX:
            raise StatementError(f"the name of the module has {size} bytes, more than {_NAME_MAX}", tokens)
        if name:
            return name
        raise StatementError("the name of the module is empty", tokens)
    text = _adjacent(tokens)
    if len(tokens) == 1 and re.fullmatch(r"[A-Za-z0-9_]+", text):
        return text
    raise StatementError(f"the name '{text}' must be in double quotes", tokens, f'write name = "{text}"')


def _patch(keyword: Keyword, tokens: Sequence[WordToken]) -> str:
    if len(tokens) != 1 or tokens[0].kind is not TokenKind.STRING:
        text = _adjacent(tokens)
        raise StatementError(f"the patch '{text[:40]}' must be in double quotes", tokens, f'write patch = "{text}"')
    text = unquote(tokens[0])
    if (size := len(text.encode(errors="replace"))) > _NAME_MAX:
        raise StatementError(f"the patch has {size} bytes, more than {_NAME_MAX}", tokens)
    if split_patch(text) is None:
        raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{text[:40]}'", tokens)
    return text


def _adjacent(tokens: Sequence[WordToken]) -> str:
    """Return the tokens as one string; white space between two tokens becomes one blank."""
    text = tokens[0].text
    for before, token in itertools.pairwise(tokens):
        text += (" " if token.start > before.end else "") + token.text
    return text


def _names(keyword: Keyword, tokens: Sequence[WordToken]) -> tuple[str, ...]:
    words = [token for token in tokens if not token.is_punctuation(",")]
    for token in words:
        if token.kind is not TokenKind.NAME:
            raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{token.text}'", [token])
    if not words or (keyword.kind is ValueKind.NAME and len(words) > 1):
        raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}", tokens)
    return tuple(dict.fromkeys(token.word for token in words))


def _location(tokens: Sequence[WordToken]) -> Location:
    is_quoted = len(tokens) == 1 and tokens[0].kind is TokenKind.STRING
    text = unquote(tokens[0]) if is_quoted else _adjacent(tokens)
    if _USDT_PREFIX.match(text):
        if (usdt := _USDT.fullmatch(text)) is None:
            raise StatementError(f"'{text[:40]}' is not a USDT probe", tokens, "write 'offset = usdt:PROVIDER:NAME'")
        return Usdt(*usdt.groups())
    # A string that starts with a number is a number: "4*2" is not a pattern. Names of Go may contain slashes, but only
    # in quotes.
    written = text.replace("/", "") if is_quoted else text
    if tokens[0].kind is not TokenKind.NUMBER and is_pattern(text) and _GLOB.fullmatch(written):
        return Glob(text)
    if (match := _TRACEPOINT.fullmatch(text)) is not None:
        return Tracepoint(*match.groups())
    value = None if is_quoted else parse_readable(text)
    if value is None:
        value = _expression(tokens)
    if value.symbol is None and value.addend < 0:
        raise StatementError("an offset cannot be negative", tokens)
    return Offset(value)


def _range(tokens: Sequence[WordToken]) -> Address:
    colons = [n for n, token in enumerate(tokens) if token.is_punctuation(":")]
    if len(colons) > 1:
        raise StatementError("expected one ':' between two addresses", [tokens[colons[1]]])
    if not colons:
        return Address(_address(tokens))
    low, high = tokens[: colons[0]], tokens[colons[0] + 1 :]
    if not low or not high:
        raise StatementError("expected an address on both sides of ':'", tokens)
    return Address(_address(low), _address(high))


def _address(tokens: Sequence[WordToken]) -> Expression:
    value = _expression(tokens)
    if value.symbol is None and value.addend < 0:
        raise StatementError("an address cannot be negative", tokens)
    return value


def _sampler(keyword: Keyword, tokens: Sequence[WordToken]) -> Sampler:
    text = "".join(token.word for token in tokens)
    match = re.fullmatch(r"([0-9]{1,10})([a-z][a-z-]*)", text)
    if match is None:
        raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{text[:40]}'", tokens)
    number, counter = int(match.group(1)), match.group(2)
    if counter == "hz":
        if not keyword.minimum <= number <= keyword.maximum:
            raise StatementError(f"{number} Hz is outside {keyword.minimum} to {keyword.maximum} Hz", tokens)
        return Sampler(number)
    if (hint := unknown_counter_hint(counter)) is not None:
        raise StatementError(f"there is no counter '{counter[:40]}'", tokens, hint)
    if (problem := period_problem(number, counter)) is not None:
        raise StatementError(problem, tokens)
    return Sampler(number, counter)


def is_keyword(word: str) -> bool:
    """Return whether a header statement may start with this word."""
    return word in _all_keywords()


@cache
def _all_keywords() -> frozenset[str]:
    return frozenset(KEYWORD_ALIASES).union(*(keywords_of(header) for header in Header))


def starts_definition(keyword: Keyword) -> bool:
    """Return whether the keyword starts a new probe definition."""
    return keyword.name in LOCATION_KEYWORDS
