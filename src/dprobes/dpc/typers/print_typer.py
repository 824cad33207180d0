"""Typing of ``printf``: the logged items, and the template that prints them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.syntax.expression_parser import scoped_parts
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.value_properties import folded, form_of
from dprobes.dpc.typers.operator_typer import TypingError
from dprobes.dpc.typers.type_table import UnknownTypeError
from dprobes.dpc.types.c_types import (
    INT,
    UNSIGNED,
    Array,
    Enumeration,
    Integer,
    Network,
    Pointer,
    Record,
    Stack,
    String,
    Void,
    integer_of,
    promoted,
    size_of,
)
from dprobes.dpc.types.print_formats import (
    WIDTH_MAX,
    FirstElements,
    Form,
    conversions,
    expanded,
    is_text,
    lines_of,
    named,
    placeholder,
    widest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.typedtree.typed_values import Value
    from dprobes.dpc.typers.value_typer import ValueTyper
    from dprobes.dpc.types.c_types import CType
    from dprobes.dpc.types.print_formats import Conversion

__all__ = ["PrintTyper"]

# A field has the name of its expression: the last member of a chain, or ``value`` for a computed value.

NAME_MAX = 60
"""Maximum length of a name in characters, which leaves room for a number after it."""

_UNNAMED = "value"

_OF_THEIR_ARGUMENT = ("str", "mem", "sym")
"""Calls whose fields are named after their argument."""


def field_name(expression: syntax_tree.Expression) -> str:
    """Return the name of an expression's field in records, a C identifier, from its variable, member or function."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", _name(expression))  # compilers name members ``_vptr.B`` and ``$t0``
    return (f"_{name}" if name[:1].isdigit() else name)[:NAME_MAX] or _UNNAMED


def _name(expression: syntax_tree.Expression) -> str:
    match expression:
        case syntax_tree.Name(name):
            return scoped_parts(name)[-1]
        case syntax_tree.MemberAccess(_, name) | syntax_tree.TableAccess(name):
            return name
        case syntax_tree.Index(operand) | syntax_tree.Cast(_, operand) | syntax_tree.Increment(_, operand):
            return _name(operand)
        case syntax_tree.Unary("*" | "&", operand):
            return _name(operand)
        case syntax_tree.Assignment(_, target):
            return _name(target)
        case syntax_tree.Comma(_, last):
            return _name(last)
        case syntax_tree.Call("reg", (syntax_tree.StringLiteral(register), *_)):
            return register.lower() if register.isidentifier() and register.isascii() else ""
        case syntax_tree.Call(function, (argument, *_)) if function in _OF_THEIR_ARGUMENT:
            return _name(argument)
        case syntax_tree.Call("ntop", (*_, address)):
            return _name(address)
        case syntax_tree.Call(function):
            return function
    return ""


_ELEMENTS = "diuxXocCvh"
"""Conversions that print the elements of an array instead of its address."""

_UNSIGNED = "uxXo"
"""Conversions that print a negative number as its bits."""


