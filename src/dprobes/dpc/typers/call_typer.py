"""Typing of calls: of the program's functions and of those of the language, and of string tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import (
    ItemName,
)
from dprobes.dpc.typedtree.process_items import FIELDS, strings_of
from dprobes.dpc.typedtree.value_properties import folded
from dprobes.dpc.typers.operator_typer import TypingError
from dprobes.dpc.typers.provided_names import (
    CALL_FORMS,
    KINDS,
    PROVIDED,
    RESERVED_CALLS,
)
from dprobes.dpc.typers.table_uses import is_text_choice
from dprobes.dpc.typers.type_table import UnknownTypeError
from dprobes.dpc.types.c_types import (
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
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, USER_FRAMES_MAX, text_problem
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX
from dprobes.rpn.performance_counters import unknown_counter_hint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.dpc.typedtree.name_scope import FunctionSignature, Surroundings
    from dprobes.dpc.typedtree.typed_values import Value
    from dprobes.dpc.typers.operator_typer import ExpressionTyper
    from dprobes.source_text import Span

__all__ = ["CallTyper"]

_STRING_MAX = 65530
"""Maximum size in bytes of a string in a record, which leaves room for its prefix."""

_MEMORY_MAX = 1024
"""Maximum size in bytes of memory in a record whose length is known only at the hit."""

_NTOP_MAX, _AF_INET6, _IPV4, _IPV6 = 2, 10, 4, 16
"""
Maximum number of arguments of ``ntop``, the address family of IPv6 (AF_INET6), and the sizes of addresses in bytes.
"""

_SWAPPED = {"s": 16, "l": 32}
"""Widths in bits of the operands of ``ntohs`` and ``ntohl``, by the last letter of the name."""

_COMM_MAX = PROCESS_NAME_SIZE - 1  # without the NUL
_COUNTS = {
    "str": (1, 2), "mem": (2,), "ustack": (0, 1), "kstack": (0, 1), "sym": (1,),
    **dict.fromkeys(("bswap", "ntohs", "htons", "ntohl", "htonl"), (1,)),
}  # fmt: skip
"""The accepted numbers of arguments of each call."""

_STACK_HINT = (
    "keep the addresses of callers to subtract from where something began: 'dprobes sets libc.malloc/leaks' shows how"
)


class CallTyper:
    """
    A typer of calls; ``values`` types their arguments.

    At the return of a function, ``func`` and ``probe`` name the function that was entered. In a block of the tool, a
    string literal is a string.
    """

    def __init__(
        self, values: ExpressionTyper, functions: Mapping[str, FunctionSignature], where: Surroundings
    ) -> None:
        self._values = values
        self._functions = functions
        self._where = where
        self._at_return = where.at_return and not where.is_traced
        self._is_tool = where.is_tool

    def call(self, call: syntax_tree.Call) -> Value:
        """
        Return the value of a call of a function of the program or of the language.

        Raise ``TypingError`` for errors.
        """
        if (function := self._functions.get(call.function)) is not None:
            return self._function_call(call, function)
        match call.function, call.arguments:
            case "reg", [syntax_tree.StringLiteral(name)]:
                return typed_values.Register(name.lower(), self._values.types.word)
            case "reg", _:
                raise self._values.wrong(call.span, "'reg' takes the name of a register", 'write reg("rax")')
            case "pmc" | "elapsed" as pushed, [syntax_tree.StringLiteral(name)]:
                return self._counter(call, pushed, name)
            case "pmc", _:
                raise self._values.wrong(call.span, "'pmc' takes the name of a counter", 'write pmc("page-faults")')
            case "sym", [address]:
                return self._values.converted(self._values.value(address), self._values.types.word, address.span)
            case "bswap" | "ntohs" | "htons" | "ntohl" | "htonl" as name, [number]:
                return self._swapped(number, bits=_SWAPPED.get(name[-1]))
            case "startswith", [subject, syntax_tree.StringLiteral(text)]:
                return self._test_of(subject, text, is_prefix=True)
            case "startswith", _:
                raise self._values.wrong(
                    call.span, "'startswith' takes a string and a text in quotes", 'write startswith(str(p), "/etc")'
                )
        if call.function in RESERVED_CALLS:
            raise self._misused(call)
        from dprobes.dpc.tracer_words import call_hint

        hint = f"write {call.function}" if call.function in PROVIDED else call_hint(call.function)
        hint = hint or did_you_mean(call.function, [*self._functions, *RESERVED_CALLS])
        raise self._values.wrong(call.span, f"there is no function '{call.function}'", hint)

    def _counter(self, call: syntax_tree.Call, pushed: str, name: str) -> Value:
        """Return the value of a performance counter of the thread; ``pushed`` is the operand of ``push``."""
        if pushed == "elapsed" and not self._where.at_return:
            raise self._values.wrong(call.span, "'elapsed' needs a return", self._where.way_to_return)
        if (hint := unknown_counter_hint(name)) is not None:
            raise self._values.wrong(call.arguments[0].span, f"there is no counter '{name[:40]}'", hint)
        return typed_values.System(f"{pushed}, {name}", UNSIGNED_LONG_LONG)

    def _misused(self, call: syntax_tree.Call) -> TypingError:
        """Report a call to a function of the language that is wrong or has no value; return the ``TypingError``."""
        name, form = call.function, CALL_FORMS[call.function]
        if name in _COUNTS and len(call.arguments) not in _COUNTS[name]:
            return self._values.wrong(call.span, f"'{name}' is not called with these arguments", f"write {form}")
        hint = None
        if name in KINDS:
            return self._values.wrong(call.span, f"'{name}' is a value of tables", f"write @name[keys] = {form}")
        if name in ("ustack", "kstack"):
            hint = _STACK_HINT
        return self._values.wrong(call.span, f"'{name}' {RESERVED_CALLS[name]}", hint)

    def _function_call(self, call: syntax_tree.Call, function: FunctionSignature) -> Value:
        if len(call.arguments) != len(function.parameters):
            count = len(function.parameters)
            raise self._values.wrong(
                call.span, f"'{function.name}' has {count} parameters, and gets {len(call.arguments)} arguments"
            )
        arguments = tuple(
            self._values.converted(self._values.value(argument), type_, argument.span)
            for argument, type_ in zip(call.arguments, function.parameters, strict=True)
        )
        return typed_values.FunctionCall(function.name, arguments, function.type, call.span)

    def text_test(self, expression: syntax_tree.Binary) -> Value | None:
        """Return the test of a string against a literal, or None for other expressions."""
        for subject, text in ((expression.left, expression.right), (expression.right, expression.left)):
            if isinstance(text, syntax_tree.StringLiteral):
                return self._test_of(subject, text.value, is_prefix=False)
        for subject, text in ((expression.left, expression.right), (expression.right, expression.left)):
            if _is_string(subject):
                written = text.span.text if isinstance(text, syntax_tree.Name) and not text.module else "…"
                hint = None
                if not isinstance(text, syntax_tree.Call):
                    hint = f'write {subject.span.text} {expression.operator} "{written}"'
                raise self._values.wrong(text.span, "a string is compared with a text in double quotes", hint)
        return None

    def _test_of(self, subject: syntax_tree.Expression, text: str, *, is_prefix: bool) -> Value:
        if (problem := text_problem(text)) is not None:
            raise self._values.wrong(subject.span, f"this string cannot be compared: {problem}")
        if text.endswith("*") and not is_prefix:
            hint = f'write startswith({subject.span.text}, "{text[:-1]}") for all that begin so'
            self._values.operators.warn(
                subject.span, "a string is compared with a text as it is: '*' is not a pattern", hint
            )
        match subject:
            case syntax_tree.Name("comm"):
                if len(text.encode()) > _COMM_MAX and not is_prefix:
                    raise self._values.wrong(
                        subject.span, f"a process name has at most {_COMM_MAX} bytes: this is never equal"
                    )
                return typed_values.CommTest(text, is_prefix, INT)
            case syntax_tree.Call("str", [pointer, *rest]) if len(rest) <= 1:
                address = self._values.converted(self._values.value(pointer), self._values.types.word, pointer.span)
                if rest and not is_prefix:
                    hint = f'write startswith(str({pointer.span.text}), "{text}")'
                    length, size = self._length(rest[0], hint), len(text.encode())
                    if size > length:
                        message = f"this string has at most {length} bytes: it is never equal"
                        raise self._values.wrong(subject.span, message, "leave the length out: str(p)")
                    is_prefix = size == length
                return typed_values.TextTest(address, text, is_prefix, INT)
            case syntax_tree.MemberAccess() if isinstance(field := self.text(subject), typed_values.ItemText):
                return typed_values.ItemTest(field, text, is_prefix, INT)
            case syntax_tree.TableAccess() if (kept := self._values.kept(subject)) is not None:
                return self._kept_test(kept, text, subject.span, is_prefix=is_prefix)
        if (
            isinstance(subject, syntax_tree.Name)
            and (provided := PROVIDED.get(subject.name)) is not None
            and provided.type
        ):
            hint = f"write {subject.name} == {text if text.isdecimal() else 0}"
            raise self._values.wrong(subject.span, f"'{subject.name}' is a number, and no string", hint)
        written = subject.span.text if isinstance(subject, syntax_tree.Name | syntax_tree.MemberAccess) else "p"
        if isinstance(subject, syntax_tree.Call) and subject.function == "mem" and subject.arguments:
            written = subject.arguments[0].span.text
        hint = f'write str({written}) == "{text}"'
        if is_prefix:
            hint = f'write startswith(str({written}), "{text}")'
        raise self._values.wrong(subject.span, "only 'comm' and str(p) are strings that can be compared", hint)

    def _kept_test(self, kept: typed_values.Kept, text: str, span: Span, *, is_prefix: bool) -> Value:
        if not isinstance(kept.type, String):
            raise self._values.wrong(span, "a call stack is not a string, and cannot be compared")
        if len(text.encode()) > kept.type.shown:
            message = f"this table keeps at most {kept.type.shown} bytes of a string: this is never equal"
            raise self._values.wrong(span, message, "keep more of it: str(p, n)")
        return typed_values.KeptTest(kept, text, is_prefix, INT)

    def text(self, expression: syntax_tree.Expression) -> typed_values.Argument | None:
        """Return an argument that can only be printed or be a key field; None for an expression with a value."""
        limit = self._values.types.string_limit
        match expression:
            case syntax_tree.TableAccess():
                return self._values.kept(expression)
            case syntax_tree.MemberAccess(syntax_tree.Name(name), field, is_arrow=False) if isinstance(
                item := self._values.scope.find(name), ItemName
            ):
                return self._text_of_item(item, field)
            case syntax_tree.StringLiteral(text):
                if (problem := text_problem(text)) is not None:
                    raise self._values.wrong(expression.span, f"this text cannot be kept or printed: {problem}")
                return typed_values.Literal(text, limit + 1, String(limit + 1))
            case syntax_tree.Conditional() if is_text_choice(expression):
                return self._text_choice(expression)
            case syntax_tree.Name("comm"):
                return typed_values.CommName(String(PROCESS_NAME_SIZE))
            case syntax_tree.Name("func" | "probe"):
                return typed_values.Register("pc", self._values.types.word, at_entry=self._at_return)
            case syntax_tree.Call("str", [pointer, *rest]) if len(rest) <= 1:
                number = limit
                if rest:
                    bytes_ = f"mem({pointer.span.text}, {rest[0].span.text})"
                    hint = f"for a length that is known at the hit write {bytes_}, printed as text by %s"
                    number = self._length(rest[0], hint)
                if (count := self._characters(pointer)) is not None and count <= number:
                    return typed_values.Text(self._address(pointer), count, String(count))
                return typed_values.Text(self._address(pointer), number + 1, String(number + 1, marks=True))
            case syntax_tree.Call("mem", [pointer, size]):
                length = self._values.converted(self._values.value(size), UNSIGNED, size.span)
                if isinstance(length, typed_values.Constant):
                    return typed_values.Bytes(self._address(pointer), length, Array(CHAR, None))
                return typed_values.Bytes(self._address(pointer), self._limited(length), Array(CHAR, None, _MEMORY_MAX))
            case syntax_tree.Call("ustack" | "kstack" as name, arguments) if len(arguments) <= 1:
                frames = self._number(arguments[0], USER_FRAMES_MAX, "frames of a call stack") if arguments else None
                return typed_values.StackTrace(name == "kstack", frames, Stack(name == "kstack", frames))
            case syntax_tree.Call("ntop", arguments):
                return self._network_address(arguments, expression.span)
        return None

    def _text_of_item(self, item: ItemName, field: str) -> typed_values.ItemText | None:
        """Return a field of a loop's item that is a string; None for other fields."""
        form = FIELDS[item.kind].get(field)
        if not isinstance(form, int):
            return None
        limit = min(form or self._values.types.string_limit, STRING_SIZE_MAX - 1) + 1
        type_ = String(limit, marks=True)
        return typed_values.ItemText(item.number, strings_of(item.kind).index(field), limit, type_)

    def _length(self, length: syntax_tree.Expression, hint: str) -> int:
        """Return the maximum length in bytes of a string, ``str(p, n)``; ``hint`` suggests an alternative."""
        try:
            value = self._values.value(length)
        except UnknownTypeError:
            raise TypingError from None
        if not isinstance(value, typed_values.Constant):
            raise self._values.wrong(length.span, "the length of a string is a constant", hint)
        return self._number(length, _STRING_MAX, "bytes of a string")

    def _limited(self, length: Value) -> Value:
        """Return a length that is known only at the hit, limited to the maximum number of printed bytes plus one."""
        most = typed_values.Constant(_MEMORY_MAX + 1, UNSIGNED)
        first, kept = self._values.kept_once(length)
        is_more = typed_values.Comparison("<", most, kept, is_signed=False, type=INT)
        limited = typed_values.Choice(is_more, most, kept, UNSIGNED)
        return limited if first is None else typed_values.Sequence(first, limited, UNSIGNED)

    def _characters(self, expression: syntax_tree.Expression) -> int | None:
        """Return the number of elements of a character array expression, or None for other expressions."""
        if not isinstance(
            expression, syntax_tree.Name | syntax_tree.MemberAccess | syntax_tree.Index | syntax_tree.Unary
        ):
            return None
        type_ = self._values.type_of(expression)
        if not isinstance(type_, Array) or not type_.count or size_of(type_.element) != 1:
            return None
        return type_.count

    def array_text(self, address: Value, count: int | None) -> typed_values.Text:
        """Return the string at an address: at most ``count`` characters of an array, or, for None, up to the limit."""
        limit = self._values.types.string_limit
        whole = folded(typed_values.Convert(address, self._values.types.word))
        if count is not None and count <= limit:
            return typed_values.Text(whole, count, String(count))
        return typed_values.Text(whole, limit + 1, String(limit + 1, marks=True))

    def _text_choice(self, expression: syntax_tree.Conditional) -> typed_values.TextChoice:
        if self._is_tool:
            message = "a block of the tool chooses between numbers only, not between strings"
            raise self._values.wrong(expression.span, message, "write if (…) … else …")
        yes, no = (self.text(each) for each in (expression.yes, expression.no))
        assert isinstance(yes, typed_values.Literal | typed_values.TextChoice)
        assert isinstance(no, typed_values.Literal | typed_values.TextChoice)
        return typed_values.TextChoice(
            self._values.condition(expression.condition), yes, no, String(self._values.types.string_limit + 1)
        )

    def _network_address(self, arguments: Sequence[syntax_tree.Expression], span: Span) -> typed_values.NetworkAddress:
        """Return ``ntop(address)`` or ``ntop(family, address)``; the address is an IPv4 address or a pointer."""
        if not 1 <= len(arguments) <= _NTOP_MAX:
            raise self._values.wrong(span, "'ntop' takes an address, or the family and an address")
        address = self._values.value(arguments[-1])
        if not isinstance(address.type, Pointer):
            number = self._values.converted(address, self._values.types.word, arguments[-1].span)
            return typed_values.NetworkAddress(number, None, Network())
        size: Value = typed_values.Constant(_IPV4 if size_of(address.type.target) == _IPV4 else _IPV6, UNSIGNED)
        if len(arguments) == _NTOP_MAX:
            family = self._values.converted(self._values.value(arguments[0]), UNSIGNED, arguments[0].span)
            is_new = typed_values.Comparison(
                "==", family, typed_values.Constant(_AF_INET6, UNSIGNED), is_signed=False, type=INT
            )
            size = folded(
                typed_values.Choice(
                    is_new, typed_values.Constant(_IPV6, UNSIGNED), typed_values.Constant(_IPV4, UNSIGNED), UNSIGNED
                )
            )
        else:
            type_ = self._values.type_of(arguments[-1])
            if isinstance(type_, Array) and size_of(type_) == _IPV4:
                size = typed_values.Constant(_IPV4, UNSIGNED)
        place = self._values.converted(address, self._values.types.word, arguments[-1].span)
        return typed_values.NetworkAddress(place, size, Network())

    def _swapped(self, expression: syntax_tree.Expression, *, bits: int | None) -> Value:
        """Return a number with its bytes in reverse order. ``bits`` is the width, or None for the width of its type."""
        value = self._values.value(expression)
        size = size_of(value.type) if bits is None else bits // 8
        if not isinstance(value.type, Integer | Enumeration) or size is None:
            raise self._values.wrong(expression.span, f"'{value.type}' has no bytes that could be swapped")
        type_ = {1: UNSIGNED_CHAR, 2: UNSIGNED_SHORT, 4: UNSIGNED, 8: UNSIGNED_LONG_LONG}[size]
        first, kept = self._values.kept_once(folded(typed_values.Convert(value, type_)))
        computed = UNSIGNED_LONG_LONG if size > INT.size else UNSIGNED
        found: Value = typed_values.Constant(0, computed)
        for byte in range(size):
            part: Value = typed_values.Convert(kept, computed)
            part = typed_values.Arithmetic(">>", part, typed_values.Constant(8 * byte, INT), computed)
            part = typed_values.Arithmetic("&", part, typed_values.Constant(0xFF, computed), computed)
            part = typed_values.Arithmetic("<<", part, typed_values.Constant(8 * (size - 1 - byte), INT), computed)
            found = folded(typed_values.Arithmetic("|", found, folded(part), computed))
        whole = folded(typed_values.Convert(found, type_))
        return whole if first is None else typed_values.Sequence(first, whole, type_)

    def _address(self, pointer: syntax_tree.Expression) -> Value:
        if isinstance(pointer, syntax_tree.TableAccess) and self._values.kept(pointer) is not None:
            raise self._values.wrong(pointer.span, f"'@{pointer.name}' keeps no address, but what is to be printed")
        return self._values.converted(self._values.value(pointer), self._values.types.word, pointer.span)

    def _number(self, expression: syntax_tree.Expression, most: int, what: str) -> int:
        """Return the number of a constant expression. Report an error if it is not from 1 to ``most``."""
        number = self._values.constant(expression)
        if number is None:
            raise TypingError
        if not 1 <= number <= most:
            raise self._values.wrong(expression.span, f"{number} {what}: there are from 1 to {most}")
        return number


def _is_string(expression: syntax_tree.Expression) -> bool:
    """Return whether an expression is a string in every comparison."""
    match expression:
        case syntax_tree.Name("comm") | syntax_tree.Call("str"):
            return True
    return False
