"""
A filter in front of handlers: a pass from program to program, the same for every engine.

A handler that follows is executed for the hits that the filter holds for; for all others the filter ends in ``abort``,
so that they count as hits and leave no record. Memory that cannot be read makes the filter false::

        sx filter9           // where the filter reads memory
        ...                  // the condition
    filter1:
        ros 1; ux            // the stack and the exception handler are again as a hit finds them
        ...                  // the handler
    filter9:
        abort

The code means the same for words of each size: no value takes several cells, but for those that
``check_words`` finds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.filters.handlercode import HandlerCode
from dprobes.filters.handlervalues import WIDE_NAMES, HandlerValues
from dprobes.filters.parser import parse
from dprobes.filters.tree import (
    And,
    Comparison,
    Condition,
    Membership,
    Memory,
    Name,
    Not,
    Number,
    Or,
    StringAt,
    Text,
    Value,
    fail,
    values_of,
)
from dprobes.rpn.encoder import closed
from dprobes.rpn.isa import ExceptionCode, rows_by_syntax, text_problem
from dprobes.rpn.program import Code, Instruction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["check_words", "with_filters"]

_WIDEST = 64
"""The bits of the widest number."""

_IN_MEMORY_SOMEWHERE = "push r, <register>"
"""What can only fault where arguments are on the stack, which a program that runs has."""

_PREFIX = "filter"
_SEARCHED = 64
"""How many bytes of a string are searched where a filter does not say."""

_JUMPS_MAX = (1 << 32) - 1

_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def with_filters(
    program: Program, filters: Sequence[str], diagnostics: Diagnostics, *, called: str = "--filter"
) -> Program:
    """
    Return a program whose handlers are executed for the hits only that all filters hold for.

    Raise ``SourceError`` for a filter that is none, or that a handler cannot evaluate; warnings are added to
    ``diagnostics``. The handlers may make as many jumps as before.
    """
    if not filters:
        return program
    conditions = [parse(text, called=called) for text in filters]
    condition = And(tuple(conditions)) if len(conditions) > 1 else conditions[0]
    warned = False
    definitions, jumps = [], 0
    for definition in program.definitions:
        values = HandlerValues(program, definition, diagnostics if not warned else None)
        filtered, made = _filtered(definition, condition, values)
        warned = True
        definitions.append(filtered)
        jumps = max(jumps, made)
    jmpmax = min(program.jmpmax + jumps, _JUMPS_MAX)
    return replace(program, definitions=tuple(definitions), jmpmax=jmpmax)


def _filtered(definition: ProbeDefinition, condition: Condition, values: HandlerValues) -> tuple[ProbeDefinition, int]:
    """Return a definition with a filter, and how many jumps that makes."""
    prefix = _PREFIX
    while any(label.startswith(prefix) for label in definition.handler.labels):
        prefix += "_"
    code = HandlerCode(prefix)
    yes, no = code.label(), code.label()
    _Conditions(code, values).write(condition, yes, no, yes)
    before: tuple[Instruction, ...] = ()
    if faulting := code.faulting:
        _check_mask(definition, faulting)
        before = (Instruction(rows_by_syntax()["sx <label>"], no),)
    code.enter(yes)
    if before:
        code.add("ux")
    handler = closed(definition.handler, rows_by_syntax()["exit"])
    start = len(before) + len(code.instructions)
    end = start + len(handler.instructions)
    labels = {label: index + len(before) for label, index in code.labels.items()}
    labels |= {label: index + start for label, index in handler.labels.items()} | {no: end}
    aborted = Instruction(rows_by_syntax()["abort"])
    whole = Code((*before, *code.instructions, *handler.instructions, aborted), labels)
    return replace(definition, handler=whole), code.jumps


def _check_mask(definition: ProbeDefinition, faulting: Sequence[Instruction]) -> None:
    """Raise ``SourceError`` if a fault of the filter would end the handler with a record."""
    if definition.exception_mask & ExceptionCode.INVALID_ADDR:
        return
    for instruction in faulting:
        if instruction.row.syntax != _IN_MEMORY_SOMEWHERE and instruction.span is not None:
            fail(
                instruction.span,
                "this may not be there, and 'ex_mask' leaves out INVALID_ADDR, which would say so",
                f"write 'ex_mask = {definition.exception_mask | ExceptionCode.INVALID_ADDR:#x}' in the program",
            )


def check_words(filters: Sequence[str], target: Architecture, *, called: str = "--filter") -> None:
    """Raise ``SourceError`` for a number of a filter that does not fit in the words of a processor."""
    if target.word_bits >= _WIDEST:
        return
    for value in (value for text in filters for value in values_of(parse(text, called=called))):
        is_wide = isinstance(value, Memory) and 8 * value.size > target.word_bits
        if is_wide or (isinstance(value, Name) and value.name in WIDE_NAMES):
            fail(
                value.span,
                f"this has {_WIDEST} bits, and does not fit in the {target.word_bits}-bit word of {target.name}",
            )


class _Conditions:
    """Write conditions: each goes to ``yes`` or ``no``, of which one is ``following``."""

    def __init__(self, code: HandlerCode, values: HandlerValues) -> None:
        self._code = code
        self._values = values

    def write(self, condition: Condition, yes: str, no: str, following: str) -> None:
        code = self._code
        match condition:
            case And(conditions):
                for each in conditions[:-1]:
                    then = code.label()
                    self.write(each, then, no, then)
                    code.enter(then)
                self.write(conditions[-1], yes, no, following)
            case Or(conditions):
                for each in conditions[:-1]:
                    otherwise = code.label()
                    self.write(each, yes, otherwise, otherwise)
                    code.enter(otherwise)
                self.write(conditions[-1], yes, no, following)
            case Not(inner):
                self.write(inner, no, yes, following)
            case Membership(value, choices, is_negated):
                found = tuple(Comparison(value, "==", each, value.span.to(each.span)) for each in choices)
                either = Or(found) if len(found) > 1 else found[0]
                self.write(Not(either) if is_negated else either, yes, no, following)
            case Comparison():
                self._compare(condition, yes, no, following)

    def _compare(self, comparison: Comparison, yes: str, no: str, following: str) -> None:
        left, right, sign = comparison.left, comparison.right, str(comparison.operator)
        if isinstance(left, (Number, Text)):
            if isinstance(right, (Number, Text)):
                fail(comparison.span, "nothing of a hit is in this comparison", "as in: pid == 42")
            if sign not in ("==", "!=", *_TURNED):
                fail(comparison.span, f"'{sign}' goes between a string of a hit and a text", f'as in: comm {sign} "py"')
            left, right, sign = right, left, _TURNED.get(sign, sign)
        if self._values.is_text(left):
            self._compare_texts(comparison, left, sign, right, yes, no, following)
            return
        if sign not in ("==", "!=", "<", "<=", ">", ">=") or self._values.is_text(right):
            self._values.check(left)
        if sign in ("=~", "!~", "startswith", "contains"):
            fail(left.span, f"'{left.span.text}' is a number, and '{sign}' is for strings", self._values.advice(left))
        if self._values.is_text(right):
            of_both = f"of '{left.span.text}' and '{right.span.text}' one is a number, the other a string"
            fail(comparison.span, of_both, self._values.advice(left))
        if sign in ("==", "!="):
            self._values.push(self._code, left)
            self._values.push(self._code, right)
            self._code.add("xor")
            self._code.decide("jz" if sign == "==" else "jnz", yes, no, following)
            return
        is_signed = self._values.is_compared_signed(left, sign, right, comparison.span)
        if sign in (">", "<="):
            left, right = right, left
        if sign in ("<=", ">="):
            yes, no = no, yes
        self._less(left, right, yes, no, following, is_signed=is_signed)

    def _less(self, left: Value, right: Value, yes: str, no: str, following: str, *, is_signed: bool) -> None:
        """Write "left < right": by the difference if both have the same highest bit, else by that of one of them."""
        code, differ = self._code, self._code.label()
        self._values.push(code, right)
        self._values.push(code, left)
        code.add("push tsp, <n>", 1)
        code.add("push tsp, <n>", 1)
        code.add("xor")
        code.add("jlt <label>", differ)
        code.add("ros <cells>", 1)
        code.add("sub")
        code.decide("jlt", yes, no, differ)
        code.place(differ)
        code.add("ros <cells>", 1)
        code.add("xchg")
        code.add("ros <cells>", 1)
        code.decide("jlt" if is_signed else "jge", yes, no, following)

    def _compare_texts(
        self, comparison: Comparison, left: Value, sign: str, right: Value, yes: str, no: str, following: str
    ) -> None:
        if not isinstance(right, Text):
            number = f", not with the number '{right.span.text}'" if isinstance(right, Number) else ""
            fail(right.span, f"'{left.span.text}' is a string, which is compared with a text{number}",
                 f'write "{right.span.text}"' if number else "a handler cannot compare two strings")  # fmt: skip
        text = right.value
        if sign in ("=~", "!~"):
            if sign == "!~":
                yes, no = no, yes
            sign, text = _of_pattern(right)
        elif sign == "!=":
            yes, no, sign = no, yes, "=="
        if sign not in ("==", "startswith", "contains"):
            fail(comparison.span, f"'{left.span.text}' is a string, and strings have no order",
                 "compare it with ==, !=, startswith, contains or in")  # fmt: skip
        if (problem := text_problem(text)) is not None:
            fail(right.span, f"{problem}, if a handler is to compare it")
        if isinstance(left, StringAt):
            self._compare_memory(left, sign, text, right, yes, no, following)
            return
        if sign == "contains":
            fail(left.span, f"'{left.span.text}' is not searched by handlers", "write startswith, or ==")
        self._values.check_process_name(right, text)
        self._code.add("match comm, <text>" if sign == "==" else "match commn, <text>", text, comparison.span)
        self._code.decide("jz", yes, no, following)

    def _compare_memory(
        self, left: StringAt, sign: str, text: str, right: Text, yes: str, no: str, following: str
    ) -> None:
        size, limit = len(text.encode()), left.limit
        if limit is not None and size > limit:
            fail(right.span, f"a string of at most {limit} bytes is compared with a text of {size}")
        code = self._code
        if sign == "contains":
            if not size:
                fail(right.span, "every string contains the empty one")
            self._search(left, text, (limit or max(_SEARCHED, size)) - size + 1, yes, no, following)
            return
        self._values.push(code, left.address)
        is_whole = sign == "==" and size != limit
        code.add("match str, <text>" if is_whole else "match strn, <text>", text, left.span)
        code.decide("jz", yes, no, following)

    def _search(self, left: StringAt, text: str, places: int, yes: str, no: str, following: str) -> None:
        """Write a search: the stack has an address and the number of places that are left."""
        code = self._code
        head, found, ended, decided = (code.label() for _ in range(4))
        self._values.push(code, left.address)
        code.push(places)
        code.place(head)
        code.add("push tsp, <n>", 1)
        code.add("match strn, <text>", text, left.span)
        code.add("jz <label>", found)
        code.add("ros <cells>", 1)
        code.add("push tsp, <n>", 1)
        code.add("push mem, u8", None, left.span)
        code.add("jz <label>", ended)
        code.add("ros <cells>", 1)
        code.add("xchg")
        code.push(1)
        code.add("add")
        code.add("xchg")
        code.add("loop <label>", head)
        code.jumps += places
        code.push(0)
        code.place(ended)
        code.add("ros <cells>", 2)
        code.push(1)
        code.add("jmp <label>", decided)
        code.place(found)
        code.add("ros <cells>", 2)
        code.push(0)
        code.place(decided)
        code.add("xchg")
        code.add("ros <cells>", 1)
        code.decide("jz", yes, no, following)


def _of_pattern(pattern: Text) -> tuple[str, str]:
    """Return how the strings are compared that a pattern matches, and with which text."""
    text = pattern.value
    stripped = text.strip("*")
    if any(sign in stripped for sign in "*?["):
        fail(pattern.span, "a handler cannot match this pattern", 'it can match "text", "text*" and "*text*"')
    if not stripped and text:
        fail(pattern.span, "every string matches this pattern")
    if text.startswith("*") and not text.endswith("*"):
        fail(pattern.span, "a handler cannot match the end of a string", 'it can match "text", "text*" and "*text*"')
    if not text.endswith("*"):
        return "==", stripped
    return "contains" if text.startswith("*") else "startswith", stripped