class PrintTyper:
    """A typer of ``printf`` in handlers, or with ``is_tool`` in blocks of the tool."""

    def __init__(self, values: ValueTyper, *, is_tool: bool) -> None:
        self._values = values
        self._is_tool = is_tool

    def log(self, call: syntax_tree.Call, number: int) -> typed_program.Log:
        """
        Return the ``printf`` statement for a call, with its items and template; raise ``TypingError`` for errors.

        ``number`` is the number of the ``printf`` in its handler, from 1.
        """
        if not call.arguments or not isinstance(format_ := call.arguments[0], syntax_tree.StringLiteral):
            message = "'printf' takes a format in quotes, then what it prints"
            hint = 'write printf("%d", x)'
            if call.arguments and isinstance(call.arguments[0], syntax_tree.TableAccess):
                hint = "tables are printed by print(@name), in 'end { … }'"
            elif call.arguments:
                shown = " ".join("%v" for _ in call.arguments)
                hint = f'write printf("{shown}", {", ".join(each.span.text for each in call.arguments)})'
            raise self._values.wrong(call.span, message, hint)
        found, wrong = conversions(format_.value)
        if wrong is not None:
            raise self._values.wrong(
                format_.span, f"'{format_.value[wrong : wrong + 4]}' is not a conversion", "write %% for a percent sign"
            )
        if (layout := next((each for each in found if widest(each) > WIDTH_MAX), None)) is not None:
            message = f"a width or precision is at most {WIDTH_MAX}: '%{layout.layout[:40]}'"
            raise self._values.wrong(format_.span, message)
        arguments: tuple[syntax_tree.Expression | FirstElements, ...] = call.arguments[1:]
        if len(found) != len(arguments):
            has = "1 conversion" if len(found) == 1 else f"{len(found)} conversions"
            there = "is 1 value" if len(arguments) == 1 else f"are {len(arguments)} values"
            hint = "write a value for each conversion; a percent sign is %%"
            if len(found) < len(arguments):
                hint = "write a conversion for each value, such as %d, or %s for a string"
            raise self._values.wrong(call.span, f"the format has {has}, and there {there}", hint)
        text = format_.value
        if any(each.letter == "S" for each in found):
            text, arguments = self._with_members(text, found, call.arguments[1:])
            found, _ = conversions(text)
        places: list[tuple[Conversion, str]] = []
        items: list[typed_values.Argument] = []
        is_wrong = False
        for written, expression in zip(found, arguments, strict=True):
            try:
                holder, item = self._place(written, expression)
            except (TypingError, UnknownTypeError):
                is_wrong = True  # it is reported; errors in the other arguments are reported as well
                continue
            places.append((written, holder))
            if item is not None:
                items.append(item)
        if is_wrong:
            raise TypingError
        return typed_program.Log(number, tuple(items), "\n".join(lines_of(text, places)), call.span)

    def _place(
        self, written: Conversion, expression: syntax_tree.Expression | FirstElements
    ) -> tuple[str, typed_values.Argument | None]:
        """
        Return the place-holder for a conversion, and the item to log.

        The item is None for a literal or the process name.
        """
        if isinstance(expression, FirstElements):
            elements = self._elements(expression)
            return _list_of(written, elements.type, field_name(expression.array)), elements
        conversion = _as_people_take_it(written, expression)
        if conversion.letter == "e" and not self._values.may_return_errors:
            conversion = conversion._replace(layout=f"#{conversion.layout}")  # -1 from a library means: see errno
        item = self._printed(expression, conversion)
        if (ignored := _without_effect(conversion.layout, item.type)) is not None:
            raise self._values.wrong(expression.span, f"'{expression.span.text}' is printed without a {ignored}")
        is_string = conversion.letter in "sv"
        is_logged = False
        if isinstance(item, typed_values.CommName):
            holder = f"%{conversion.layout}{{name}}" if is_string else None
        elif isinstance(item, typed_values.Literal) and not self._is_tool:
            holder = _laid_out(item.text, conversion) if is_string else None
        elif _is_place(expression) and is_string:
            holder, is_logged = placeholder(conversion._replace(letter="a"), item.type, self._form(item)), True
        else:
            holder, is_logged = placeholder(conversion, item.type, self._form(item)), True
        if holder is None:
            raise self._values.wrong(
                expression.span,
                f"'%{conversion.letter}' does not print '{item.type}'",
                self._string_there(expression, item.type, conversion.letter) or _fitting(item.type),
            )
        if not isinstance(item, typed_values.CommName) and (
            self._is_tool or not isinstance(item, typed_values.Literal)
        ):
            holder = named(holder, field_name(expression), is_list=_is_list(item))
        return holder, item if is_logged else None

    def _elements(self, first: FirstElements) -> typed_values.Bytes:
        """Return the memory of the first elements of an array, ``first.shown`` of them, for a list of numbers."""
        type_ = self._values.type_of(first.array)
        assert isinstance(type_, Array)
        address = folded(typed_values.Convert(self._values.value(first.array), self._values.types.word))
        size = first.shown * (size_of(type_.element) or 0)
        return typed_values.Bytes(address, typed_values.Constant(size, UNSIGNED), Array(type_.element, first.shown))

    def _form(self, item: typed_values.Argument) -> Form:
        """Return the form in which an argument is logged. A number of two cells is an item of its bytes."""
        form = Form.RAW if self._is_tool else form_of(item)
        return Form.BYTES if form is Form.WORD and self._values.operators.is_wide(item.type) else form

    def _with_members(
        self, text: str, found: Sequence[Conversion], arguments: Sequence[syntax_tree.Expression]
    ) -> tuple[str, tuple[syntax_tree.Expression | FirstElements, ...]]:
        """Return a format and its values with each ``%S`` replaced by the members of the structure."""
        parts, position = list[str](), 0
        values: list[syntax_tree.Expression | FirstElements] = []
        for conversion, expression in zip(found, arguments, strict=True):
            parts.append(text[position : conversion.start])
            position = conversion.end
            if conversion.letter != "S":
                parts.append(text[conversion.start : conversion.end])
                values.append(expression)
                continue
            type_ = self._values.type_of(expression)
            if not isinstance(type_, Record) or type_.members is None:
                hint = "write '*' before it" if isinstance(type_, Pointer) else None
                raise self._values.wrong(expression.span, f"'%S' prints a structure, not '{type_}'", hint)
            expansion = expanded(expression, type_, self._values.types.word_size)
            parts.append(expansion.format)
            values += expansion.values
        return "".join((*parts, text[position:])), tuple(values)

    def _is_string(self, type_: CType) -> bool:
        """Return whether ``%s`` takes a value as the address of a string; a parameter without a type is a word."""
        if isinstance(type_, Pointer):
            return size_of(type_.target) in (None, 1)
        return type_ == self._values.types.word

    def _string_there(self, expression: syntax_tree.Expression, type_: CType, letter: str) -> str | None:
        """Return a hint if ``%s`` prints a number that may be the address of a string, or None for any other value."""
        if not isinstance(expression, syntax_tree.Name | syntax_tree.MemberAccess):
            return None
        if not isinstance(type_, Integer) or type_.size != self._values.types.word_size:
            return None
        if letter != "s":
            return None
        return f"if it is the address of a string, print str({expression.span.text}); %d, %u, %x and %p print a number"

    def _array(self, expression: syntax_tree.Expression) -> typed_values.Bytes | None:
        """Return the bytes of an array in memory, or None for other expressions."""
        if not isinstance(expression, syntax_tree.MemberAccess | syntax_tree.Name | syntax_tree.Index):
            return None
        type_ = self._values.type_of(expression)
        size = size_of(type_)
        if not isinstance(type_, Array) or not size or not isinstance(type_.element, Integer | Enumeration | Pointer):
            return None
        value = folded(typed_values.Convert(self._values.value(expression), self._values.types.word))
        return typed_values.Bytes(value, typed_values.Constant(size, UNSIGNED), type_)

    def _printed(self, expression: syntax_tree.Expression, conversion: Conversion) -> typed_values.Argument:
        letter = conversion.letter
        text = self._values.calls.text(expression)
        if text is not None:
            return text
        if letter in _ELEMENTS and (array := self._array(expression)) is not None:
            return array
        value = self._values.value(expression)
        if letter == "s" and isinstance(expression, syntax_tree.MemberAccess | syntax_tree.Name | syntax_tree.Index):
            type_ = self._values.type_of(expression)
            if isinstance(type_, Array) and type_.count and is_text(type_):
                return self._values.calls.array_text(value, type_.count)
        if letter == "s" and self._is_string(value.type) and not _is_place(expression):
            if not isinstance(value.type, Pointer):
                self._values.operators.warn(
                    expression.span,
                    f"'{expression.span.text}' is a number: %s takes it for the address of a string",
                    f"write str({expression.span.text}) if it is one; %d, %u and %x print a number",
                )
            return self._values.calls.array_text(value, None)
        if isinstance(value.type, Void | Record):
            raise self._values.wrong(expression.span, f"'{value.type}' cannot be printed")
        if letter == "e" and isinstance(value.type, Integer) and value.type.size == INT.size:
            # ``%e`` takes a negative number even of an unsigned type. Templates print an errno of a word, not of 4
            # bytes.
            return folded(typed_values.Convert(typed_values.Convert(value, INT), self._values.types.long))
        if letter == "T" and isinstance(value.type, Integer) and value.type.size == INT.size:
            return folded(
                typed_values.Convert(value, self._values.types.long)
            )  # templates print no time of 4 bytes, either
        return _as_c_takes_it(value, conversion)


