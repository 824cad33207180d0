"""
Filters compiled into handlers: a pass from program to program, the same for every engine.

The handler that follows is executed for the hits that match the filter; for all others the filter ends in ``abort``, so
that they count as hits and leave no record. Unreadable memory makes the filter false::

        sx filter9           // if the filter reads memory
        ...                  // the condition
    filter1:
        ros 1; ux            // restores the stack and the exception handler to their state at the hit
        ...                  // the handler
    filter9:
        abort

The code has the same meaning for all word sizes: no value takes several cells, except those that ``check_words``
refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.diagnostics import did_you_mean
from dprobes.filters.filter_language import (
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
    Sum,
    Text,
    Value,
    fail,
    parse,
    values_of,
)
from dprobes.rpn.instruction_encoding import closed
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, ExceptionCode, Flow, rows_by_syntax, text_problem
from dprobes.rpn.program_needs import sets_codes
from dprobes.rpn.rpn_program import Code, Expression, Instruction, ModuleType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.operands import NumberType
    from dprobes.rpn.rpn_program import Operand, ProbeDefinition, Program
    from dprobes.source_text import Span

__all__ = ["check_words", "with_filters"]

# The code of a filter before labels and jumps are resolved: instructions, and the positions of labels. A condition ends
# with a jump to one of two labels; the other one follows. At both labels one obsolete cell is on the stack, so that all
# paths to a label have the same stack depth.

_INVERTED = {"jz": "jnz", "jnz": "jz", "jlt": "jge", "jge": "jlt"}


class HandlerCode:
    """A sequence of instructions under construction, with its labels, which begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.jumps = 0
        """Upper bound of the number of jumps at run time."""
        self._prefix = prefix
        self._label_count = 0

    @property
    def faulting(self) -> list[Instruction]:
        """The instructions that may fault at a hit."""
        return [each for each in self.instructions if ExceptionCode.INVALID_ADDR in each.row.faults]

    def label(self) -> str:
        """Return the name of a new label, which ``place`` defines."""
        self._label_count += 1
        return f"{self._prefix}{self._label_count}"

    def place(self, label: str) -> None:
        """Define ``label`` as the position of the next instruction."""
        self.labels[label] = len(self.instructions)

    def enter(self, label: str) -> None:
        """Begin the code for one result of a condition: define its label, and drop the obsolete cell."""
        self.place(label)
        self.add("ros <cells>", 1)

    def add(self, syntax: str, operand: Operand = None, span: Span | None = None) -> None:
        """Append the instruction with this syntax; ``span`` is its source in the filter."""
        row = rows_by_syntax()[syntax]
        self.instructions.append(Instruction(row, operand, span, span))
        if row.flow in (Flow.JUMP, Flow.BRANCH):
            self.jumps += 1

    def push(self, number: int, span: Span | None = None) -> None:
        """Append an instruction that pushes a constant; ``span`` is its source in the filter."""
        self.add("push <value>", Expression(number), span)

    def decide(self, operator: str, yes: str, no: str, following: str) -> None:
        """
        Append a jump to ``yes`` if the branch instruction ``operator`` branches, otherwise to ``no``.

        ``following`` is the label, ``yes`` or ``no``, that is defined next.
        """
        if following == yes:
            self.add(f"{_INVERTED[operator]} <label>", no)
        else:
            self.add(f"{operator} <label>", yes)
            if following != no:
                self.add("jmp <label>", no)


# The values of a filter at a hit: the valid ones, and the instructions that push them. Values that only records have
# (the time of a record, the place's name) are refused here, with their span in the filter. The existence of a
# processor's register or a tracepoint's field is checked with the rest of the program.

_PROCESS_NAMES = ("comm", "name")
WIDE_NAMES = ("elapsed",)
"""Names of numbers that have 64 bits for any word size."""

_IDS = {"pid": "push pid", "tid": "push tid", "uid": "push uid", "cpu": "push procid", "elapsed": "push elapsed"}
_CODES = ("major", "minor")
_REGISTERS = {"ip": "pc"}
"""Items whose register has another name."""

_OF_RECORDS = {
    "time": "the time of a hit is read with the record",
    "stack_trace": "which record is a stack trace is known when it is there",
    "word_size": "the size of words is the module's",
    "module": "it is the same for all hits of a program",
    "program": "it is the same for all hits of a program",
    "host": "it is the same for all hits of a program",
    "symbol": "places are chosen with 'offset ='",
    "function": "places are chosen with 'offset ='",
}
"""Items that only conditions on records can compare, with the reason why they are not known at a hit."""

