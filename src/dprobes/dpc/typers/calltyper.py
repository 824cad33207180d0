"""Calls with types: of functions of the program, and of what the language provides; and tests of strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax import tree
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typers.operatortyper import TypingError
from dprobes.dpc.typers.provided import RESERVED_CALLS
from dprobes.dpc.typers.tablewrites import is_text_choice
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

_STRING_MAX = 65535
_NTOP_MAX, _AF_INET6, _IPV4, _IPV6 = 2, 10, 4, 16
"""The arguments of ``ntop``, the family of the longer addresses, and how many bytes addresses have."""

_SWAPPED = {"s": 16, "l": 32}
"""How many bits ``ntohs`` and ``ntohl`` have."""

_COMM_MAX = PROCESS_NAME_SIZE - 1
"""Bytes of a process name, without its NUL."""

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
            hint = _STACK_HINT if call.function in ("ustack", "kstack") else None
            raise self._values.wrong(call.span, f"'{call.function}' {RESERVED_CALLS[call.function]}", hint)
        from dprobes.dpc.bpftracewords import call_hint

        hint = call_hint(call.function) or did_you_mean(call.function, [*self._functions, *RESERVED_CALLS])
        raise self._values.wrong(call.span, f"there is no function '{call.function}'", hint)

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
        return None

    def _test_of(self, subject: tree.Expression, text: str, *, is_prefix: bool) -> Value:
        if (problem := text_problem(text)) is not None:
            raise self._values.wrong(subject.span, f"this string cannot be compared: {problem}")
        match subject:
            case tree.Name("comm"):
                if len(text.encode()) > _COMM_MAX and not is_prefix:
                    raise self._values.wrong(
                        subject.span, f"a process name has at most {_COMM_MAX} bytes: this is never equal"
                    )
                return typed.CommTest(text, is_prefix, INT)
            case tree.Call("str", [pointer, *_]):
                address = self._values.converted(self._values.value(pointer), self._values.types.word, pointer.span)
                return typed.TextTest(address, text, is_prefix, INT)
            case tree.TableAccess() if (kept := self._values.kept(subject)) is not None:
                return self._kept_test(kept, text, subject.span, is_prefix=is_prefix)
        written = subject.span.text if isinstance(subject, tree.Name | tree.MemberAccess) else "p"
        hint = f'write startswith(str({written}), "…")' if is_prefix else f'write str({written}) == "…"'
        raise self._values.wrong(subject.span, "only 'comm' and str(p) are strings that can be compared", hint)

    def _kept_test(self, kept: typed.Kept, text: str, span: Span, *, is_prefix: bool) -> Value:
        if not isinstance(kept.type, String):
            raise self._values.wrong(span, "a call stack is no string, and cannot be compared")
        if len(text.encode()) > kept.type.limit:
            message = f"this table keeps at most {kept.type.limit} bytes of a string: this is never equal"
            raise self._values.wrong(span, message, "keep more of it: str(p, n)")
        return typed.KeptTest(kept, text, is_prefix, INT)

    def text(self, expression: tree.Expression, *, limit: int) -> typed.Argument | None:
        """Return what can only be printed or be a key; None of a value. ``limit`` is that of ``str(p)``."""
        match expression:
            case tree.TableAccess():
                return self._values.kept(expression)
            case tree.StringLiteral(text):
                if (problem := text_problem(text)) is not None:
                    raise self._values.wrong(expression.span, f"this text cannot be kept or printed: {problem}")
                return typed.Literal(text, limit, String(limit))
            case tree.Conditional() if is_text_choice(expression):
                return self._text_choice(expression, limit=limit)
            case tree.Name("comm"):
                return typed.CommName(String(PROCESS_NAME_SIZE))
            case tree.Name("func" | "probe"):
                return typed.Register("pc", self._values.types.word, at_entry=self._at_return)
            case tree.Call("str", [pointer, *rest]) if len(rest) <= 1:
                number = self._number(rest[0], _STRING_MAX, "bytes of a string") if rest else limit
                return typed.Text(self._address(pointer), number, String(number))
            case tree.Call("mem", [pointer, size]):
                length = self._values.converted(self._values.value(size), UNSIGNED, size.span)
                return typed.Bytes(self._address(pointer), length, Array(CHAR, None))
            case tree.Call("ustack" | "kstack" as name, arguments) if len(arguments) <= 1:
                frames = self._number(arguments[0], USER_FRAMES_MAX, "frames of a call stack") if arguments else None
                return typed.StackTrace(name == "kstack", frames, Stack(name == "kstack", frames))
            case tree.Call("ntop", arguments):
                return self._network_address(arguments, expression.span)
        return None

    def _text_choice(self, expression: tree.Conditional, *, limit: int) -> typed.TextChoice:
        if self._is_tool:
            message = "a block of the tool chooses between numbers only, not between strings"
            raise self._values.wrong(expression.span, message, "write if (…) … else …")
        yes, no = (self.text(each, limit=limit) for each in (expression.yes, expression.no))
        assert isinstance(yes, typed.Literal | typed.TextChoice)
        assert isinstance(no, typed.Literal | typed.TextChoice)
        return typed.TextChoice(self._values.condition(expression.condition), yes, no, String(limit))

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
