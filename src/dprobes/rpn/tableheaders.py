"""
The statement ``table =``: its words to a ``Table``.

::

    table = NAME, KIND[(LOW, HIGH, STEP)], KEY, ... [, room = N] [, unit = UNIT] [, value = KEY]

    table = latency, hist, comm, unit = ns
    table = sizes, lhist(0, 4096, 512), str[32], ustack[5], room = 100
    table = names, last, word, value = str[32]
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.expressions import ExpressionError, parse_expression
from dprobes.rpn.lexer import TokenKind
from dprobes.rpn.operands import StatementError
from dprobes.rpn.tables import (
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.lexer import WordToken

    Words = Sequence[WordToken]

__all__ = ["parse_table"]

_NAME = lazy_pattern(r"[a-z_][a-z0-9_]*", re.ASCII)
_SIGNED_MAX = (1 << 63) - 1
_FORM = "write 'table = NAME, KIND, KEY, ...'"


def parse_table(tokens: Words) -> Table:
    """Return the table that the tokens behind ``table =`` describe; raise ``StatementError`` if they describe none."""
    parts = _split(tokens)
    if len(parts) < 2:
        raise StatementError("'table =' needs a name and a kind", tokens, _FORM)
    name = _word(parts[0], "the name of a table")
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
    """Return the parts between commas outside of brackets."""
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
    if len(part) != 1 or part[0].kind is not TokenKind.NAME:
        written = " ".join(token.text for token in part)
        raise StatementError(f"expected {what}, found '{written[:40]}'", part)
    return part[0].word


def _kind(part: Words) -> tuple[TableKind, Range | None]:
    words = [kind.value for kind in TableKind]
    word = part[0].word
    if word not in words:
        hint = did_you_mean(word, words) or f"the kinds are {', '.join(words)}"
        raise StatementError(f"'{part[0].text}' is no kind of table", part[:1], hint)
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
        raise StatementError(f"'{part[0].text}' is no kind of key", part[:1], hint)
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