_FIELD, _USER, _ENTRY, _USDT = "tp.", "u.", "entry.", "usdt."
_RESULT = "retval"


class HandlerValues:
    """
    The values of a filter in the handler of a definition.

    Warnings are added to ``diagnostics``, if it is not None.
    """

    def __init__(self, program: Program, definition: ProbeDefinition, diagnostics: Diagnostics | None) -> None:
        self._program = program
        self._definition = definition
        self._diagnostics = diagnostics
        self._is_tracepoint = program.modtype is ModuleType.TRACEPOINT

    def is_text(self, value: Value) -> bool:
        """Return whether a value of a filter is a string, not a number."""
        return isinstance(value, (Text, StringAt)) or (isinstance(value, Name) and value.name in _PROCESS_NAMES)

    def check(self, value: Value) -> None:
        """Raise ``SourceError`` if a value is not a number, or is not available at a hit."""
        self.push(HandlerCode(""), value)

    def advice(self, value: Value) -> str | None:
        """Return a hint for a number that may be the address of a string, or None for other values."""
        return f"'str({value.span.text})' is the string at an address" if isinstance(value, (Name, Memory)) else None

    def check_process_name(self, text: Text, wanted: str) -> None:
        """Raise ``SourceError`` if the process name ``wanted`` has more bytes than the kernel stores."""
        if len(wanted.encode()) >= PROCESS_NAME_SIZE:
            fail(
                text.span,
                f"the kernel keeps {PROCESS_NAME_SIZE - 1} bytes of a process name, and this one has more",
                f'write "{wanted[: PROCESS_NAME_SIZE - 1]}"' if wanted.isascii() else None,
            )

    def is_compared_signed(self, left: Value, sign: str, right: Value, place: Span) -> bool:
        """
        Return whether two numbers are compared as signed by the operator ``sign``.

        Raise ``SourceError``, at ``place``, if the result is always the same.
        """
        types = [_type_of(value) for value in (left, right)]
        is_signed = any(known is not None and known.is_signed for known in types) or any(
            isinstance(value, Number) and value.value < 0 for value in (left, right)
        )
        is_result = any(isinstance(value, Name) and value.name == _RESULT and not value.type for value in (left, right))
        if is_signed or is_result:
            if is_result:
                self._warn_of_int(next(value for value in (left, right) if isinstance(value, Name)))
            return True
        if isinstance(right, Number) and right.value == 0 and sign in ("<", ">="):
            fail(
                place,
                f"'{left.span.text}' is compared as a number without a sign, which is never below 0",
                f"write '{_untyped(left)}:s64 {sign} 0', or ':s32' for an int",
            )
        return False

    def _warn_of_int(self, name: Name) -> None:
        """Warn that the result of a function may be narrower than a word."""
        if self._diagnostics is not None:
            self._diagnostics.warning(
                name.span,
                f"'{name.name}' is compared as a whole word, in which the -1 of an int is 4294967295",
                hint=f"write '{name.name}:s32' if the function returns an int, else '{name.name}:s64'",
            )

    def push(self, code: HandlerCode, value: Value) -> None:
        """Append instructions that push a number; raise ``SourceError`` for a value that is not a number."""
        match value:
            case Number(number, span):
                code.push(number, span)
            case Sum(base, addend, span):
                self.push(code, base)
                code.push(addend, span)
                code.add("add")
            case Memory(address, size, span, known):
                self.push(code, address)
                code.add(f"push mem, u{8 * size}", None, span)
                _narrow(code, known)
            case Name(_, _, known):
                self._push_name(code, value)
                _narrow(code, known)
            case Text(text, span) if len(text) == 1:
                code.push(ord(text), span)
            case _:
                fail(value.span, f"'{value.span.text}' is a string, and a number is needed here")

    def _push_name(self, code: HandlerCode, value: Name) -> None:
        name, span = value.name, value.span
        if name in _PROCESS_NAMES:
            fail(span, f"'{name}' is a string, and a number is needed here")
        elif name in _IDS:
            code.add(_IDS[name], None, span)
        elif name in _CODES:
            if sets_codes(self._program):
                fail(span, f"the handlers of this program set '{name}' themselves, after the filter")
            code.push(getattr(self._program if name == "major" else self._definition, name), span)
        elif name in _OF_RECORDS:
            fail(span, f"'{name}' exists in records, but not at a hit: {_OF_RECORDS[name]}")
        elif name.startswith(_USDT) and name.removeprefix(_USDT).isdecimal():
            code.add("push usdt, <argument>", int(name.removeprefix(_USDT)), span)
        elif name.startswith(_FIELD) or (self._is_tracepoint and not name.startswith((_USER, _ENTRY))):
            code.add("push tp, <field>", name.removeprefix(_FIELD), span)
        else:
            self._push_register(code, value)

    def _push_register(self, code: HandlerCode, value: Name) -> None:
        name, syntax = value.name.lower(), "push r, <register>"
        for prefix, other in ((_USER, "push u, <register>"), (_ENTRY, "push entry, <register>")):
            if name.startswith(prefix):
                name, syntax = name.removeprefix(prefix), other
        name = _REGISTERS.get(name, name)
        known = [(target, target.register(name)) for target in map(architecture, ARCHITECTURE_NAMES)]
        registers = [(target, register) for target, register in known if register is not None]
        if not registers:
            names = [
                *_PROCESS_NAMES,
                *_IDS,
                *_CODES,
                *dict.fromkeys(n for each, _ in known for n in each.register_names),
            ]
            known_ones = "registers such as arg0 and retval, mem(address, bytes), str(address)"
            hint = did_you_mean(value.name, names) or f"there are {', '.join(names[:9])}, {known_ones}"
            fail(value.span, f"there is no '{value.name}' at a hit", hint)
        if any(each.selector_cells or each.cells(target.word_size) > 1 for target, each in registers):
            fail(value.span, f"'{name}' has more bits than a word, and cannot be compared")
        code.add(syntax, name, value.span)