def _as_c_takes_it(value: Value, conversion: Conversion) -> Value:
    """Convert a number as C's ``printf`` does for a conversion: truncate for ``%hhd``, make unsigned for ``%u``."""
    if not isinstance(value.type, Integer | Enumeration):
        return value
    letter = conversion.letter
    base = value.type.base if isinstance(value.type, Enumeration) else value.type
    if (size := conversion.bytes_shown) is not None and base.size >= size:
        is_signed = letter in "di"
        is_same = base.size == size and (letter == "c" or base.is_signed is is_signed)
        return value if is_same else folded(typed_values.Convert(value, integer_of(size, is_signed=is_signed)))
    if (integer := promoted(value.type)).size != INT.size:
        return value
    if letter in _UNSIGNED and base.is_signed and (base.size < INT.size or form_of(value) is Form.WORD):
        return folded(typed_values.Convert(value, UNSIGNED))
    if letter in "di" and not integer.is_signed and form_of(value) is Form.WORD:
        return folded(typed_values.Convert(value, INT))
    return value


def _as_people_take_it(conversion: Conversion, expression: syntax_tree.Expression) -> Conversion:
    """Return the conversion with which an expression is printed: ``%v`` of a duration becomes one with a unit."""
    match expression:
        case syntax_tree.Name("elapsed") | syntax_tree.Call(
            "elapsed" | "pmc", (syntax_tree.StringLiteral("task-clock"),)
        ) if conversion.letter == "v":
            return conversion._replace(letter="T")
    return conversion


