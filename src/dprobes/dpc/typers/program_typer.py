"""Typing of the parts of a program: declarations, functions, and the blocks of probes and of the tool."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from dprobes.arch.usdt_arguments import ARGUMENTS_MAX
from dprobes.diagnostics import Diagnostics, Note
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import (
    FunctionSignature,
    ModuleSymbol,
    Named,
    ProgramVariable,
    Scope,
    SlotName,
    Surroundings,
)
from dprobes.dpc.typedtree.typed_program import TypedBlock, TypedFunction, TypedProbe, find_log_paths
from dprobes.dpc.typedtree.value_properties import integer_of, needs_entry
from dprobes.dpc.typers.operator_typer import TypingError
from dprobes.dpc.typers.provided_names import KINDS
from dprobes.dpc.typers.statement_typer import StatementTyper
from dprobes.dpc.typers.table_typer import Tables
from dprobes.dpc.typers.table_uses import durations, kinds_of_steps, text_sizes, values_written
from dprobes.dpc.typers.type_table import STRING_LIMIT, TypeTable, UnknownTypeError
from dprobes.dpc.typers.value_typer import ValueTyper
from dprobes.dpc.types.c_types import VOID, Array, Floating, is_scalar, size_of
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.dpc.modules.probed_modules import ProbedModules
    from dprobes.dpc.typedtree.name_scope import GivenTypes, PlaceNames, TypeListener
    from dprobes.dpc.types.c_types import CType

__all__ = ["VARIABLE_COUNTS", "ProgramTyper"]

_KINDS = {
    syntax_tree.Storage.STATIC: typed_values.VariableKind.LOCAL,
    syntax_tree.Storage.GLOBAL: typed_values.VariableKind.GLOBAL,
    syntax_tree.Storage.PERCPU: typed_values.VariableKind.PER_CPU,
    syntax_tree.Storage.THREAD: typed_values.VariableKind.THREAD,
}
VARIABLE_COUNTS = {
    typed_values.VariableKind.LOCAL: "vars",
    typed_values.VariableKind.GLOBAL: "gvars",
    typed_values.VariableKind.PER_CPU: "cvars",
    typed_values.VariableKind.THREAD: "tvars",
}
"""Statements of a file header that declare the numbers of variables, by kind of variable."""

_CALLED = (syntax_tree.PointKind.CODE, syntax_tree.PointKind.SYSTEM_CALL)
_TRACED = (syntax_tree.PointKind.TRACEPOINT, syntax_tree.PointKind.SYSTEM_CALL)
_VARIABLES_MAX = 65536
_PARAMETERS_MAX = 6


class ProgramTyper:
    """A typer of the parts of a program that probes ``modules``; ``tell`` receives the types that editors show."""

    def __init__(
        self,
        program: syntax_tree.ProgramTree,
        word_size: int,
        diagnostics: Diagnostics,
        modules: ProbedModules,
        *,
        allow_write: bool,
        tell: TypeListener | None = None,
    ) -> None:
        self._tell = tell
        self._program = program
        self._diagnostics = diagnostics
        self._allow_write = allow_write
        self._scope = Scope()
        self.functions: dict[str, FunctionSignature] = {}
        said = next((each.value for each in program.attributes if each.name == "max_strlen"), None)
        string_limit = said if isinstance(said, int) else STRING_LIMIT
        self.tables = Tables(
            diagnostics,
            cache(lambda: values_written(program, frozenset(KINDS))),
            cache(lambda: kinds_of_steps(program, frozenset(KINDS))),
            cache(lambda: text_sizes(program, string_limit + 1)),
            cache(lambda: durations(program)),
            string_limit,
        )
        self.counts = dict.fromkeys(typed_values.VariableKind, 0)
        self.shares_words = False
        """True if the program has a word-sized variable that all threads share."""
        self._modules = modules
        self.types = TypeTable(word_size, diagnostics, self._constant, modules.first)
        self.types.string_limit = string_limit
        for module in modules.all:
            self.types.tell_module(module)

    def _constant(self, expression: syntax_tree.Expression) -> int | None:
        return ValueTyper(
            self.types, self.functions, self._scope, self._diagnostics, self.tables, Surroundings()
        ).constant(expression)

    def _values(self, scope: Scope, where: Surroundings) -> ValueTyper:
        types = self.types.seen_from(where.names)
        return ValueTyper(types, self.functions, scope, self._diagnostics, self.tables, where, self._tell)

    def declare(self, declared: syntax_tree.Declaration | syntax_tree.Function) -> None:
        """
        Add the names that a declaration or function of the program declares.

        All declarations come before the functions.
        """
        with suppress(TypingError, UnknownTypeError):
            if isinstance(declared, syntax_tree.Declaration):
                self._declare(declared)
            else:
                self._declare_function(declared)

    def _declare(self, declaration: syntax_tree.Declaration) -> None:
        base = self.types.base(declaration.specifier)
        for declarator in declaration.declarators:
            type_ = self.types.declared(base, declarator)
            if declaration.storage is syntax_tree.Storage.TYPEDEF:
                self.types.define(declarator.name, type_)
                continue
            if declaration.storage is syntax_tree.Storage.EXTERN:
                meaning: ModuleSymbol | ProgramVariable = ModuleSymbol(declarator.name, type_, declarator.span)
            else:
                meaning = self._variable(declaration.storage, type_, declarator)
            if (known := self._scope.add(declarator.name, meaning)) is not None:
                first = Note("the first declaration is here", known.span)
                self._diagnostics.error(declarator.span, f"'{declarator.name}' is declared twice", notes=(first,))

    def _variable(
        self, storage: syntax_tree.Storage, type_: CType, declarator: syntax_tree.Declarator
    ) -> ProgramVariable:
        kind = _KINDS.get(storage, typed_values.VariableKind.LOCAL)
        element = type_.element if isinstance(type_, Array) else type_
        if not is_scalar(element) or (isinstance(type_, Array) and type_.count is None):
            hint = "for a variable of the module write 'extern' before it"
            message = f"a variable of a program is a number, a pointer, or an array of them, not '{type_}'"
            self._diagnostics.error(declarator.span, message, hint=hint)
            raise TypingError
        if declarator.value is not None:
            message = f"'{declarator.name}' begins with 0: variables of a program have no other first value"
            self._diagnostics.error(declarator.value.span, message)
        count = type_.count or 0 if isinstance(type_, Array) else 1
        first = self.counts[kind]
        self.counts[kind] += count * self._width(element)
        if self.counts[kind] > _VARIABLES_MAX:
            words = "static" if kind is typed_values.VariableKind.LOCAL else storage.value
            message = f"a program has room for {_VARIABLES_MAX} numbers in its '{words}' variables"
            self._diagnostics.error(declarator.span, f"{message}, and with '{declarator.name}' there are more")
        if kind is not typed_values.VariableKind.THREAD and (
            (integer := integer_of(element)) is None or integer.is_long
        ):
            self.shares_words = True
        return ProgramVariable(kind, first, count, element, isinstance(type_, Array), declarator.span)

    def _width(self, type_: CType) -> int:
        """Return the number of RPN stack cells of a value of this type: 2 for 64 bits in 32-bit programs, else 1."""
        return 2 if (size_of(type_) or 0) > self.types.word_size else 1

    def _declare_function(self, function: syntax_tree.Function) -> None:
        type_ = self.types.of(function.type)
        parameters = tuple(
            self.types.word if parameter.type is None else self.types.of(parameter.type)
            for parameter in function.parameters
        )
        span = function.type.declarator.span
        if function.name in self.functions:
            self._diagnostics.error(span, f"the function '{function.name}' is defined twice")
            return
        for parameter, its in zip(function.parameters, parameters, strict=True):
            if not is_scalar(its):
                self._diagnostics.error(parameter.span, f"a parameter is a number or a pointer, not '{its}'")
                return
        self.functions[function.name] = FunctionSignature(function.name, type_, parameters, span)

    def function(self, function: syntax_tree.Function) -> TypedFunction | None:
        """
        Return a function with its types.

        Return None if its declaration was rejected, such as the second one with its name.
        """
        signature = self.functions.get(function.name)
        if signature is None or signature.span != function.type.declarator.span:
            return None
        scope = Scope(self._scope)
        cells = 0
        for parameter, type_ in zip(function.parameters, signature.parameters, strict=True):
            cells += self._width(type_)  # the low word of a wide parameter is on top
            if scope.add(parameter.name, SlotName(-cells, type_, parameter.span)) is not None:
                self._diagnostics.error(parameter.span, f"there are two parameters '{parameter.name}'")
        where = Surroundings(
            is_function=True,
            allow_write=self._allow_write,
            names=self._modules.names_of_all(),
            module=self._modules.name_at(None),
            kernel=self._modules.kernel_at(None),
        )
        values = self._values(scope, where)
        statements = StatementTyper(values, self._diagnostics, result=signature.type)
        body = statements.block(function.body)
        return TypedFunction(signature, body, values.slots)

    def probes(self, probe: syntax_tree.Probe) -> list[TypedProbe]:
        """Return a probe with its types, once for all probepoints with equal results; an empty list after an error."""
        at_return = any(point.at_return for point in probe.points)
        if at_return and not all(point.at_return for point in probe.points):
            self._diagnostics.error(probe.points[0].span, "entries and returns cannot share a block")
        found: list[TypedProbe] = []
        for point in probe.points:
            self._check_watched(point)
        for point in probe.points:
            names, given = self._modules.names_at(point), self._modules.given_at(point)
            typed_probe = self._probe_once(probe, point, names, given, is_first=not found)
            if typed_probe is None:
                return []
            is_asked = names is None or names.was_asked or (given is not None and given.was_asked)
            if not is_asked or self._diagnostics.has_errors:
                # No look-up depended on the probepoint, so all probepoints have equal results.
                return [typed_probe._replace(at=probe.points)]
            same = next((n for n, each in enumerate(found) if _is_same(each, typed_probe)), None)
            if same is None:
                found.append(typed_probe)
            else:
                found[same] = found[same]._replace(at=(*found[same].at, point))
        return found

    def types_at(self, point: syntax_tree.Point) -> TypeTable:
        """Return the types that names denote in the scope of a point."""
        return self.types.seen_from(self._modules.names_at(point))

    def _check_watched(self, point: syntax_tree.Point) -> None:
        """Report a watchpoint whose watched object has a type without a size."""
        if point.type is None:
            return
        with suppress(UnknownTypeError):  # the error is already reported
            type_ = self.types_at(point).of(point.type)
            if not size_of(type_):
                self._diagnostics.error(point.span, f"'{type_}' has no size that is known: it cannot be watched")

    def _probe_once(
        self,
        probe: syntax_tree.Probe,
        point: syntax_tree.Point,
        names: PlaceNames | None,
        given: GivenTypes | None,
        *,
        is_first: bool,
    ) -> TypedProbe | None:
        """Return a probe with its types at a point, None after an error; report an error of several points once."""
        if is_first:
            return self._probe_or_error(probe, point, names, given)
        known, self._diagnostics = self._diagnostics, Diagnostics()
        try:
            return self._probe_or_error(probe, point, names, given)
        finally:
            reported = set(known.since(0))
            known.extend(item for item in self._diagnostics.since(0) if item not in reported)
            self._diagnostics = known

    def _probe_or_error(
        self, probe: syntax_tree.Probe, point: syntax_tree.Point, names: PlaceNames | None, given: GivenTypes | None
    ) -> TypedProbe | None:
        """
        Return a probe with its types at a point, or None after an error.

        Malformed debug information is reported at the point.
        """
        try:
            return self._probe(probe, point, names, given)
        except TargetError as error:
            self._diagnostics.error(point.span, error.message, hint=error.hint)
            return None

    def _probe(
        self, probe: syntax_tree.Probe, point: syntax_tree.Point, names: PlaceNames | None, given: GivenTypes | None
    ) -> TypedProbe | None:
        scope = Scope(self._scope)
        self._declare_parameters(probe, scope, names, given)
        watched = next((point.place for point in probe.points if point.kind is syntax_tree.PointKind.WATCH), None)
        where = Surroundings(
            at_return=any(point.at_return for point in probe.points),
            watched=watched,
            line=probe.line,
            is_usdt=all(point.kind is syntax_tree.PointKind.USDT for point in probe.points),
            is_traced=all(point.kind in _TRACED for point in probe.points),
            has_return=all(point.kind in _CALLED for point in probe.points),
            allow_write=self._allow_write,
            names=names,
            given=given,
            module=self._modules.name_at(point),
            kernel=self._modules.kernel_at(point),
        )
        values = self._values(scope, where)
        condition, is_wrong = None, False
        if probe.condition is not None:
            try:
                if isinstance(probe.condition, syntax_tree.Assignment) and not probe.condition.operator:
                    hint = "equality is '=='"
                    if isinstance(probe.condition.value, syntax_tree.Unary) and probe.condition.value.operator == "~":
                        hint = 'strings have no patterns: write startswith(comm, "l")'
                    raise values.wrong(probe.condition.span, "a condition assigns nothing: found '='", hint)
                condition = values.condition(probe.condition)
            except (TypingError, UnknownTypeError):
                is_wrong = True  # errors in the block are reported as well
            if condition is not None and needs_entry(condition):
                slots, where = values.slots, where._replace(is_entry_known=True)
                values = self._values(scope, where)
                values.slots = slots
        statements = StatementTyper(values, self._diagnostics)
        body = statements.block(probe.body)
        if is_wrong:
            return None
        paths = find_log_paths(body, statements.logs, self._diagnostics)
        return TypedProbe(probe, (point,), condition, body, values.slots, paths)

    def block(self, block: syntax_tree.ToolBlock) -> TypedBlock:
        """Return a block of the tool with its types. The first use of a table, here or in a probe, decides its kind."""
        where = Surroundings(is_tool=True)
        scope = Scope(self._scope)
        values = self._values(scope, where)
        statements = StatementTyper(values, self._diagnostics, is_tool=True)
        return TypedBlock(block, statements.block(block.body), values.slots)

    def _declare_parameters(
        self, probe: syntax_tree.Probe, scope: Scope, names: PlaceNames | None, given: GivenTypes | None
    ) -> None:
        parameters = next((point.parameters for point in probe.points if point.parameters is not None), ())
        known_max = _PARAMETERS_MAX if names is None else names.arguments
        if is_usdt := all(point.kind is syntax_tree.PointKind.USDT for point in probe.points):
            known_max = ARGUMENTS_MAX
        number = 0
        for ordinal, parameter in enumerate(parameters):
            try:
                noted = None if given is None or not is_usdt else given.type_of(str(ordinal))
                type_ = self._type_of_parameter(ordinal, parameter, names, noted, is_numbered=number < known_max)
            except UnknownTypeError:
                number += 1
                continue
            if type_ is None:
                why = "a USDT probe has no more" if is_usdt else "they are in registers"
                self._diagnostics.error(parameter.span, f"only the first {known_max} parameters are known: {why}")
                return
            if parameter.type is not None and not is_scalar(type_) and not isinstance(type_, Floating):
                self._diagnostics.error(parameter.span, f"a parameter is a number or a pointer, not '{type_}'")
                number += 1
                continue
            words = 1 if is_usdt else self._words(type_)
            is_numbered = is_usdt or (words > 0 and not isinstance(type_, Floating))
            argument, number = number if is_numbered else None, number + words
            if words > 1 and is_scalar(type_) and number > _PARAMETERS_MAX:
                self._diagnostics.error(parameter.span, "only the first 6 words of the parameters are known")
                return
            if self._tell is not None:
                self._tell(parameter.span, type_)
            meaning = Named(ordinal, argument, type_, parameter.span, parameter.type is not None)
            if parameter.name and scope.add(parameter.name, meaning) is not None:
                self._diagnostics.error(parameter.span, f"there are two parameters '{parameter.name}'")

    def _words(self, type_: CType) -> int:
        """Return the number of argument registers that a parameter takes; in 32-bit programs, of words on the stack."""
        word = self.types.word_size
        if word == 8:
            from dprobes.dpc.types.argument_places import argument_places

            (place,) = argument_places([type_], VOID, word)
            return sum(name.startswith("arg") for name in place.registers)
        return -(-(size_of(type_) or word) // word)

    def _type_of_parameter(
        self,
        ordinal: int,
        parameter: syntax_tree.Parameter,
        names: PlaceNames | None,
        noted: CType | None,
        *,
        is_numbered: bool,
    ) -> CType | None:
        """
        Return the written type of a parameter, else that of the USDT note or the debug information, else a word.

        Return None for a parameter without an argument number that debug information does not describe.
        """
        if parameter.type is None and noted is not None:
            return noted
        known: CType | None = None
        if names is not None and (parameter.type is None or not is_numbered):
            try:
                known = names.parameter_type(ordinal)
            except TargetError as error:
                self._diagnostics.error(parameter.span, error.message, hint=error.hint)
                raise UnknownTypeError from None
        if parameter.type is None and known is not None:
            return known
        type_ = self.types.word if parameter.type is None else self.types.seen_from(names).of(parameter.type)
        return None if not is_numbered and known is None and not isinstance(type_, Floating) else type_


def _is_same(one: TypedProbe, other: TypedProbe) -> bool:
    """Return whether the code for two probepoints of one probe is equal."""
    return (one.condition, one.body, one.slots) == (other.condition, other.body, other.slots)
