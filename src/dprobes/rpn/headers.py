"""
The ``key = value`` statements of a probe program: their values, and which header they belong to.

Which keywords exist is in ``keywords``.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.globs import is_pattern
from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.expressions import ExpressionError, parse_expression, parse_readable, unquote
from dprobes.rpn.keywords import KEYWORD_ALIASES, LOCATION_KEYWORDS, Header, Keyword, ValueKind, keywords_of
from dprobes.rpn.lexer import TokenKind
from dprobes.rpn.operands import StatementError
from dprobes.rpn.program import (
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
)
from dprobes.rpn.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.rpn.lexer import WordToken

__all__ = ["HeaderValue", "find_keyword", "is_keyword", "parse_value", "starts_definition"]

HeaderValue = int | bool | str | tuple[str, ...] | tuple[Table, ...] | ModuleType | Access | Location

_NAME_MAX = 4095
"""The length of the longest path, without its NUL (PATH_MAX)."""

_TRACEPOINT = lazy_pattern(r"([A-Za-z_]\w*):([A-Za-z_]\w*)", re.ASCII)

_USDT = lazy_pattern(r"usdt:([A-Za-z0-9_$.*?\[\]!-]+):([A-Za-z0-9_$.*?\[\]!-]+)", re.ASCII)
_USDT_PREFIX = lazy_pattern(r"usdt:(?!:)")

_GLOB = lazy_pattern(r"[A-Za-z0-9_$.@*?\[\]!:~<>,-]+")


def find_keyword(token: WordToken, header: Header) -> Keyword:
    """Return the keyword that ``token`` names in ``header``; raise ``StatementError`` if it belongs elsewhere."""
    word = KEYWORD_ALIASES.get(token.word, token.word)
    keyword = keywords_of(header).get(word)
    if keyword is not None:
        return keyword
    if word in keywords_of(Header.POINT if header is Header.FILE else Header.FILE):
        raise _misplaced(token, word, header)
    hint = did_you_mean(token.text, sorted(_all_keywords()))
    raise StatementError(f"unknown keyword '{token.text[:40]}'", [token], hint)


def _misplaced(token: WordToken, word: str, header: Header) -> StatementError:
    # Example 6 of the man page writes "type =" where it must mean "typedef =".
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
            return _number(keyword, tokens)
        case ValueKind.BOOLEAN:
            return _word(keyword, tokens, {"yes": True, "no": False})
        case ValueKind.MODTYPE:
            return _word(keyword, tokens, {m.value: m for m in ModuleType})
        case ValueKind.ACCESS:
            return _word(keyword, tokens, {a.value: a for a in Access})
        case ValueKind.MODULE:
            return _module_name(tokens)
        case ValueKind.NAMES | ValueKind.NAME:
            names = _names(keyword, tokens)
            return names[0] if keyword.kind is ValueKind.NAME else names
        case ValueKind.LOCATION:
            return _location(tokens)
        case ValueKind.RANGE:
            return _range(tokens)
        case ValueKind.FREQUENCY:
            return _frequency(keyword, tokens)
        case ValueKind.WORD_SIZE:
            return _word(keyword, tokens, {"4": 4, "8": 8})
        case ValueKind.TABLE:
            from dprobes.rpn.tableheaders import parse_table

            return (parse_table(tokens),)


def _expression(tokens: Sequence[WordToken]) -> Expression:
    try:
        return parse_expression(tokens)
    except ExpressionError as error:
        raise StatementError(error.message, [error.token or tokens[-1]], error.hint) from None


def _number(keyword: Keyword, tokens: Sequence[WordToken]) -> int:
    value = _expression(tokens)
    if value.symbol is not None:
        raise StatementError(f"'{keyword.name} =' needs a number, found '{value.symbol}'", tokens)
    if not keyword.minimum <= value.addend <= keyword.maximum:
        raise StatementError(
            f"'{keyword.name} = {value.addend}' is outside {keyword.minimum} to {keyword.maximum}", tokens
        )
    return value.addend


def _word(keyword: Keyword, tokens: Sequence[WordToken], words: Mapping[str, HeaderValue]) -> HeaderValue:
    if len(tokens) == 1 and tokens[0].word in words:
        return words[tokens[0].word]
    written = " ".join(t.text for t in tokens)
    raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{written[:40]}'", tokens)


def _module_name(tokens: Sequence[WordToken]) -> str:
    if len(tokens) == 1 and tokens[0].kind is TokenKind.STRING:
        if len(name := unquote(tokens[0])) > _NAME_MAX:
            raise StatementError(f"the name of the module has {len(name)} characters, more than {_NAME_MAX}", tokens)
        if name:
            return name
        raise StatementError("the name of the module is empty", tokens)
    text = _adjacent(tokens)
    if len(tokens) == 1 and re.fullmatch(r"[A-Za-z0-9_]+", text):
        return text
    raise StatementError(f"the name '{text}' must be in double quotes", tokens, f'write name = "{text}"')


def _adjacent(tokens: Sequence[WordToken]) -> str:
    """Return the text of tokens with a blank wherever there was white space."""
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
            raise StatementError(f"'{text[:40]}' is no USDT probe", tokens, "write 'offset = usdt:PROVIDER:NAME'")
        return Usdt(*usdt.groups())
    # What starts with a number is one: "4*2" is no pattern. In quotes there may be slashes, as names of Go have.
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


def _frequency(keyword: Keyword, tokens: Sequence[WordToken]) -> Sampler:
    text = "".join(token.word for token in tokens)
    match = re.fullmatch(r"([0-9]{1,9})hz", text)
    if match is None:
        raise StatementError(f"'{keyword.name} =' needs {keyword.kind.value}, found '{text[:40]}'", tokens)
    frequency = int(match.group(1))
    if not keyword.minimum <= frequency <= keyword.maximum:
        raise StatementError(f"{frequency} Hz is outside {keyword.minimum} to {keyword.maximum} Hz", tokens)
    return Sampler(frequency)


def is_keyword(word: str) -> bool:
    """Return whether a header statement may start with this word."""
    return word in _all_keywords()


@cache
def _all_keywords() -> frozenset[str]:
    return frozenset(KEYWORD_ALIASES).union(*(keywords_of(header) for header in Header))


def starts_definition(keyword: Keyword) -> bool:
    """Return whether the keyword starts a new probe definition."""
    return keyword.name in LOCATION_KEYWORDS
