"""Typing of names: variables, fields, parameters and values that the language provides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from dprobes.arch.usdt_arguments import ARGUMENTS_MAX
from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import (
    ItemName,
    ModuleSymbol,
    ModuleVariable,
    Named,
    NotKnownError,
    ProgramVariable,
    Scattered,
    SlotName,
    TracedField,
)
from dprobes.dpc.typedtree.process_items import FIELDS
from dprobes.dpc.typedtree.value_properties import folded
from dprobes.dpc.typers.provided_names import (
    CALL_FORMS,
    PROVIDED,
    RESERVED_CALLS,
    ProvidedName,
    numbered_argument,
)
from dprobes.dpc.types.c_types import (
    INT,
    UNSIGNED,
    Array,
    Floating,
    Record,
)
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.dpc.typedtree.name_scope import FunctionSignature, Meaning, Surroundings
    from dprobes.dpc.typedtree.typed_values import Value
    from dprobes.dpc.typers.operator_typer import PlaceTyper, TypingError
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["NameTyper", "no_arithmetic"]

Answer = TypeVar("Answer")

_ARGUMENTS = 6
"""Number of arguments in registers that have names of the form ``arg0``."""

_WIDE = 8
"""Word size in bytes of processors that pass arguments in registers."""

_RETURNED = "ret"
"""The name of the field for a system call's return value."""


