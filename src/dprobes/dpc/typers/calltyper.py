"""Calls with types: of functions of the program, and of what the language provides; and tests of strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax import tree
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typers.operatortyper import TypingError
from dprobes.dpc.typers.provided import CALL_FORMS, KINDS, PROVIDED, RESERVED_CALLS
from dprobes.dpc.typers.tablewrites import is_text_choice
from dprobes.dpc.typers.typetable import UnknownTypeError
from dprobes.dpc.types.ctype import (
    CHAR,
    INT,
    UNSIGNED,
    UNSIGNED_CHAR,
    UNSIGNED_LONG_LONG,
    UNSIGNED_SHORT,
    Array,
    Enumeration,
    Integer,
    Network,
    Pointer,
    Stack,
    String,
    size_of,
)
from dprobes.rpn.isa import PROCESS_NAME_SIZE, USER_FRAMES_MAX, text_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.dpc.typedtree.scope import FunctionSignature
    from dprobes.dpc.typedtree.typed import Value
    from dprobes.dpc.typers.typerinterface import ExpressionTyper
    from dprobes.source import Span

__all__ = ["CallTyper"]

_STRING_MAX = 65530
"""Bytes of a string that a record can have, with what is before it."""

_MEMORY_MAX = 1024
"""Bytes of memory that a record has of a length that only the hit knows."""

_NTOP_MAX, _AF_INET6, _IPV4, _IPV6 = 2, 10, 4, 16
"""The arguments of ``ntop``, the family of the longer addresses, and how many bytes addresses have."""

_SWAPPED = {"s": 16, "l": 32}
"""How many bits ``ntohs`` and ``ntohl`` have."""

_COMM_MAX = PROCESS_NAME_SIZE - 1
"""Bytes of a process name, without its NUL."""

_COUNTS = {
    "str": (1, 2), "mem": (2,), "ustack": (0, 1), "kstack": (0, 1), "sym": (1,),
    **dict.fromkeys(("bswap", "ntohs", "htons", "ntohl", "htonl"), (1,)),
}  # fmt: skip
"""How many arguments calls have."""

_STACK_HINT = "keep the addresses of callers to subtract from where something began: 'dprobes examples leaks' shows how"


class CallTyper:
    """
    Type calls; ``values`` types their arguments.

    What is hit at a return is the function that began at its entry. In a block of the tool, ``is_tool``, a text in
    quotes is a string.
    """

    def __init__(
        self, values: ExpressionTyper, functions: Mapping[str, FunctionSignature], *, at_return: bool, is_tool: bool
    ) -> None:
        self._values = values
        self._functions = functions
        self._at_return = at_return
        self._is_tool = is_tool

    def call(self, call: tree.Call) -> Value:
        """Return the value of a call."""
        if (function := self._functions.get(call.function)) is not None:
            return self._function_call(call, function)
        match call.function, call.arguments:
            case "reg", [tree.StringLiteral(name)]:
                return typed.Register(name.lower(), self._values.types.word)
            case "reg", _:
                raise self._values.wrong(call.span, "'reg' takes the name of a register", 'write reg("rax")')
            case "sym", [address]:
                return self._values.converted(self._values.value(address), self._values.types.word, address.span)
            case "bswap" | "ntohs" | "htons" | "ntohl" | "htonl" as name, [number]:
                return self._swapped(number, bits=_SWAPPED.get(name[-1]))
            case "startswith", [subject, tree.StringLiteral(text)]:
                return self._test_of(subject, text, is_prefix=True)
            case "startswith", _:
                raise self._values.wrong(
                    call.span, "'startswith' takes a string and a text in quotes", 'write startswith(str(p), "/etc")'
                )
        if call.function in RESERVED_CALLS:
            raise self._misused(call)
        from dprobes.dpc.tracerwords import call_hint

        hint = f"write {call.function}" if call.function in PROVIDED else call_hint(call.function)
        hint = hint or did_you_mean(call.function, [*self._functions, *RESERVED_CALLS])
        raise self._values.wrong(call.span, f"there is no function '{call.function}'", hint)

    def _misused(self, call: tree.Call) -> TypingError:
        """Report a call of what the language provides that has other arguments, or stands where a value does."""
        name, form = call.function, CALL_FORMS[call.function]
        if name in _COUNTS and len(call.arguments) not in _COUNTS[name]:
            return self._values.wrong(call.span, f"'{name}' is not called with these arguments", f"write {form}")
        hint = None
        if name in KINDS:
            return self._values.wrong(call.span, f"'{name}' is what a table keeps", f"write @name[keys] = {form}")
        if name in ("ustack", "kstack"):
            hint = _STACK_HINT
        return self._values.wrong(call.span, f"'{name}' {RESERVED_CALLS[name]}", hint)

    def _function_call(self, call: tree.Call, function: FunctionSignature) -> Value:
        if len(call.arguments) != len(function.parameters):
            count = len(function.parameters)
            raise self._values.wrong(
                call.span, f"'{function.name}' has {count} parameters, and gets {len(call.arguments)} arguments"
            )
        arguments = tuple(
            self._values.converted(self._values.value(argument), type_, argument.span)
            for argument, type_ in zip(call.arguments, function.parameters, strict=True)
        )
        return typed.FunctionCall(function.name, arguments, function.type, call.span)

    def text_test(self, expression: tree.Binary) -> Value | None:
        """Return the test of a string against a text in quotes, if an expression is one."""
        for subject, text in ((expression.left, expression.right), (expression.right, expression.left)):
            if isinstance(text, tree.StringLiteral):
                return self._test_of(subject, text.value, is_prefix=False)
        for subject, text in ((expression.left, expression.right), (expression.right, expression.left)):
            if _is_string(subject):
                written = text.span.text if isinstance(text, tree.Name) and not text.module else "…"
                hint = None
                if not isinstance(text, tree.Call):
                    hint = f'write {subject.span.text} {expression.operator} "{written}"'
                raise self._values.wrong(text.span, "a string is compared with a text in double quotes", hint)
        return None

    def _test_of(self, subject: tree.Expression, text: str, *, is_prefix: bool) -> Value:
        if (problem := text_problem(text)) is not None:
            raise self._values.wrong(subject.span, f"this string cannot be compared: {problem}")
        if text.endswith("*") and not is_prefix:
            hint = f'write startswith({subject.span.text}, "{text[:-1]}") for all that begin so'
            self._values.operators.warn(
                subject.span, "a string is compared with a text as it is: '*' is no pattern", hint
            )
        match subject:
            case tree.Name("comm"):
                if len(text.encode()) > _COMM_MAX and not is_prefix:
                    raise self._values.wrong(
                        subject.span, f"a process name has at most {_COMM_MAX} bytes: this is never equal"
                    )
                return typed.CommTest(text, is_prefix, INT)
            case tree.Call("str", [pointer, *rest]) if len(rest) <= 1:
                address = self._values.converted(self._values.value(pointer), self._values.types.word, pointer.span)
                if rest and not is_prefix:
                    hint = f'write startswith(str({pointer.span.text}), "{text}")'
                    length, size = self._length(rest[0], hint), len(text.encode())
                    if size > length:
                        message = f"this string has at most {length} bytes: it is never equal"
                        raise self._values.wrong(subject.span, message, "leave the length out: str(p)")
                    is_prefix = size == length
                return typed.TextTest(address, text, is_prefix, INT)
            case tree.TableAccess() if (kept := self._values.kept(subject)) is not None:
                return self._kept_test(kept, text, subject.span, is_prefix=is_prefix)
        if isinstance(subject, tree.Name) and (provided := PROVIDED.get(subject.name)) is not None and provided.type:
            hint = f"write {subject.name} == {text if text.isdecimal() else 0}"
            raise self._values.wrong(subject.span, f"'{subject.name}' is a number, and no string", hint)
        written = subject.span.text if isinstance(subject, tree.Name | tree.MemberAccess) else "p"
        if isinstance(subject, tree.Call) and subject.function == "mem" and subject.arguments:
            written = subject.arguments[0].span.text
        hint = f'write str({written}) == "{text}"'
        if is_prefix:
            hint = f'write startswith(str({written}), "{text}")'
        raise self._values.wrong(subject.span, "only 'comm' and str(p) are strings that can be compared", hint)

    def _kept_test(self, kept: typed.Kept, text: str, span: Span, *, is_prefix: bool) -> Value:
        if not isinstance(kept.type, String):
            raise self._values.wrong(span, "a call stack is no string, and cannot be compared")
        if len(text.encode()) > kept.type.shown:
            message = f"this table keeps at most {kept.type.shown} bytes of a string: this is never equal"
            raise self._values.wrong(span, message, "keep more of it: str(p, n)")
        return typed.KeptTest(kept, text, is_prefix, INT)

    def text(self, expression: tree.Expression) -> typed.Argument | None:
        """Return what can only be printed or be a key; None of a value."""
        limit = self._values.types.string_limit
        match expression:
            case tree.TableAccess():
                return self._values.kept(expression)
            case tree.StringLiteral(text):
                if (problem := text_problem(text)) is not None:
                    raise self._values.wrong(expression.span, f"this text cannot be kept or printed: {problem}")
                return typed.Literal(text, limit + 1, String(limit + 1))
            case tree.Conditional() if is_text_choice(expression):
                return self._text_choice(expression)
            case tree.Name("comm"):
                return typed.CommName(String(PROCESS_NAME_SIZE))
            case tree.Name("func" | "probe"):
                return typed.Register("pc", self._values.types.word, at_entry=self._at_return)
            case tree.Call("str", [pointer, *rest]) if len(rest) <= 1:
                number = limit
                if rest:
                    bytes_ = f"mem({pointer.span.text}, {rest[0].span.text})"
                    hint = f"bytes of a length that the hit knows are {bytes_}, printed as text by %s"
                    number = self._length(rest[0], hint)
                if (count := self._characters(pointer)) is not None and count <= number:
                    return typed.Text(self._address(pointer), count, String(count))
                return typed.Text(self._address(pointer), number + 1, String(number + 1, marks=True))
            case tree.Call("mem", [pointer, size]):
                length = self._values.converted(self._values.value(size), UNSIGNED, size.span)
                if isinstance(length, typed.Constant):
                    return typed.Bytes(self._address(pointer), length, Array(CHAR, None))
                return typed.Bytes(self._address(pointer), self._limited(length), Array(CHAR, None, _MEMORY_MAX))
            case tree.Call("ustack" | "kstack" as name, arguments) if len(arguments) <= 1:
                frames = self._number(arguments[0], USER_FRAMES_MAX, "frames of a call stack") if arguments else None
                return typed.StackTrace(name == "kstack", frames, Stack(name == "kstack", frames))
            case tree.Call("ntop", arguments):
                return self._network_address(arguments, expression.span)
        return None

    def _length(self, length: tree.Expression, hint: str) -> int:
        """Return at most how many bytes a string has, ``str(p, n)``; ``hint`` says what else is written."""
        try:
            value = self._values.value(length)
        except UnknownTypeError:
            raise TypingError from None
        if not isinstance(value, typed.Constant):
            raise self._values.wrong(length.span, "the length of a string is a constant", hint)
        return self._number(length, _STRING_MAX, "bytes of a string")

    def _limited(self, length: Value) -> Value:
        """Return a length that only the hit knows, at most one byte more than is shown."""
        most = typed.Constant(_MEMORY_MAX + 1, UNSIGNED)
        first, kept = self._values.kept_once(length)
        is_more = typed.Comparison("<", most, kept, is_signed=False, type=INT)
        limited = typed.Choice(is_more, most, kept, UNSIGNED)
        return limited if first is None else typed.Sequence(first, limited, UNSIGNED)

    def _characters(self, expression: tree.Expression) -> int | None:
        """Return how many characters the array has that an expression is; None of everything else."""
        if not isinstance(expression, tree.Name | tree.MemberAccess | tree.Index | tree.Unary):
            return None
        type_ = self._values.type_of(expression)
        if not isinstance(type_, Array) or not type_.count or size_of(type_.element) != 1:
            return None
        return type_.count

    def array_text(self, address: Value, count: int | None) -> typed.Text:
        """Return the string in an array of ``count`` characters, of which no more are read; or at an address."""
        limit = self._values.types.string_limit
        whole = folded(typed.Convert(address, self._values.types.word))
        if count is not None and count <= limit:
            return typed.Text(whole, count, String(count))
        return typed.Text(whole, limit + 1, String(limit + 1, marks=True))

    def _text_choice(self, expression: tree.Conditional) -> typed.TextChoice:
        if self._is_tool:
            message = "a block of the tool chooses between numbers only, not between strings"
            raise self._values.wrong(expression.span, message, "write if (…) … else …")
        yes, no = (self.text(each) for each in (expression.yes, expression.no))
        assert isinstance(yes, typed.Literal | typed.TextChoice)
        assert isinstance(no, typed.Literal | typed.TextChoice)
        return typed.TextChoice(
            self._values.condition(expression.condition), yes, no, String(self._values.types.string_limit + 1)
        )

    def _network_address(self, arguments: Sequence[tree.Expression], span: Span) -> typed.NetworkAddress:
        """Return ``ntop(address)`` or ``ntop(family, address)``: the address is a number, or where it is in memory."""
        if not 1 <= len(arguments) <= _NTOP_MAX:
            raise self._values.wrong(span, "'ntop' takes an address, or the family and an address")
        address = self._values.value(arguments[-1])
        if not isinstance(address.type, Pointer):
            number = self._values.converted(address, self._values.types.word, arguments[-1].span)
            return typed.NetworkAddress(number, None, Network())
        size: Value = typed.Constant(_IPV4 if size_of(address.type.target) == _IPV4 else _IPV6, UNSIGNED)
        if len(arguments) == _NTOP_MAX:
            family = self._values.converted(self._values.value(arguments[0]), UNSIGNED, arguments[0].span)
            is_new = typed.Comparison("==", family, typed.Constant(_AF_INET6, UNSIGNED), is_signed=False, type=INT)
            size = folded(
                typed.Choice(is_new, typed.Constant(_IPV6, UNSIGNED), typed.Constant(_IPV4, UNSIGNED), UNSIGNED)
            )
        else:
            type_ = self._values.type_of(arguments[-1])
            if isinstance(type_, Array) and size_of(type_) == _IPV4:
                size = typed.Constant(_IPV4, UNSIGNED)
        place = self._values.converted(address, self._values.types.word, arguments[-1].span)
        return typed.NetworkAddress(place, size, Network())

    def _swapped(self, expression: tree.Expression, *, bits: int | None) -> Value:
        """Return a number with its bytes in the other order; of all bits of its type, or of so many."""
        value = self._values.value(expression)
        size = size_of(value.type) if bits is None else bits // 8
        if not isinstance(value.type, Integer | Enumeration) or size is None:
            raise self._values.wrong(expression.span, f"'{value.type}' has no bytes that could be swapped")
        type_ = {1: UNSIGNED_CHAR, 2: UNSIGNED_SHORT, 4: UNSIGNED, 8: UNSIGNED_LONG_LONG}[size]
        first, kept = self._values.kept_once(folded(typed.Convert(value, type_)))
        computed = UNSIGNED_LONG_LONG if size > INT.size else UNSIGNED
        found: Value = typed.Constant(0, computed)
        for byte in range(size):
            part: Value = typed.Convert(kept, computed)
            part = typed.Arithmetic(">>", part, typed.Constant(8 * byte, INT), computed)
            part = typed.Arithmetic("&", part, typed.Constant(0xFF, computed), computed)
            part = typed.Arithmetic("<<", part, typed.Constant(8 * (size - 1 - byte), INT), computed)
            found = folded(typed.Arithmetic("|", found, folded(part), computed))
        whole = folded(typed.Convert(found, type_))
        return whole if first is None else typed.Sequence(first, whole, type_)

    def _address(self, pointer: tree.Expression) -> Value:
        if isinstance(pointer, tree.TableAccess) and self._values.kept(pointer) is not None:
            raise self._values.wrong(pointer.span, f"'@{pointer.name}' keeps no address, but what is to be printed")
        return self._values.converted(self._values.value(pointer), self._values.types.word, pointer.span)

    def _number(self, expression: tree.Expression, most: int, what: str) -> int:
        """Return a number from 1 to ``most``."""
        number = self._values.constant(expression)
        if number is None:
            raise TypingError
        if not 1 <= number <= most:
            raise self._values.wrong(expression.span, f"{number} {what}: there are from 1 to {most}")
        return number


def _is_string(expression: tree.Expression) -> bool:
    """Return whether an expression is a string, whatever it is compared with."""
    match expression:
        case tree.Name("comm") | tree.Call("str"):
            return True
    return False