def _type_of(value: Value) -> NumberType | None:
    return value.type if isinstance(value, (Name, Memory)) else None


def _untyped(value: Value) -> str:
    text = value.span.text
    return text.rpartition(":")[0] if _type_of(value) is not None else text


def _narrow(code: HandlerCode, known: NumberType | None) -> None:
    """
    Append the truncation of the top cell of the stack to the bits of its type, with zero or sign extension.

    Append nothing if the type is None, or has 64 bits.
    """
    if known is not None and known.bits < 64:
        code.add(known.extension, known.bits)


_WIDEST = 64
"""Width in bits of the widest number."""

_IN_MEMORY_SOMEWHERE = "push r, <register>"
"""
An instruction that faults only if an argument on the stack of the process cannot be read.

A running process has its stack mapped.
"""

_PREFIX = "filter"
_SEARCHED = 64
"""Default maximum of the bytes of a string that are searched."""

_JUMPS_MAX = (1 << 32) - 1

_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def with_filters(
    program: Program, filters: Sequence[str], diagnostics: Diagnostics, *, called: str = "--filter"
) -> Program:
    """
    Return a program whose handlers are executed only for hits that match all filters.

    ``called`` is the option's name in messages. Raise ``SourceError`` for a filter that is invalid, or that a handler
    cannot evaluate. Warnings are added to ``diagnostics``. ``jmpmax`` is raised by the jumps of the filters, so a
    handler may make as many jumps as before.
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
    """Return a definition whose handler begins with a filter, and the maximum number of jumps that the filter makes."""
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
    """
    Raise ``SourceError`` if the filter may fault and the definition's exception mask does not enable INVALID_ADDR.

    The fault would end the handler with a record.
    """
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
    """
    Raise ``SourceError`` for a number of a filter that does not fit in a word of the target.

    ``called`` is the option's name in messages.
    """
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
    """Code generator for conditions. Each condition jumps to ``yes`` or ``no``, one of which is ``following``."""

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
        """
        Append code that compares two words, and jumps to label ``yes`` if left < right, else to ``no``.

        ``following`` is the label directly after this code, to which no jump is necessary. If the highest bits are
        equal, the sign of the difference decides, else the highest bit of one word.
        """
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
        """
        Append code that searches a string in memory, and jumps to label ``yes`` if ``text`` is found, else to ``no``.

        ``places`` is the number of positions to search. ``following`` is the label directly after this code. During the
        search, the stack has an address and the number of remaining positions.
        """
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
    """
    Return the operator that is equivalent to ``=~`` with a pattern, and the text that it compares with.

    Raise ``SourceError`` for a pattern that no operator can replace.
    """
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
