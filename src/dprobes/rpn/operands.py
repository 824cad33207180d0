"""
Parsing of a statement: the search for its row in the instruction table, and the value of its operand.

``instruction_set`` has the spellings; ``program_checker`` decides which values are valid (indices, registers).
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture, host_architecture
from dprobes.diagnostics import did_you_mean, nearest
from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_set import Alias, OperandKind, Row
from dprobes.rpn.performance_counters import unknown_counter_hint
from dprobes.rpn.rpn_expressions import ExpressionError, TokenKind, WordToken, parse_expression, unquote
from dprobes.rpn.rpn_program import Expression
from dprobes.rpn.word_arithmetic import MAX_VALUE, MIN_VALUE, mask_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.rpn_program import Operand

__all__ = [
    "NUMBER_TYPES",
    "NumberType",
    "StatementError",
    "check_typed",
    "like_statement",
    "match_statement",
    "operators",
    "split_type",
]

# The old "push b|w|d, value" has the width of the value in its spelling.
_OLD_PUSH_BITS = {"push b, <value>": 8, "push w, <value>": 16, "push d, <value>": 32}

# "push eax" is a statement of the man page for these processors only; on others a lone register name is a symbol.
_OF_THE_MAN_PAGE = ("x86_64", "i386", "s390", "s390x", "ppc", "ppc64")

_NAMED = {
    OperandKind.LABEL: "the name of a label",
    OperandKind.PROCEDURE: "the name of a procedure",
    OperandKind.EXTENSION: "the name of an extension",
    OperandKind.FIELD: "the name of a field",
    OperandKind.TABLE: "the name of a table",
}

_ANY, _NOTHING = "*", ""
"""The signature of an operand that is no literal word of the instruction table, and that of a missing operand."""

_SIGNATURES = 4096
"""Maximum number of cached forms: a program may contain any number of operators and words, but uses few."""

_COMMA = WordToken(TokenKind.PUNCTUATION, ",", 0, 0)
_SHORT = 16
"""Maximum number of words for which a missing comma is searched: no statement of the table has more."""


class StatementError(Exception):
    """An error in a statement; ``tokens`` are the tokens to underline, empty for the whole statement."""

    def __init__(self, message: str, tokens: Sequence[WordToken] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.tokens = tuple(tokens)
        self.hint = hint


class Match(NamedTuple):
    """
    The result of parsing a statement: row of the instruction table, operand value, and the operand's tokens.

    ``alias`` is the old spelling that the statement uses, None if it uses the current one.
    """

    row: Row
    operand: Operand
    operand_tokens: Sequence[WordToken] = ()
    alias: Alias | None = None


def match_statement(tokens: Sequence[WordToken]) -> Match:
    """
    Return the instruction and the operand of ``tokens``, which are one statement.

    Raise ``StatementError`` if no row matches.
    """
    operator, operands = tokens[0], _split_at_commas(tokens[1:])
    forms = _forms().get(operator.word) if operator.kind is TokenKind.NAME else None
    if forms is None:
        _reject_known(tokens)
        raise StatementError(
            f"unknown instruction '{operator.text[:40]}'", [operator], did_you_mean(operator.text, operators())
        )
    form = _form(operator.word, tuple(map(_meaning, operands)))
    if form is None:
        _reject_known(tokens)
        raise _missing_comma(tokens, forms) or _no_form(operator, operands, forms)
    if form.operands == (OperandKind.VALUE,):
        _refuse_half_an_instruction(operator, operands[0])
    alias = form if isinstance(form, Alias) else None
    row = instruction_set.rows_by_syntax()[form.canonical] if isinstance(form, Alias) else form
    kind_and_tokens = [(k, o) for k, o in zip(form.operands, operands, strict=True) if isinstance(k, OperandKind)]
    operand: Operand = None
    operand_tokens: Sequence[WordToken] = ()
    for kind, operand_tokens in kind_and_tokens:
        try:
            operand = _operand(kind, operand_tokens)
        except StatementError as error:
            raise _missing_comma(tokens, forms) or error from None
    if alias is not None and (bits := _OLD_PUSH_BITS.get(alias.syntax)):
        assert isinstance(operand, Expression)
        operand = _narrow(operand, bits, operands[1])
    return Match(row, operand, operand_tokens, alias)


def like_statement(operator: str, word: str) -> str | None:
    """
    Return a hint with an instruction of ``operator`` whose only word resembles ``word``, such as 'push pid'.

    Return None if no word is similar.
    """
    words = [row.operands[0] for row in instruction_set.ROWS if row.operator == operator and len(row.operands) == 1]
    near = nearest(word, [word for word in words if isinstance(word, str)])
    return f"did you mean '{operator} {near}'?" if near is not None else None


@cache
def operators() -> list[str]:
    """Return the first words of all instructions, old spellings included."""
    return list(_forms())


@cache
def _forms() -> dict[str, list[Row | Alias]]:
    table: dict[str, list[Row | Alias]] = {}
    forms: list[Row | Alias] = [*instruction_set.ROWS, *instruction_set.ALIASES]
    for form in forms:
        table.setdefault(form.operator, []).append(form)
    return table


def _is_register(word: str) -> bool:
    # The host's processor comes first, because most programs are for it; other tables are read only for other words.
    return word in host_architecture().register_names or (word != _NOTHING and word in _register_names())


@cache
def _register_names() -> frozenset[str]:
    return frozenset(name for arch in _OF_THE_MAN_PAGE for name in architecture(arch).register_names)


def _split_at_commas(tokens: Sequence[WordToken]) -> list[list[WordToken]]:
    if not tokens:
        return []
    operands: list[list[WordToken]] = [[]]
    depth = 0
    for token in tokens:
        if token.is_punctuation(",") and depth == 0:
            operands.append([])
            continue
        depth += token.is_punctuation("(") - token.is_punctuation(")")
        operands[-1].append(token)
    return operands


@lru_cache(_SIGNATURES)
def _form(operator: str, signature: tuple[str, ...]) -> Row | Alias | None:
    """
    Return the instruction, or its old spelling, with this operator and operands that match ``signature``.

    Return None if there is none. ``signature`` has the result of ``_meaning`` for each operand.
    """
    # The form with the most literal words takes precedence: "push lv" is the instruction on variables, not a symbol
    # called lv. Among equals, the old spelling does: "push eax" is the register, not a symbol called eax.
    return max(
        (form for form in _forms()[operator] if _fits(form.operands, signature)),
        key=lambda f: (sum(isinstance(o, str) for o in f.operands), isinstance(f, Alias)),
        default=None,
    )


def _fits(pattern: Sequence[str | OperandKind], signature: Sequence[str]) -> bool:
    if len(pattern) != len(signature):
        return False
    # "push eax" is an old spelling of "push r, eax"; any other lone name is a symbol.
    if pattern == (OperandKind.REGISTER,) and not _is_register(signature[0]):
        return False
    return all(
        meaning == expected if isinstance(expected, str) else meaning != _NOTHING
        for expected, meaning in zip(pattern, signature, strict=True)
    )


def _meaning(tokens: Sequence[WordToken]) -> str:
    """
    Return the signature of an operand: its word, if it is a lone literal word or register, otherwise ANY.

    The signature of an empty operand is NOTHING.
    """
    if not tokens:
        return _NOTHING
    if len(tokens) == 1 and tokens[0].kind is TokenKind.NAME and _is_telling(word := tokens[0].word):
        return word
    return _ANY


def _is_telling(word: str) -> bool:
    return word in _literals() or _is_register(word)


@cache
def _literals() -> frozenset[str]:
    return frozenset(o for forms in _forms().values() for form in forms for o in form.operands if isinstance(o, str))


def _reject_known(tokens: Sequence[WordToken]) -> None:
    text = " ".join(token.word for token in tokens)
    for statement, reason in instruction_set.REJECTED:
        if text == statement or text.startswith((statement + " ", statement + ",")):
            raise StatementError(reason)


def _missing_comma(tokens: Sequence[WordToken], forms: Sequence[Row | Alias]) -> StatementError | None:
    """Return the error for a statement that becomes valid with one or two more commas; None for any other statement."""
    if len(tokens) > _SHORT:
        return None
    gaps = range(2, len(tokens))
    for missing in itertools.chain(itertools.combinations(gaps, 1), itertools.combinations(gaps, 2)):
        words = list(tokens)
        for position in reversed(missing):
            words.insert(position, _COMMA)
        if any(_is_written(form.operands, _split_at_commas(words[1:])) for form in forms):
            before, behind = tokens[missing[0] - 1], tokens[missing[0]]
            written = words[0].text
            for earlier, word in itertools.pairwise(words):
                written += ("" if word is _COMMA or earlier.end == word.start else " ") + word.text
            return StatementError(
                f"a comma is missing between '{before.text[:40]}' and '{behind.text[:40]}'",
                [behind],
                f"write '{written[:200]}'",
            )
    return None


def _is_written(pattern: Sequence[str | OperandKind], operands: Sequence[Sequence[WordToken]]) -> bool:
    """Return whether the operands match a pattern, values included."""
    if not _fits(pattern, tuple(map(_meaning, operands))):
        return False
    with contextlib.suppress(StatementError):
        for kind, tokens in zip(pattern, operands, strict=True):
            if isinstance(kind, OperandKind):
                _operand(kind, tokens)
        return True
    return False


def _no_form(
    operator: WordToken, operands: Sequence[Sequence[WordToken]], forms: Sequence[Row | Alias]
) -> StatementError:
    for tokens in operands:
        if not tokens:
            return StatementError("an operand is missing next to ','")
    syntaxes = [form.syntax for form in forms if isinstance(form, Row)] or [form.syntax for form in forms]
    written = ", ".join(" ".join(t.text for t in tokens) for tokens in operands)
    if not operands:
        message = f"'{operator.text}' needs an operand"
    else:
        message = f"'{operator.text}' does not take the operand{'s' if len(operands) > 1 else ''} '{written[:60]}'"
    if len(syntaxes) <= 3:
        return StatementError(message, hint=f"write {_either(syntaxes)}")
    hint = did_you_mean(f"{operator.word} {written.lower()[:60]}", syntaxes) if operands else None
    return StatementError(message, hint=hint)


def _refuse_half_an_instruction(operator: WordToken, operand: Sequence[WordToken]) -> None:
    """
    Raise ``StatementError`` if the only operand is the start of a longer form, such as the ``mem`` of "push mem".

    Without this check such an operand would be a symbol.
    """
    if (first := _meaning(operand[:1])) == _ANY:
        return
    rows = [form for form in _forms()[operator.word] if isinstance(form, Row)]
    longer = [row.syntax for row in rows if len(row.operands) > 1 and row.operands[0] == first]
    if not longer:
        return
    if len(operand) > 1:
        if (error := _missing_comma([operator, *operand], rows)) is not None:
            raise error
    else:
        word = operand[0].text
        hint = f"write {_either(longer)}, or 'push ({word})' for the address of a symbol called '{word}'"
        raise StatementError(f"'{operator.text} {word}' lacks an operand", operand, hint)


def _either(syntaxes: Sequence[str]) -> str:
    return " or ".join(f"'{syntax}'" for syntax in syntaxes)


def _operand(kind: OperandKind, tokens: Sequence[WordToken]) -> Operand:
    match kind:
        case OperandKind.LABEL | OperandKind.PROCEDURE | OperandKind.EXTENSION | OperandKind.FIELD | OperandKind.TABLE:
            if len(tokens) != 1 or tokens[0].kind is not TokenKind.NAME:
                raise StatementError(f"expected {_NAMED[kind]}", tokens)
            if kind.width < 0 and len(tokens[0].text) > instruction_set.NAME_MAX:
                raise StatementError(f"{_NAMED[kind]} has at most {instruction_set.NAME_MAX} characters", tokens)
            has_case = kind in (OperandKind.FIELD, OperandKind.TABLE)
            return tokens[0].text if has_case else tokens[0].word
        case OperandKind.TEXT:
            return _text(tokens)
        case OperandKind.COUNTER:
            return _counter(tokens)
        case OperandKind.REGISTER if len(tokens) == 1 and tokens[0].kind is TokenKind.NAME:
            return tokens[0].word
        case OperandKind.VALUE:
            value = _expression(tokens)
            if value.symbol is None and not MIN_VALUE <= value.addend <= MAX_VALUE:
                raise StatementError(f"{value.addend} does not fit in a word", tokens)
            return value
        case _:
            return _constant(kind, tokens)


def _text(tokens: Sequence[WordToken]) -> str:
    if len(tokens) != 1 or tokens[0].kind is not TokenKind.STRING:
        raise StatementError("expected a text in double quotes", tokens)
    text = unquote(tokens[0])
    if (problem := instruction_set.text_problem(text)) is not None:
        raise StatementError(problem, tokens)
    return text


def _counter(tokens: Sequence[WordToken]) -> str:
    """Return the name of a performance counter; its parts between hyphens are separate tokens."""
    name = "".join(token.word for token in tokens)
    if (hint := unknown_counter_hint(name)) is not None:
        raise StatementError(f"there is no counter '{name[:40]}'", tokens, hint)
    return name


def _expression(tokens: Sequence[WordToken]) -> Expression:
    try:
        return parse_expression(tokens)
    except ExpressionError as error:
        raise StatementError(error.message, [error.token or tokens[-1]], error.hint) from None


def _constant(kind: OperandKind, tokens: Sequence[WordToken]) -> int:
    value = _expression(tokens)
    if value.symbol is not None:
        what = "a register" if kind is OperandKind.REGISTER else "a number"
        raise StatementError(f"expected {what}, found '{value.symbol}'", tokens)
    low, high = kind.limits
    if not low <= value.addend <= high:
        raise StatementError(f"{value.addend} is outside {low} to {high}", tokens)
    return value.addend


def _narrow(value: Expression, bits: int, tokens: Sequence[WordToken]) -> Expression:
    if value.symbol is not None:
        raise StatementError(
            f"the address of '{value.symbol}' does not fit in {bits} bits", tokens, f"write 'push {value}'"
        )
    if not -(1 << (bits - 1)) <= value.addend <= mask_of(bits):
        raise StatementError(f"{value.addend} does not fit in {bits} bits", tokens)
    return Expression(value.addend & mask_of(bits))


# ``push r, retval:s32`` is shorthand: a ``pbl`` or ``pzl`` after the push extends the low bits. Programs are printed in
# this form.


@dataclass(frozen=True, slots=True)
class NumberType:
    """Width of a number in bits, and its signedness. Its ``str`` is, for example, ``s32``."""

    bits: int
    is_signed: bool

    def __str__(self) -> str:
        return f"{'s' if self.is_signed else 'u'}{self.bits}"

    @property
    def extension(self) -> str:
        """The syntax of the instruction that extends the low ``bits`` of a cell by zeros or by the sign."""
        return "pbl <bits>" if self.is_signed else "pzl <bits>"


NUMBER_TYPES = {
    str(each): each for each in (NumberType(bits, sign) for sign in (False, True) for bits in (8, 16, 32, 64))
}
"""The types, keyed by name."""

_TYPED = (OperandKind.REGISTER, OperandKind.FIELD, OperandKind.ARGUMENT)
"""The kinds of operand that a type may follow."""


def split_type(tokens: Sequence[WordToken]) -> tuple[Sequence[WordToken], NumberType | None]:
    """
    Return an instruction's tokens without the type of its value, and the type, None if it has none.

    Raise ``StatementError`` for an unknown type.
    """
    if tokens[0].word != "push" or len(tokens) < 3:
        return tokens, None
    *before, sign, last = tokens
    if sign.is_punctuation(":"):
        known = NUMBER_TYPES.get(last.word) if last.kind is TokenKind.NAME else None
        if known is None:
            types = ", ".join(NUMBER_TYPES)
            message = f"expected the type of a number, found '{last.text[:40]}'"
            raise StatementError(message, [last], f"types are {types}")
        return before, known
    if tokens[1].word in ("mem", "phys") and last.word in NUMBER_TYPES and last.word.startswith("s"):
        return [*before, sign, WordToken(last.kind, f"u{last.word[1:]}", last.start, last.end)], NUMBER_TYPES[last.word]
    return tokens, None


def check_typed(row: Row, tokens: Sequence[WordToken]) -> None:
    """Raise ``StatementError`` if the value that an instruction pushes cannot be given a type."""
    if row.operand_kind not in _TYPED and not row.syntax.startswith(("push mem", "push phys")):
        hint = "registers, fields and 'push mem' have types"
        raise StatementError(f"'{row.syntax}' takes no type", tokens[-2:], hint)
