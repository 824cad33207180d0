"""Typing of statements, and the stack slots of variables in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.name_scope import ItemName, Scope, SlotName
from dprobes.dpc.typedtree.process_items import ItemKind, numbers_of
from dprobes.dpc.typedtree.value_properties import does_something, folded
from dprobes.dpc.typers.provided_names import ACTIONS, TOOL_ACTIONS
from dprobes.dpc.typers.type_table import UnknownTypeError
from dprobes.dpc.typers.value_typer import TypingError
from dprobes.dpc.types.c_types import INT, Array, Enumeration, Floating, Integer, Void, is_scalar, promoted
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typers.value_typer import ValueTyper
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["StatementTyper"]

_ENDS = {
    "debugger": typed_program.Ending.DEBUGGER,
    "crash": typed_program.Ending.CRASH,
    "core": typed_program.Ending.CORE,
    "remove": typed_program.Ending.REMOVE,
}


_ITEMS = {kind.value: kind for kind in ItemKind}


class StatementTyper:
    """
    Typer of the statements of a handler, function or block.

    ``result`` is the function's return type, or None elsewhere. ``logs`` counts the ``printf`` statements so far.
    """

    def __init__(
        self, values: ValueTyper, diagnostics: Diagnostics, *, result: CType | None = None, is_tool: bool = False
    ) -> None:
        self._is_tool = is_tool
        self._items = 0
        """The number of loops over items of the system."""
        self._values = values
        self._diagnostics = diagnostics
        self._result = result
        self.logs = 0
        self._loops = 0
        self._switches = 0

    def block(self, block: syntax_tree.Block) -> typed_program.Steps:
        """Return the statements of a block, without those in error."""
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            found = self._statements(block.statements)
            last = next((n for n, each in enumerate(found, 1) if not typed_program.goes_on(each)), len(found))
            return typed_program.Steps(tuple(found[:last]))
        finally:
            self._values.scope = outer

    def _statements(self, statements: Sequence[syntax_tree.Statement]) -> list[typed_program.Statement]:
        found: list[typed_program.Statement] = []
        for statement in statements:
            try:
                found.append(self.statement(statement))
            except (TypingError, UnknownTypeError):
                continue
            except TargetError as error:  # from the description of the module
                self._diagnostics.error(statement.span, error.message, hint=error.hint)
        return found

    def statement(self, statement: syntax_tree.Statement) -> typed_program.Statement:
        """Return a statement with its types; raise ``TypingError`` for errors."""
        match statement:
            case syntax_tree.ExpressionStatement(expression, span):
                return self._expression(expression, span)
            case syntax_tree.Declaration():
                return self._declaration(statement)
            case syntax_tree.Block():
                return self.block(statement)
            case syntax_tree.If(condition, then, otherwise, span):
                test = self._test(condition)
                first = self._inner(then)
                other = None if otherwise is None else self._inner(otherwise)
                if test is None:
                    raise TypingError
                if isinstance(test, typed_values.Constant):
                    return first if test.value else other or typed_program.Steps(())
                return typed_program.Select(test, first, other, span)
            case syntax_tree.While(condition, body, span):
                test, inner = self._test(condition), self._loop_body(body)
                if test is None:
                    raise TypingError
                return self._while(typed_program.Loop(test, None, inner, tests_first=True, span=span))
            case syntax_tree.DoWhile(body, condition, span):
                inner = self._loop_body(body)
                self._warn_of_assignment(condition)
                test = self._values.condition(condition)
                if isinstance(test, typed_values.Constant) and test.value:
                    self._check_end(inner, span)
                return typed_program.Loop(test, None, inner, tests_first=False, span=span)
            case syntax_tree.For():
                return self._for(statement)
            case syntax_tree.ForEach():
                return self._for_each(statement)
            case syntax_tree.Switch():
                return self._switch(statement)
            case syntax_tree.Case(_, span):
                raise self._values.wrong(span, "'case' and 'default' belong directly in the block of 'switch'")
            case syntax_tree.Break(span):
                if not self._loops and not self._switches:
                    raise self._values.wrong(span, "'break' is in no loop, and in no 'switch'")
                return typed_program.Jump(typed_program.Jumping.BREAK, span)
            case syntax_tree.Continue(span):
                if not self._loops:
                    raise self._values.wrong(span, "'continue' is in no loop")
                return typed_program.Jump(typed_program.Jumping.CONTINUE, span)
            case syntax_tree.Return(value, span):
                return self._return(value, span)
            case syntax_tree.Try():
                return self._try(statement)
        assert_never(statement)

    def _test(self, condition: syntax_tree.Expression) -> typed_values.Value | None:
        """Return a condition, or None after a reported error, so that errors in dependent statements are found, too."""
        self._warn_of_assignment(condition)
        try:
            return self._values.condition(condition)
        except (TypingError, UnknownTypeError):
            return None

    def _warn_of_assignment(self, condition: syntax_tree.Expression) -> None:
        """Warn of an assignment that may have been meant as a comparison."""
        if isinstance(condition, syntax_tree.Assignment) and not condition.operator:
            message = "this condition assigns: found '='"
            hint = f"equality is '=='; if an assignment is meant, write ({condition.span.text}) != 0"
            self._values.operators.warn(condition.span, message, hint)

    def _inner(self, statement: syntax_tree.Statement) -> typed_program.Statement:
        """Return the typed body of an ``if`` or loop, as a block whose declarations are not visible outside."""
        if isinstance(statement, syntax_tree.Block):
            return self.block(statement)
        return self.block(syntax_tree.Block((statement,), statement.span))

    def _loop_body(self, body: syntax_tree.Statement) -> typed_program.Statement:
        self._loops += 1
        try:
            return self._inner(body)
        finally:
            self._loops -= 1

    def _while(self, loop: typed_program.Loop) -> typed_program.Statement:
        """Return a loop, without its condition if that is always true, or an empty sequence if it is never true."""
        if isinstance(loop.condition, typed_values.Constant):
            if not loop.condition.value:
                return typed_program.Steps(())
            loop = loop.replaced(condition=None)
        if loop.condition is None:
            self._check_end(loop.body, loop.span)
        return loop

    def _check_end(self, body: typed_program.Statement, span: Span) -> None:
        """Warn of a loop without a condition or any exit."""
        if not _leaves(body):
            message = "only jmpmax or an exception ends this loop"
            self._values.operators.warn(span, message, "write 'break' or 'return' where it ends")

    def _for(self, loop: syntax_tree.For) -> typed_program.Statement:
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            first = [] if loop.first is None else [self.statement(loop.first)]
            if loop.condition is not None:
                self._warn_of_assignment(loop.condition)
            test = None if loop.condition is None else self._values.condition(loop.condition)
            step = None if loop.step is None else self._values.value(loop.step)
            body = self._loop_body(loop.body)
            again = typed_program.Loop(test, step, body, tests_first=True, span=loop.span)
            return typed_program.Steps((*first, self._while(again)))
        finally:
            self._values.scope = outer

    def _for_each(self, loop: syntax_tree.ForEach) -> typed_program.Statement:
        """Return a loop over items of the system."""
        if not self._is_tool:
            message = f"only the blocks 'begin', 'every' and 'end' can loop over '{loop.items.span.text}'"
            raise self._values.wrong(loop.span, message, "write the loop in 'every 1s { … }'")
        match loop.items:
            case syntax_tree.Name(word) if word in _ITEMS and not _ITEMS[word].is_of_process:
                kind, process = _ITEMS[word], None
            case syntax_tree.Call(word, [number]) if word in _ITEMS and _ITEMS[word].is_of_process:
                kind = _ITEMS[word]
                process = self._values.converted(self._values.value(number), INT, number.span)
            case _:
                raise self._values.wrong(
                    loop.items.span,
                    f"'{loop.items.span.text}' cannot be looped over",
                    "loop over tasks, files(pid) or maps(pid)",
                )
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            slot = self._values.slots
            self._values.slots += len(numbers_of(kind))
            self._items += 1
            item = ItemName(kind, self._items, slot, loop.span)
            self._values.scope.add(loop.name, item)
            body = self._loop_body(loop.body)
            return typed_program.EachItem(kind, process, item.number, slot, body, loop.span)
        finally:
            self._values.scope = outer

    def _switch(self, switch: syntax_tree.Switch) -> typed_program.Statement:
        value = self._values.value(switch.value)
        if not isinstance(value.type, Integer | Enumeration):
            raise self._values.wrong(switch.value.span, f"'switch' needs a number, not '{value.type}'")
        type_ = promoted(value.type)
        outer = self._values.scope
        self._values.scope = Scope(outer)
        self._switches += 1
        statements: list[typed_program.Statement] = []
        tests: list[typed_program.Test] = []
        known: dict[int | None, Span] = {}
        try:
            for statement in switch.body.statements:
                if not isinstance(statement, syntax_tree.Case):
                    statements += self._statements((statement,))
                    continue
                number = None if statement.value is None else self._values.constant(statement.value)
                if statement.value is not None and number is None:
                    continue
                number = None if number is None else type_.cut(number)
                if number in known:
                    what = "'default'" if number is None else f"'case {number}'"
                    self._diagnostics.error(statement.span, f"{what} occurs twice in this 'switch'")
                known[number] = statement.span
                tests.append(typed_program.Test(number, len(statements)))
        finally:
            self._values.scope = outer
            self._switches -= 1
        return typed_program.Switch(
            folded(typed_values.Convert(value, type_)), tuple(statements), tuple(tests), switch.span
        )

    def _return(self, value: syntax_tree.Expression | None, span: Span) -> typed_program.Statement:
        if self._result is None:
            if value is not None:
                what = "a block of the tool" if self._is_tool else "a probe"
                raise self._values.wrong(value.span, f"{what} returns no value", "write 'return;', or print it")
            return typed_program.End(typed_program.Ending.RETURN, span)
        if isinstance(self._result, Void):
            if value is not None:
                raise self._values.wrong(value.span, "this function returns nothing: its type is 'void'")
            return typed_program.Result(None, span)
        if value is None:
            raise self._values.wrong(span, f"this function returns '{self._result}'")
        return typed_program.Result(self._values.converted(self._values.value(value), self._result, value.span), span)

    def _try(self, statement: syntax_tree.Try) -> typed_program.Statement:
        body = self.block(statement.body)
        outer = self._values.scope
        self._values.scope = Scope(outer)
        try:
            places = [self._new_slot(name, self._values.types.word, statement.span) for name in statement.names]
            handler = self.block(statement.handler)
        finally:
            self._values.scope = outer
        code, address = [*places, None, None][:2]
        return typed_program.TryCatch(body, code, address, handler, statement.span)

    # Variables of blocks

    def _new_slot(self, name: str, type_: CType, span: Span) -> typed_values.Local:
        slot = self._values.slots
        if self._values.scope.add(name, SlotName(slot, type_, span)) is not None:
            raise self._values.wrong(span, f"'{name}' is declared twice in this block")
        self._values.slots += self._values.operators.width(type_)
        return typed_values.Local(slot, type_)

    def _declaration(self, declaration: syntax_tree.Declaration) -> typed_program.Statement:
        if declaration.storage is not syntax_tree.Storage.AUTO:
            raise self._values.wrong(declaration.span, "variables that outlive the hit are declared outside of blocks")
        base = self._values.types.base(declaration.specifier)
        steps: list[typed_program.Statement] = []
        for declarator in declaration.declarators:
            type_ = self._values.types.declared(base, declarator)
            if not is_scalar(type_):
                hint = "declare it outside of the block: static …"
                hint = hint if isinstance(type_, Array) else "use a pointer to it"
                hint = "an integer of its size holds its bits" if isinstance(type_, Floating) else hint
                raise self._values.wrong(
                    declarator.span, f"a variable of a block is a number or a pointer, not '{type_}'", hint
                )
            value: typed_values.Value = typed_values.Constant(0, type_)
            if declarator.value is not None:
                try:
                    value = self._values.converted(self._values.value(declarator.value), type_, declarator.value.span)
                except (TypingError, UnknownTypeError):
                    self._new_slot(declarator.name, type_, declarator.span)  # avoid errors at its uses
                    raise
            place = self._new_slot(declarator.name, type_, declarator.span)
            steps.append(typed_program.Evaluate(typed_values.Assign(place, value, type_), declarator.span))
        return typed_program.Steps(tuple(steps))

    # Actions

    def _expression(self, expression: syntax_tree.Expression, span: Span) -> typed_program.Statement:
        match expression:
            case syntax_tree.Call(function) if function in ACTIONS:
                return self._action(expression)
            case syntax_tree.Assignment(operator, syntax_tree.TableAccess() as table, assigned):
                return self._values.tables.assignment(table, operator, assigned)
            case syntax_tree.Increment(amount, syntax_tree.TableAccess() as table):
                return self._values.tables.step(table, amount)
        value = self._values.value(expression)
        if not does_something(value):
            self._diagnostics.warning(span, "this has no effect")
        return typed_program.Evaluate(value, span)

    def _action(self, call: syntax_tree.Call) -> typed_program.Statement:
        if call.function == "printf":
            if self._result is not None:
                raise self._values.wrong(
                    call.span,
                    "'printf' makes a record: it cannot be in a function",
                    "a probe has no type before its place: MODULE:FUNCTION { … }",
                )
            from dprobes.dpc.typers.print_typer import PrintTyper

            log = PrintTyper(self._values, is_tool=self._is_tool).log(call, self.logs + 1)
            self.logs += 1
            return log
        if call.function == "delete":
            if len(call.arguments) != 1 or not isinstance(table := call.arguments[0], syntax_tree.TableAccess):
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
                raise self._values.wrong(call.span, f"'{call.function}' ends a hit: it cannot be in a function")
            return typed_program.End(end, call.span)
        raise AssertionError(call.function)

    def _tool_action(self, call: syntax_tree.Call) -> typed_program.Statement:
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
                return typed_program.Quit(call.span)
            case "exit", _:
                raise self._values.wrong(call.span, "'exit' takes no arguments")
            case "cat", [syntax_tree.StringLiteral(path)] if path and "\0" not in path:
                return typed_program.Cat(path, call.span)
            case "cat", _:
                raise self._values.wrong(
                    call.span, "'cat' takes the path of a file in quotes", 'write cat("/proc/loadavg")'
                )
            case "clear", [syntax_tree.TableAccess(_, ()) as table]:
                return typed_program.Clear(self._values.tables.whole(table), call.span)
            case "print", [syntax_tree.TableAccess(_, ()) as table]:
                return typed_program.Show(self._values.tables.whole(table), None, call.span)
            case "print", [syntax_tree.TableAccess(_, ()) as table, rows]:
                count = self._values.constant(rows)
                if count is None:
                    raise TypingError
                if count < 1:
                    raise self._values.wrong(rows.span, "'print' takes a number of rows from 1 on")
                return typed_program.Show(self._values.tables.whole(table), count, call.span)
        takes = "a table, and how many rows of it" if call.function == "print" else "a table"
        raise self._values.wrong(
            call.span, f"'{call.function}' takes {takes}", f"write {call.function}(@name); 'printf' prints values"
        )

    def _skip(self, call: syntax_tree.Call) -> typed_program.Statement:
        if len(call.arguments) != 1:
            raise self._values.wrong(call.span, "'skip' takes the value that the function returns", "write skip(0)")
        if self._result is not None:
            raise self._values.wrong(call.span, "'skip' ends a hit: it cannot be in a function")
        self._values.check_write(call.span)
        value = self._values.value(call.arguments[0])
        return typed_program.Skip(self._values.converted(value, self._values.types.word, call.span), call.span)


def _leaves(statement: typed_program.Statement, *, is_inner: bool = False) -> bool:
    """Return whether a loop has an exit; ``is_inner`` means an inner loop or switch, where ``break`` is no exit."""
    match statement:
        case typed_program.Jump(kind):
            return kind is typed_program.Jumping.BREAK and not is_inner
        case typed_program.Result() | typed_program.End() | typed_program.Skip() | typed_program.Quit():
            return True
        case typed_program.Switch() | typed_program.Loop():
            is_inner = True
    parts = (each for each in statement.children() if isinstance(each, typed_program.Statement))
    return any(_leaves(each, is_inner=is_inner) for each in parts)