class NameTyper:
    """Typer of the names in a handler or function. ``values`` types the expressions that contain them."""

    def __init__(self, values: PlaceTyper, functions: Mapping[str, FunctionSignature], where: Surroundings) -> None:
        self._values = values
        self._functions = functions
        self._where = where
        self._undeclared: set[str] = set()
        """Names that occur as the target of an assignment without a declaration."""

    def value(self, name: syntax_tree.Name) -> Value:
        """Return the value of a name; raise ``TypingError`` if it has none."""
        match meaning := self.meaning(name):
            case SlotName(slot, type_):
                return typed_values.Local(slot, type_)
            case Named():
                return self.whole(self._parameter(meaning, name.span), name.span)
            case ModuleVariable():
                return self.whole(meaning, name.span)
            case ProgramVariable(is_array=True):
                raise self._values.wrong(name.span, f"'{name.name}' is an array: use one of its elements")
            case ProgramVariable(kind, first, _, type_):
                return typed_values.Variable(kind, first, type_)
            case ModuleSymbol(symbol, type_):
                return self._values.decayed(typed_values.Memory(self.symbol(symbol), type_), name.span)
            case TracedField(field):
                return self.field(field)
            case ItemName(kind):
                fields = ", ".join(f"{name.name}.{field}" for field in FIELDS[kind])
                raise self._values.wrong(name.span, f"'{name.name}' is an item of a loop", f"it has {fields}")
            case int(number):
                return typed_values.Constant(number, INT if INT.holds(number) else UNSIGNED)
            case ProvidedName():
                return self._provided(meaning, name.span)

    def whole(self, variable: ModuleVariable, span: Span) -> Value:
        """Return the value of a variable of the module; for an array, the address of its first element."""
        value = variable.value
        if isinstance(value, typed_values.Memory):
            return self._values.decayed(value, span)
        if isinstance(value, Scattered):
            if isinstance(value.type, Floating):
                raise self._values.wrong(span, *no_arithmetic(value))
            is_record = isinstance(value.type, Record)
            what = f"a whole '{value.type}' is not a value" if is_record else "this is in registers"
            raise self._values.wrong(span, f"{what}: use its members")
        return value

    def memory(self, name: syntax_tree.Name) -> typed_values.Memory | None:
        """
        Return the memory in which the variable that a name means is stored.

        Return None if it is in registers or a constant.
        """
        meaning = self.meaning(name)
        if isinstance(meaning, ModuleSymbol):
            return typed_values.Memory(self.symbol(meaning.name), meaning.type)
        found = self._variable(meaning, name.span)
        return found.value if found is not None and isinstance(found.value, typed_values.Memory) else None

    def field(self, name: str) -> Value:
        """Return the value of a tracepoint's or system call's field; for an array, the address of its first element."""
        pushed, given = typed_values.System(f"tp, {name}", self._values.types.long), self.type_of_field(name)
        if isinstance(given, Array):
            given = self._values.types.pointer_to(given.element)
        return pushed if given is None else folded(typed_values.Convert(pushed, given))

    def type_of_field(self, name: str) -> CType | None:
        """Return the type of a field, array types included, or None if it is not known."""
        return None if self._where.given is None else self._where.given.type_of(name)

    def type_of(self, name: syntax_tree.Name) -> CType | None:
        """Return the type of an object in memory or of a structure in registers; None for other names."""
        meaning = self.meaning(name)
        if isinstance(meaning, TracedField):
            return self.type_of_field(meaning.name)
        found = self._variable(meaning, name.span)
        if found is not None and isinstance(found.value, Scattered):
            return found.type
        memory = self.memory(name)
        return None if memory is None else memory.type

    def _variable(self, meaning: Meaning | ProvidedName | int, span: Span) -> ModuleVariable | None:
        """Return the variable, parameter or result of the module that a name means; None for other names."""
        match meaning:
            case Named():
                return self._parameter(meaning, span)
            case ModuleVariable():
                return meaning
            case ProvidedName("retval") if self._where.at_return and not self._where.is_traced:
                return self._returned(span)
        return None

    def memory_of_module(self, name: syntax_tree.Name) -> typed_values.Memory | None:
        """Return the memory of a module's variable, by debug information, or None for other names, and in registers."""
        found = self._of_module(name)
        return (
            found.value if isinstance(found, ModuleVariable) and isinstance(found.value, typed_values.Memory) else None
        )

    def part(self, access: syntax_tree.MemberAccess) -> ModuleVariable | None:
        """
        Return a member of a structure that is not in memory, such as one in registers.

        Return None if it is in memory.
        """
        match access.base:
            case syntax_tree.Name() as base:
                found = self._variable(self.meaning(base), base.span)
                whole = None if found is None else found.value
            case syntax_tree.MemberAccess() as base:
                part = self.part(base)
                whole = None if part is None else part.value
            case _:
                return None
        if access.is_arrow or not isinstance(whole, Scattered):
            return None
        record = whole.type
        member = record.member(access.name) if isinstance(record, Record) else None
        if member is None or self._where.names is None:
            hint = did_you_mean(access.name, record.member_names()) if isinstance(record, Record) else None
            raise self._values.wrong(access.span, f"'{record}' has no member '{access.name}'", hint)
        names = self._where.names
        value = self._asked(access.span, access.name, lambda: names.member_of(whole, member))
        return ModuleVariable(value, member.type)

    def _asked(self, span: Span, name: str, question: Callable[[], Answer]) -> Answer:
        """
        Return the result of ``question``, a look-up of ``name`` in debug information.

        If it raises ``NotKnownError`` or ``TargetError``, report this error at ``span``, and raise ``TypingError``.
        """
        try:
            return question()
        except NotKnownError as error:
            raise self._values.wrong(span, f"'{name}' is not known here: {error.reason}", error.hint) from None
        except TargetError as error:
            raise self._values.wrong(span, error.message, error.hint) from None

    def _parameter(self, meaning: Named, span: Span) -> ModuleVariable:
        """Return a parameter at its location from debug information, else at the place where the ABI passes it."""
        names = self._where.names
        if names is not None and not self._where.is_usdt:
            try:
                found = names.parameter(meaning.ordinal, meaning.type)
            except NotKnownError as error:
                raise self._values.wrong(span, f"'{span.text}' is not known here: {error.reason}", error.hint) from None
            except TargetError as error:  # the debug information is malformed
                if not meaning.is_declared:
                    raise self._values.wrong(span, error.message, error.hint) from None
                found = None
            if found is not None:
                return found
        if meaning.argument is None:
            raise self._values.wrong(span, _reason(meaning.type))
        if meaning.argument >= self._arguments and not self._where.is_usdt:
            message = f"only the first {self._arguments} parameters are known: they are in registers"
            raise self._values.wrong(span, message)
        return ModuleVariable(self._argument(meaning.argument, meaning.type), meaning.type)

    @property
    def _arguments(self) -> int:
        """The number of arguments that have names of the form ``arg0``."""
        return _ARGUMENTS if self._where.names is None else self._where.names.arguments

    def symbol(self, name: str) -> typed_values.Symbol:
        """Return the run-time address of a symbol of the probed module, as a value."""
        return typed_values.Symbol(name, self._values.types.word)

    def _argument(self, number: int, type_: CType) -> Value:
        if self._where.is_usdt:
            return folded(
                typed_values.Convert(typed_values.System(f"usdt, {number + 1}", self._values.types.word), type_)
            )
        is_certain = self._where.is_entry_known
        return self._values.operators.argument(number, type_, at_entry=self._where.at_return, is_certain=is_certain)

    def meaning(self, name: syntax_tree.Name) -> Meaning | ProvidedName | int:
        """Return the meaning of a name, a number for an enumerator; raise ``TypingError`` if it has none."""
        if (found := self._known(name)) is not None:
            return found
        if name.name in RESERVED_CALLS or name.name in self._functions:
            hint = f"write {CALL_FORMS[name.name]}" if name.name in CALL_FORMS else None
            raise self._values.wrong(name.span, f"'{name.name}' is a function: call it", hint)
        raise self._unknown(name)

    def check_assigned(self, name: syntax_tree.Name) -> None:
        """
        Report an assignment to a name that is not declared, and raise ``TypingError``.

        Do nothing for other names.
        """
        if not name.module and self._known(name) is None and name.name not in RESERVED_CALLS:
            self._undeclared.add(name.name)
            raise self._unknown(name)

    def _known(self, name: syntax_tree.Name) -> Meaning | ProvidedName | int | None:
        """Return the meaning of a name, or None if it has none."""
        if (found := self._values.scope.find(name.name)) is not None:
            return found
        if (enumerator := self._values.types.enumerators.get(name.name)) is not None:
            return enumerator
        provided = PROVIDED.get(name.name)
        is_timed = self._where.has_return and name.name == "elapsed"
        if provided is not None and (is_timed or not (self._where.is_traced and provided.is_of_function)):
            return provided
        if name.name.startswith("arg") and self._where.has_hit:
            most = ARGUMENTS_MAX if self._where.is_usdt else self._arguments
            if (argument := numbered_argument(name.name, most)) is not None:
                return argument
        if self._where.is_traced and name.name.isupper() and (constant := self._of_module(name)) is not None:
            return constant  # an enumerator of the kernel: names of fields are lower case
        if self._where.is_traced and name.name not in RESERVED_CALLS and not name.name.startswith("::"):
            return TracedField(_RETURNED if name.name == "retval" and self._where.at_return else name.name)
        return self._of_module(name)

    def _unknown(self, name: syntax_tree.Name) -> TypingError:
        """Report a name without a meaning, and return the ``TypingError`` to raise."""
        plain = name.name.removeprefix("::")
        known = [*self._values.scope.names(), *self._values.types.enumerators, *PROVIDED]
        from dprobes.dpc.tracer_words import name_hint

        hint = self._argument_hint(plain) or name_hint(plain, self._values.types.word_size)
        if hint is None and plain in self._undeclared:
            near = did_you_mean(plain, self._values.scope.names())
            hint = near or f"a variable is declared with its type: long {plain} = …;"
        hint = hint or did_you_mean(plain, known) or self._declaration_hint(plain)
        return self._values.wrong(name.span, f"'{plain}' is not defined", hint)

    def _argument_hint(self, name: str) -> str | None:
        """
        Return a hint for an argument whose number is too high, about its place in memory.

        Return None for another name.
        """
        match = re.fullmatch(r"arg([0-9]{1,2})", name)
        if match is None or not self._where.has_hit or self._where.is_traced:
            return None
        if self._where.is_usdt or self._where.at_return or self._values.types.word_size != _WIDE:
            return f"there are arg0 to arg{(ARGUMENTS_MAX if self._where.is_usdt else self._arguments) - 1}"
        offset = _WIDE * (int(match[1]) - _ARGUMENTS + 1)
        return f"arg0 to arg{_ARGUMENTS - 1} are in registers; this one is in memory: *(long *)(sp + {offset})"

    def _declaration_hint(self, name: str) -> str:
        """Return a hint with the reason why a name of the module may be unknown, and its declaration."""
        declared = f"declare it: extern int {name};"
        names, module = self._where.names, self._where.module
        if names is None or not self._where.has_hit or self._where.is_traced:
            return f"for a variable of the module, {declared}"
        if names.types is None:
            advice = "parameters are named at the place, FUNCTION(a, b), or are arg0, arg1; for a variable"
            reason = names.cause(name) or f"'{module}' has no debug information"
            return f"{reason}: {advice}, {declared}"
        cause = names.cause(name)
        return cause or f"the debug information of '{module}' has no such name; for a variable without it, {declared}"

    def _of_module(self, name: syntax_tree.Name) -> ModuleVariable | ModuleSymbol | None:
        plain = name.name.removeprefix("::")
        if name.module and not self._is_of(name.module):
            message = f"'{plain}' is in '{name.module}', and this handler in '{self._where.module}'"
            raise self._values.wrong(name.span, message, "a handler reads the variables of its own module")
        if plain != name.name and isinstance(declared := self._values.scope.find(plain), ModuleSymbol):
            return declared
        names = self._where.names
        return None if names is None else self._asked(name.span, plain, lambda: names.find(name.name))

    def _is_of(self, module: str) -> bool:
        """Return whether a name, possibly a path, means the module of the probe."""
        return module in (self._where.module, self._where.module.rpartition("/")[2])

    def _provided(self, name: ProvidedName, span: Span) -> Value:
        if not self._where.has_hit and not name.in_functions:
            raise self._values.wrong(span, *self._where.refusal(name.name))
        if name.name == "line":
            if not self._where.line:
                raise self._values.wrong(span, "'line' is that of a place in the source, and this is none")
            return typed_values.Constant(self._where.line, INT)
        if name.name == "watched":
            if self._where.watched is None:
                raise self._values.wrong(span, "'watched' is the address of a watchpoint, and this is none")
            return self.symbol(self._where.watched)
        if name.is_at_return and not self._where.at_return:
            raise self._values.wrong(span, f"'{name.name}' is known at a return only", self._where.way_to_return)
        if name.name.startswith("arg"):
            number = int(name.name[3:])
            given = self._where.given if self._where.is_usdt else None
            noted = None if given is None else given.type_of(str(number))
            return self._argument(number, noted or self._values.types.word)
        type_ = name.type or self._values.types.word
        if name.name == "retval":
            return self._result(span)
        if name.register:
            return typed_values.Register(name.register, type_)
        if name.name == "curtask":
            type_ = self._values.types.kernel_task(self._where.kernel, span) or type_
        if not name.pushed:
            raise self._values.wrong(span, f"'{name.name}' is a string: print it, compare it, or use it as a key")
        return typed_values.System(name.pushed, type_, name.is_at_return and self._where.is_entry_known)

    def _returned(self, span: Span) -> ModuleVariable | None:
        """Return the typed return value of the function, or None if it is not known."""
        names = self._where.names
        return None if names is None else self._asked(span, "retval", names.returned)

    def _result(self, span: Span) -> Value:
        """Return the return value of the function, a word if its type is not known."""
        if (found := self._returned(span)) is not None:
            return self.whole(found, span)
        return typed_values.Register("retval", self._values.types.word)


def no_arithmetic(scattered: Scattered) -> tuple[str, str | None]:
    """Return the error message for a floating-point number in a register, and a hint."""
    registers = [part.value.name for part in scattered.parts if isinstance(part.value, typed_values.Register)]
    hint = f'its bits are reg("{registers[0]}")' if len(registers) == 1 else None
    return _reason(scattered.type), hint


def _reason(type_: CType) -> str:
    if isinstance(type_, Floating):
        return type_.why_no_number
    return f"there is no floating-point arithmetic: this is '{type_}'"