def _without_effect(layout: str, type_: CType) -> str | None:
    """Return the part of a layout that templates cannot apply to values of a type; None if there is none."""
    width, point, _ = layout.partition(".")
    match type_:
        case Stack() if width:
            return "width: its frames have lines of their own"
        case Stack() | Network() if point:
            return "precision"
    return None


def _laid_out(text: str, conversion: Conversion) -> str:
    """Return a string literal as the template prints it: truncated, padded, and with percent signs doubled."""
    flags = conversion.layout.rstrip("0123456789.")
    width, _, precision = conversion.layout.removeprefix(flags).lstrip("0").partition(".")
    shown = text[: int(precision or 0)] if "." in conversion.layout else text
    laid_out = shown.ljust(int(width or 0)) if "-" in flags else shown.rjust(int(width or 0))
    return laid_out.replace("%", "%%")


def _is_place(expression: syntax_tree.Expression) -> bool:
    """Return True if an expression is a code address that ``%s`` prints as a name: ``func``, ``probe``, ``sym(x)``."""
    match expression:
        case syntax_tree.Name("func" | "probe") | syntax_tree.Call("sym"):
            return True
    return False


def _list_of(conversion: Conversion, type_: CType, name: str) -> str:
    """Return the template's place-holder for an array: its numbers, each by ``conversion``, separated by commas."""
    holder = placeholder(conversion, type_, Form.BYTES)
    assert holder is not None
    return named(holder, name, is_list=True, has_commas=True)


def _is_list(item: typed_values.Argument) -> bool:
    """Return whether an item consists of the elements of an array."""
    return isinstance(item.type, Array) and item.type.count is not None


def _fitting(type_: CType) -> str:
    match type_:
        case String():
            return "a string is printed by %s"
        case Network():
            return "a network address is printed by %s"
        case Stack():
            return "a call stack is printed by %k"
        case Array():
            return "bytes are printed by %h"
        case Pointer():
            return "a pointer is printed by %p, as a name by %a; the string that it points to by str(p)"
    return "a number is printed by %d, %u, %x, %o, %c, %p, %a, %e, %v or %T"
