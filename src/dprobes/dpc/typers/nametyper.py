"""Names with types: what the program declares, what every probe has, what debug information knows, in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax import tree
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typedtree.scattered import NotKnownError, Scattered
from dprobes.dpc.typedtree.scope import ModuleSymbol, ModuleVariable, Named, ProgramVariable, SlotName, TracedField
from dprobes.dpc.typers.provided import PROVIDED, RESERVED_CALLS, ProvidedName, usdt_argument
from dprobes.dpc.types.ctype import INT, UNSIGNED, Record, is_scalar, size_of
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.dpc.typedtree.scope import FunctionSignature, Meaning, Surroundings
    from dprobes.dpc.typedtree.typed import Value
    from dprobes.dpc.typers.typerinterface import PlaceTyper
    from dprobes.dpc.types.ctype import CType
    from dprobes.source import Span

__all__ = ["NameTyper"]

Answer = TypeVar("Answer")

_ARGUMENTS = 6
"""How many arguments are in registers by their numbers."""

_RETURNED = "ret"
"""The field of a system call's end that has what it returns."""


class NameTyper:
    """Type the names in a handler or function; ``values`` types what they are parts of."""

    def __init__(self, values: PlaceTyper, functions: Mapping[str, FunctionSignature], where: Surroundings) -> None:
        self._values = values
        self._functions = functions
        self._where = where

    def value(self, name: tree.Name) -> Value:
        """Return the value of what has a name."""
        match meaning := self.meaning(name):
            case SlotName(slot, type_):
                return typed.Local(slot, type_)
            case Named():
                return self.whole(self._parameter(meaning, name.span), name.span)
            case ModuleVariable():
                return self.whole(meaning, name.span)
            case ProgramVariable(is_array=True):
                raise self._values.wrong(name.span, f"'{name.name}' is an array: use one of its elements")
            case ProgramVariable(kind, first, _, type_):
                return typed.Variable(kind, first, type_)
            case ModuleSymbol(symbol, type_):
                return self._values.decayed(typed.Memory(self.symbol(symbol), type_), name.span)
            case TracedField(field):
                return typed.System(f"tp, {field}", self._values.types.long)
            case int(number):
                return typed.Constant(number, INT if INT.holds(number) else UNSIGNED)
            case ProvidedName():
                return self._provided(meaning, name.span)

    def whole(self, variable: ModuleVariable, span: Span) -> Value:
        """Return the value of a variable of the module; of an array the address of its first element."""
        value = variable.value
        if isinstance(value, typed.Memory):
            return self._values.decayed(value, span)
        if isinstance(value, Scattered):
            what = f"a whole '{value.type}' is no value" if isinstance(value.type, Record) else "this is in registers"
            raise self._values.wrong(span, f"{what}: use its members")
        return value

    def memory(self, name: tree.Name) -> typed.Memory | None:
        """Return the place in memory that has a name; None if that has none."""
        match meaning := self.meaning(name):
            case ModuleSymbol(symbol, type_):
                return typed.Memory(self.symbol(symbol), type_)
            case Named():
                value = self._parameter(meaning, name.span).value
            case ModuleVariable(value):
                pass
            case _:
                return None
        return value if isinstance(value, typed.Memory) else None

    def type_of(self, name: tree.Name) -> CType | None:
        """Return the type of what is in memory or of a structure in registers; None of other names."""
        meaning = self.meaning(name)
        found = self._parameter(meaning, name.span) if isinstance(meaning, Named) else meaning
        if isinstance(found, ModuleVariable) and isinstance(found.value, Scattered):
            return found.type
        memory = self.memory(name)
        return None if memory is None else memory.type

    def memory_of_module(self, name: tree.Name) -> typed.Memory | None:
        """Return the place in memory of a variable that debug information describes; None if there is none."""
        found = self._of_module(name)
        return found.value if isinstance(found, ModuleVariable) and isinstance(found.value, typed.Memory) else None

    def part(self, access: tree.MemberAccess) -> ModuleVariable | None:
        """Return a member of a structure that is in registers or known otherwise; None if it is in memory."""
        match access.base:
            case tree.Name() as base:
                meaning = self.meaning(base)
                found = self._parameter(meaning, base.span) if isinstance(meaning, Named) else meaning
                whole = found.value if isinstance(found, ModuleVariable) else None
            case tree.MemberAccess() as base:
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
        """Ask the debug information; what it says against it is an error."""
        try:
            return question()
        except NotKnownError as error:
            raise self._values.wrong(span, f"'{name}' is not known here: {error.reason}", error.hint) from None
        except TargetError as error:
            raise self._values.wrong(span, error.message, error.hint) from None

    def _parameter(self, meaning: Named, span: Span) -> ModuleVariable:
        """Return a parameter: where debug information has it, or else the argument of its number."""
        names, number = self._where.names, meaning.argument
        is_known = meaning.is_declared and number < _ARGUMENTS  # by the ABI, if the program is right
        if names is not None and not (is_known and names.is_entry):
            found = self._asked(span, span.text, lambda: names.parameter(number, meaning.type))
            if found is not None:
                return found
        if number >= _ARGUMENTS and not self._where.is_usdt:
            raise self._values.wrong(span, f"only the first {_ARGUMENTS} parameters are known: they are in registers")
        return ModuleVariable(self._argument(number, meaning.type), meaning.type)

    def symbol(self, name: str) -> typed.Symbol:
        """Return the address of a symbol of the module."""
        return typed.Symbol(name, self._values.types.word)

    def _argument(self, number: int, type_: CType) -> Value:
        if self._where.is_usdt:
            return folded(typed.Convert(typed.System(f"usdt, {number + 1}", self._values.types.word), type_))
        is_certain = self._where.is_entry_known
        return self._values.operators.argument(number, type_, at_entry=self._where.at_return, is_certain=is_certain)

    def meaning(self, name: tree.Name) -> Meaning | ProvidedName | int:
        """Return what has a name; an enumerator is a number."""
        if (found := self._values.scope.find(name.name)) is not None:
            return found
        if (enumerator := self._values.types.enumerators.get(name.name)) is not None:
            return enumerator
        if (provided := PROVIDED.get(name.name)) is not None and not (
            self._where.is_traced and provided.is_of_function
        ):
            return provided
        if self._where.is_usdt and (argument := usdt_argument(name.name)) is not None:
            return argument
        if self._where.is_traced and name.name.isupper() and (constant := self._of_module(name)) is not None:
            return constant  # an enumerator of the kernel: fields have small letters
        if self._where.is_traced and name.name not in RESERVED_CALLS and not name.name.startswith("::"):
            return TracedField(_RETURNED if name.name == "retval" and self._where.at_return else name.name)
        if (variable := self._of_module(name)) is not None:
            return variable
        if name.name in RESERVED_CALLS or name.name in self._functions:
            hint = f"write {name.name}()" if name.name in ("ustack", "kstack") else None
            raise self._values.wrong(name.span, f"'{name.name}' is a function: call it", hint)
        plain = name.name.removeprefix("::")
        known = [*self._values.scope.names(), *self._values.types.enumerators, *PROVIDED]
        from dprobes.dpc.bpftracewords import name_hint

        hint = name_hint(plain) or did_you_mean(plain, known)
        hint = hint or f"for a variable of the module, declare it: extern int {plain};"
        raise self._values.wrong(name.span, f"nothing is named '{plain}'", hint)

    def _of_module(self, name: tree.Name) -> ModuleVariable | ModuleSymbol | None:
        plain = name.name.removeprefix("::")
        if name.module and not self._is_of(name.module):
            message = f"'{plain}' is in '{name.module}', and this handler in '{self._where.module}'"
            raise self._values.wrong(name.span, message, "a handler reads the variables of its own module")
        if plain != name.name and isinstance(declared := self._values.scope.find(plain), ModuleSymbol):
            return declared
        names = self._where.names
        return None if names is None else self._asked(name.span, plain, lambda: names.find(name.name))

    def _is_of(self, module: str) -> bool:
        """Return whether a name means the module of the probe, be it a path."""
        return module in (self._where.module, self._where.module.rpartition("/")[2])

    def _provided(self, name: ProvidedName, span: Span) -> Value:
        if not self._where.has_hit and not name.in_functions:
            raise self._values.wrong(span, *self._where.refusal(name.name))
        if name.name == "line":
            if not self._where.line:
                raise self._values.wrong(span, "'line' is that of a place in the source, and this is none")
            return typed.Constant(self._where.line, INT)
        if name.name == "watched":
            if self._where.watched is None:
                raise self._values.wrong(span, "'watched' is the address of a watchpoint, and this is none")
            return self.symbol(self._where.watched)
        if name.is_at_return and not self._where.at_return:
            raise self._values.wrong(
                span, f"'{name.name}' is known at a return only", "write 'return' before the place"
            )
        if name.name.startswith("arg"):
            return self._argument(int(name.name[3:]), self._values.types.word)
        type_ = name.type or self._values.types.word
        if name.name == "retval":
            return self._result(span)
        if name.register:
            return typed.Register(name.register, type_)
        if name.name == "curtask":
            type_ = self._values.types.kernel_task(span) or type_
        if not name.pushed:
            raise self._values.wrong(span, f"'{name.name}' is a string: print it, compare it, or use it as a key")
        return typed.System(name.pushed, type_, name.is_at_return and self._where.is_entry_known)

    def _result(self, span: Span) -> Value:
        """Return what the function returns, of its type where that is known, and a word holds it."""
        names, word = self._where.names, self._values.types.word
        type_ = None if names is None else self._asked(span, "retval", lambda: names.result)
        if type_ is None or not is_scalar(type_) or (size_of(type_) or 0) > word.size:
            type_ = word
        return folded(typed.Convert(typed.Register("retval", word), type_))
