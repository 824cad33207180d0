"""Statements with types: what they do, and where variables of blocks are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.dpc.syntax import tree
from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typedtree.scope import Scope, SlotName
from dprobes.dpc.typedtree.valueproperties import does_something
from dprobes.dpc.typers.printtyper import PrintTyper
from dprobes.dpc.typers.provided import ACTIONS, TOOL_ACTIONS
from dprobes.dpc.typers.typetable import UnknownTypeError
from dprobes.dpc.typers.valuetyper import TypingError
from dprobes.dpc.types.ctype import (
    Array,
    Enumeration,
    Floating,
    Integer,
    Void,
    is_scalar,
    promoted,
)
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typers.valuetyper import ValueTyper
    from dprobes.dpc.types.ctype import CType
    from dprobes.source import Span

__all__ = ["StatementTyper"]

_ENDS = {
    "debugger": typedstatement.Ending.DEBUGGER,
    "crash": typedstatement.Ending.CRASH,
    "core": typedstatement.Ending.CORE,
    "remove": typedstatement.Ending.REMOVE,
}


class StatementTyper:
    """
    Type the statements of a handler, of a function if ``result`` says what it returns, or of a block of the tool.

    ``logs`` counts the printf statements.
    """

    def __init__(
        self, values: ValueTyper, diagnostics: Diagnostics, *, result: CType | None = None, is_tool: bool = False
    ) -> None:
        self._is_tool = is_tool
        self._values = values
        self._diagnostics = diagnostics
        self._result = result
        self._prints = PrintTyper(values, is_tool=is_tool)
        self.logs = 0
        self._loops = 0
        self._switches = 0

    def block(self, block: tree.Block) -> typedstatement.Steps:
        """Return the statements of a block, with what is wrong left out."""
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            found = self._statements(block.statements)
            last = next((n for n, each in enumerate(found, 1) if not typedstatement.goes_on(each)), len(found))
            return typedstatement.Steps(tuple(found[:last]))
        finally:
            self._values.scope = outer

    def _statements(self, statements: Sequence[tree.Statement]) -> list[typedstatement.Statement]:
        found: list[typedstatement.Statement] = []
        for statement in statements:
            try:
                found.append(self.statement(statement))
            except (TypingError, UnknownTypeError):
                continue
            except TargetError as error:  # of what describes the module
                self._diagnostics.error(statement.span, error.message, hint=error.hint)
        return found

    def statement(self, statement: tree.Statement) -> typedstatement.Statement:
        """Return a statement with its types; raise ``TypingError`` if it is wrong."""
        match statement:
            case tree.ExpressionStatement(expression, span):
                return self._expression(expression, span)
            case tree.Declaration():
                return self._declaration(statement)
            case tree.Block():
                return self.block(statement)
            case tree.If(condition, then, otherwise, span):
                test = self._test(condition)
                first = self._inner(then)
                other = None if otherwise is None else self._inner(otherwise)
                if test is None:
                    raise TypingError
                if isinstance(test, typed.Constant):
                    return first if test.value else other or typedstatement.Steps(())
                return typedstatement.Select(test, first, other, span)
            case tree.While(condition, body, span):
                test, inner = self._test(condition), self._loop_body(body)
                if test is None:
                    raise TypingError
                return self._while(typedstatement.Loop(test, None, inner, tests_first=True, span=span))
            case tree.DoWhile(body, condition, span):
                inner = self._loop_body(body)
                self._warn_of_assignment(condition)
                test = self._values.condition(condition)
                if isinstance(test, typed.Constant) and test.value:
                    self._check_end(inner, span)
                return typedstatement.Loop(test, None, inner, tests_first=False, span=span)
            case tree.For():
                return self._for(statement)
            case tree.Switch():
                return self._switch(statement)
            case tree.Case(_, span):
                raise self._values.wrong(span, "'case' and 'default' stand directly in the block of 'switch'")
            case tree.Break(span):
                if not self._loops and not self._switches:
                    raise self._values.wrong(span, "'break' is in no loop, and in no 'switch'")
                return typedstatement.Jump(typedstatement.Jumping.BREAK, span)
            case tree.Continue(span):
                if not self._loops:
                    raise self._values.wrong(span, "'continue' is in no loop")
                return typedstatement.Jump(typedstatement.Jumping.CONTINUE, span)
            case tree.Return(value, span):
                return self._return(value, span)
            case tree.Try():
                return self._try(statement)
        raise AssertionError(statement)

    def _test(self, condition: tree.Expression) -> typed.Value | None:
        """Return a condition, None if it is wrong, which has been said: what depends on it may be wrong as well."""
        self._warn_of_assignment(condition)
        try:
            return self._values.condition(condition)
        except (TypingError, UnknownTypeError):
            return None

    def _warn_of_assignment(self, condition: tree.Expression) -> None:
        """Warn of an assignment that may have been meant to be a comparison."""
        if isinstance(condition, tree.Assignment) and not condition.operator:
            message = "this condition assigns: found '='"
            hint = f"equality is '=='; if an assignment is meant, write ({condition.span.text}) != 0"
            self._values.operators.warn(condition.span, message, hint)

    def _inner(self, statement: tree.Statement) -> typedstatement.Statement:
        """Return a statement with a scope of its own."""
        if isinstance(statement, tree.Block):
            return self.block(statement)
        return self.block(tree.Block((statement,), statement.span))

    def _loop_body(self, body: tree.Statement) -> typedstatement.Statement:
        self._loops += 1
        try:
            return self._inner(body)
        finally:
            self._loops -= 1

    def _while(self, loop: typedstatement.Loop) -> typedstatement.Statement:
        """Return a loop without a condition that is always true; one that is never true is no loop."""
        if isinstance(loop.condition, typed.Constant):
            if not loop.condition.value:
                return typedstatement.Steps(())
            loop = replace(loop, condition=None)
        if loop.condition is None:
            self._check_end(loop.body, loop.span)
        return loop

    def _check_end(self, body: typedstatement.Statement, span: Span) -> None:
        """Warn of a loop without a condition that nothing in it ends."""
        if not _leaves(body):
            message = "nothing ends this loop but jmpmax, or an exception"
            self._values.operators.warn(span, message, "write 'break' or 'return' where it ends")

    def _for(self, loop: tree.For) -> typedstatement.Statement:
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            first = [] if loop.first is None else [self.statement(loop.first)]
            if loop.condition is not None:
                self._warn_of_assignment(loop.condition)
            test = None if loop.condition is None else self._values.condition(loop.condition)
            step = None if loop.step is None else self._values.value(loop.step)
            body = self._loop_body(loop.body)
            again = typedstatement.Loop(test, step, body, tests_first=True, span=loop.span)
            return typedstatement.Steps((*first, self._while(again)))
        finally:
            self._values.scope = outer

    def _switch(self, switch: tree.Switch) -> typedstatement.Statement:
        value = self._values.value(switch.value)
        if not isinstance(value.type, Integer | Enumeration):
            raise self._values.wrong(switch.value.span, f"'switch' needs a number, not '{value.type}'")
        type_ = promoted(value.type)
        outer = self._values.scope
        self._values.scope = Scope(outer)
        self._switches += 1
        statements: list[typedstatement.Statement] = []
        tests: list[typedstatement.Test] = []
        known: dict[int | None, Span] = {}
        try:
            for statement in switch.body.statements:
                if not isinstance(statement, tree.Case):
                    statements += self._statements((statement,))
                    continue
                number = None if statement.value is None else self._values.constant(statement.value)
                if statement.value is not None and number is None:
                    continue
                number = None if number is None else type_.cut(number)
                if number in known:
                    what = "'default'" if number is None else f"'case {number}'"
                    self._diagnostics.error(statement.span, f"{what} stands twice in this 'switch'")
                known[number] = statement.span
                tests.append(typedstatement.Test(number, len(statements)))
        finally:
            self._values.scope = outer
            self._switches -= 1
        return typedstatement.Switch(folded(typed.Convert(value, type_)), tuple(statements), tuple(tests), switch.span)

    def _return(self, value: tree.Expression | None, span: Span) -> typedstatement.Statement:
        if self._result is None:
            if value is not None:
                what = "a block of the tool" if self._is_tool else "a probe"
                raise self._values.wrong(value.span, f"{what} returns no value", "write 'return;', or print it")
            return typedstatement.End(typedstatement.Ending.RETURN, span)
        if isinstance(self._result, Void):
            if value is not None:
                raise self._values.wrong(value.span, "this function returns nothing: its type is 'void'")
            return typedstatement.Result(None, span)
        if value is None:
            raise self._values.wrong(span, f"this function returns '{self._result}'")
        return typedstatement.Result(self._values.converted(self._values.value(value), self._result, value.span), span)

    def _try(self, statement: tree.Try) -> typedstatement.Statement:
        body = self.block(statement.body)
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            places = [self._new_slot(name, self._values.types.word, statement.span) for name in statement.names]
            handler = self.block(statement.handler)
        finally:
            self._values.scope = outer
        code, address = [*places, None, None][:2]
        return typedstatement.TryCatch(body, code, address, handler, statement.span)

    # Variables of blocks

    def _new_slot(self, name: str, type_: CType, span: Span) -> typed.Local:
        slot = self._values.slots
        if self._values.scope.add(name, SlotName(slot, type_, span)) is not None:
            raise self._values.wrong(span, f"'{name}' is declared twice in this block")
        self._values.slots += self._values.operators.width(type_)
        return typed.Local(slot, type_)

    def _declaration(self, declaration: tree.Declaration) -> typedstatement.Statement:
        if declaration.storage is not tree.Storage.AUTO:
            raise self._values.wrong(declaration.span, "variables that outlive the hit are declared outside of blocks")
        base = self._values.types.base(declaration.specifier)
        steps: list[typedstatement.Statement] = []
        for declarator in declaration.declarators:
            type_ = self._values.types.declared(base, declarator)
            if not is_scalar(type_):
                hint = "declare it outside of the block: static …"
                hint = hint if isinstance(type_, Array) else "use a pointer to it"
                hint = "an integer of its size holds its bits" if isinstance(type_, Floating) else hint
                raise self._values.wrong(
                    declarator.span, f"a variable of a block is a number or a pointer, not '{type_}'", hint
                )
            value: typed.Value = typed.Constant(0, type_)
            if declarator.value is not None:
                try:
                    value = self._values.converted(self._values.value(declarator.value), type_, declarator.value.span)
                except (TypingError, UnknownTypeError):
                    self._new_slot(declarator.name, type_, declarator.span)  # so that its uses are right
                    raise
            place = self._new_slot(declarator.name, type_, declarator.span)
            steps.append(typedstatement.Evaluate(typed.Assign(place, value, type_), declarator.span))
        return typedstatement.Steps(tuple(steps))

    # Actions

    def _expression(self, expression: tree.Expression, span: Span) -> typedstatement.Statement:
        match expression:
            case tree.Call(function) if function in ACTIONS:
                return self._action(expression)
            case tree.Assignment(operator, tree.TableAccess() as table, assigned):
                return self._values.tables.assignment(table, operator, assigned)
            case tree.Increment(amount, tree.TableAccess() as table):
                return self._values.tables.step(table, amount)
        value = self._values.value(expression)
        if not does_something(value):
            self._diagnostics.warning(span, "this has no effect")
        return typedstatement.Evaluate(value, span)

    def _action(self, call: tree.Call) -> typedstatement.Statement:
        if call.function == "printf":
            if self._result is not None:
                raise self._values.wrong(
                    call.span,
                    "'printf' makes a record: it cannot stand in a function",
                    "a probe has no type before its place: MODULE:FUNCTION { … }",
                )
            log = self._prints.log(call, self.logs + 1)
            self.logs += 1
            return log
        if call.function == "delete":
            if len(call.arguments) != 1 or not isinstance(table := call.arguments[0], tree.TableAccess):
                raise self._values.wrong(call.span, "'delete' takes an entry of a table", "write delete(@name[keys])")
            return self._values.tables.removal(table)
        if call.function in TOOL_ACTIONS:
            return self._tool_action(call)
        if self._is_tool:
            raise self._values.wrong(call.span, f"'{call.function}' ends a hit, and a block of the tool has none")
        if call.function == "skip":
            return self._skip(call)
        if (end := _ENDS.get(call.function)) is not None:
            if call.arguments:
                raise self._values.wrong(call.span, f"'{call.function}' takes no arguments")
            if self._result is not None:
                raise self._values.wrong(call.span, f"'{call.function}' ends a hit: it cannot stand in a function")
            return typedstatement.End(end, call.span)
        raise AssertionError(call.function)

    def _tool_action(self, call: tree.Call) -> typedstatement.Statement:
        if not self._is_tool:
            hint = "write 'end { print(@name); }': without that all tables are printed at the end"
            if call.function == "exit":
                hint = "set a variable, and look at it there; 'return;' ends this hit, and 'remove()' the probe"
            elif call.function == "cat":
                hint = "set a variable, and look at it in 'every 100ms { … }'"
            message = f"'{call.function}' is for blocks of the tool: 'begin', 'every' and 'end'"
            raise self._values.wrong(call.span, message, hint)
        match call.function, call.arguments:
            case "exit", []:
                return typedstatement.Quit(call.span)
            case "exit", _:
                raise self._values.wrong(call.span, "'exit' takes no arguments")
            case "cat", [tree.StringLiteral(path)] if path and "\0" not in path:
                return typedstatement.Cat(path, call.span)
            case "cat", _:
                raise self._values.wrong(
                    call.span, "'cat' takes the path of a file in quotes", 'write cat("/proc/loadavg")'
                )
            case "clear", [tree.TableAccess(_, ()) as table]:
                return typedstatement.Clear(self._values.tables.whole(table), call.span)
            case "print", [tree.TableAccess(_, ()) as table]:
                return typedstatement.Show(self._values.tables.whole(table), None, call.span)
            case "print", [tree.TableAccess(_, ()) as table, rows]:
                count = self._values.constant(rows)
                if count is None:
                    raise TypingError
                if count < 1:
                    raise self._values.wrong(rows.span, "'print' takes a number of rows from 1 on")
                return typedstatement.Show(self._values.tables.whole(table), count, call.span)
        takes = "a table, and how many rows of it" if call.function == "print" else "a table"
        raise self._values.wrong(
            call.span, f"'{call.function}' takes {takes}", f"write {call.function}(@name); 'printf' prints values"
        )

    def _skip(self, call: tree.Call) -> typedstatement.Statement:
        if len(call.arguments) != 1:
            raise self._values.wrong(call.span, "'skip' takes the value that the function returns", "write skip(0)")
        if self._result is not None:
            raise self._values.wrong(call.span, "'skip' ends a hit: it cannot stand in a function")
        self._values.check_write(call.span)
        value = self._values.value(call.arguments[0])
        return typedstatement.Skip(self._values.converted(value, self._values.types.word, call.span), call.span)


def _leaves(statement: typedstatement.Statement, *, is_inner: bool = False) -> bool:
    """Return whether something in a loop ends it; a ``break`` that ``is_inner`` is of another statement."""
    parts: tuple[typedstatement.Statement | None, ...] = ()
    match statement:
        case typedstatement.Jump(kind):
            return kind is typedstatement.Jumping.BREAK and not is_inner
        case typedstatement.Result() | typedstatement.End() | typedstatement.Skip() | typedstatement.Quit():
            return True
        case typedstatement.Steps(statements):
            parts = statements
        case typedstatement.Switch(_, statements):
            parts, is_inner = statements, True
        case typedstatement.Loop(_, _, body):
            parts, is_inner = (body,), True
        case typedstatement.Select(_, then, otherwise):
            parts = (then, otherwise)
        case typedstatement.TryCatch(body, _, _, handler):
            parts = (body, handler)
    return any(_leaves(each, is_inner=is_inner) for each in parts if each is not None)
