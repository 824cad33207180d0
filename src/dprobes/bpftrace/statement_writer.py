"""Statements of a script in DProbes C. A statement without an equivalent is reported and left out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.bpftrace import script_tree
from dprobes.bpftrace.expression_writer import AGGREGATIONS, PREFIX, Form, Kept, expressions_in, statements_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.bpftrace.expression_writer import ExpressionWriter, MapUses
    from dprobes.source_text import Span

__all__ = ["StatementWriter", "asked_variable"]

_CONVERSION = re.compile(
    r"%(?:(?P<percent>%)|(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>(?:\.\d+)?)"
    r"(?P<length>hh|h|ll|l|z|j|t)?(?P<letter>[a-zA-Z]))"
)
_NUMBERS = "diuxXocp"
_JOINED_MAX = 6
_WIDTH_MAX = 4095
"""Maximum width and precision in DProbes C."""


def _number(digits: str) -> int:
    """Return a conversion's width or precision, 0 without digits, ``_WIDTH_MAX`` + 1 for too many digits."""
    return (
        int(digits[-len(str(_WIDTH_MAX)) :] or 0) if not digits[: -len(str(_WIDTH_MAX))].strip("0") else _WIDTH_MAX + 1
    )


class PrintWriter:
    """A collector of ``printf`` output up to a newline, because a ``printf`` in DProbes C prints a whole line."""

    def __init__(self, values: ExpressionWriter) -> None:
        self._values = values
        self._format = ""
        self._arguments: list[str] = []
        self._joins = 0

    def add(self, call: script_tree.Call) -> str | None:
        """Collect the output of a ``printf``; if it ends with a newline, return the statement for it, else None."""
        if not call.arguments or not isinstance(call.arguments[0], script_tree.String):
            self._values.wrong(call.span, "'printf' needs a format in quotes")
            return None
        format_, arguments = call.arguments[0], list(call.arguments[1:])
        position = 0
        for match in _CONVERSION.finditer(format_.text):
            self._format += format_.text[position : match.start()]
            position = match.end()
            if match["percent"]:
                self._format += "%%"
            elif max(_number(match["width"]), _number(match["precision"][1:])) > _WIDTH_MAX:
                message = f"a width or precision is at most {_WIDTH_MAX}: '{match.group()}'"
                self._values.wrong(call.span, message)
                return None
            elif arguments:
                self._format += self._converted(match, arguments.pop(0))
            else:
                self._values.wrong(call.span, f"there is no value for '{match.group()}'")
        self._format += format_.text[position:]
        if arguments:
            self._values.wrong(arguments[0].span, "the format has no conversion for this value")
        return self.flush() if self._format.endswith("\\n") else None

    def join(self, call: script_tree.Call) -> list[str]:
        """Return the statements for ``join(array)``: a ``printf`` for each possible number of strings in the array."""
        array, *separator = call.arguments
        between = separator[0].text if separator and isinstance(separator[0], script_tree.String) else " "
        self._values.note(call.span, f"'join' prints at most {_JOINED_MAX} strings")
        self._joins += 1
        words = f"words{self._joins}"
        lines = [f"char **{words} = (char **){self._values.number(array, PREFIX)};"]
        format_, arguments = self._format.replace("\\n", " "), self._arguments
        self._format, self._arguments = "", []
        for count in range(1, _JOINED_MAX + 1):
            whole = format_ + between.join(["%s"] * count)
            values = ", ".join([*arguments, *(f"{words}[{number}]" for number in range(count))])
            test = f"if (!{words}[{count}]) " if count < _JOINED_MAX else ""
            lines.append(f'{"else " if count > 1 else ""}{test}printf("{whole}", {values});')
        return lines

    def flush(self) -> str | None:
        """Return a ``printf`` of the output collected so far, and forget that, or None if it is empty or blank."""
        format_, arguments = self._format.removesuffix("\\n"), self._arguments
        self._format, self._arguments = "", []
        if not format_.strip():
            return None
        return f'printf("{format_}"{"".join(f", {each}" for each in arguments)});'

    def rest(self) -> list[str]:
        """Return the statement of ``flush`` in a list, which is empty if there is none."""
        return [line] if (line := self.flush()) is not None else []

    def _converted(self, match: re.Match[str], argument: script_tree.Expression) -> str:
        value = self._values.value(argument)
        letter, layout = match["letter"], f"{match['flags'].translate(_FLAGS)}{match['width']}{match['precision']}"
        text = value.text
        match value.form:
            case Form.LITERAL:
                return text[1:-1].replace("%", "%%").ljust(int(match["width"] or 0) if "-" in match["flags"] else 0)
            case Form.SYMBOL if letter == "s":
                layout, letter = layout.partition(".")[0], "s" if text in ("func", "probe") else "a"
            case Form.SYMBOL:
                text = self._values.number(argument)
            case Form.STACK:
                layout, letter = "", "k"
            case Form.BYTES:
                letter = "s"
            case Form.NETWORK if letter == "s":
                layout = layout.partition(".")[0]
            case Form.NETWORK:
                return self._misfit(argument.span, match.group(), value.form)
            case Form.TEXT if letter != "s":
                return self._misfit(argument.span, match.group(), value.form)
            case Form.NUMBER if letter == "s":
                letter, text = self._as_text(argument, text)
            case Form.NUMBER if letter not in _NUMBERS:
                return self._misfit(argument.span, match.group(), value.form)
            case Form.NUMBER if match["length"] in ("h", "hh"):  # other lengths are those of the value's type
                layout += match["length"]
        self._arguments.append(text)
        return f"%{layout}{letter}"

    def _as_text(self, argument: script_tree.Expression, text: str) -> tuple[str, str]:
        """
        Return the conversion letter and the expression by which ``%s`` prints an argument.

        ``text`` is the argument as a number. A field is a character array; any other number is printed in decimal.
        """
        if isinstance(argument, script_tree.Variable) and argument.name in self._values.fields:
            return "s", self._values.fields[argument.name]
        if isinstance(argument, script_tree.Field):
            return "s", f"str({text}, 16)" if text.startswith("args.") else text
        return "d", text  # a name that a table does not keep

    def _misfit(self, span: Span, conversion: str, form: Form) -> str:
        self._values.wrong(span, f"'{conversion}' does not print {form.value}")
        return ""


_FLAGS = str.maketrans("", "", "+ #")

_ABSENT = {
    "clear": ("a table is cleared as a whole", None),
    "zero": ("a table is cleared as a whole", None),
    "system": ("no commands are run", None),
    "cat": ("the path of a file is written as it is", None),
    "signal": ("a hit cannot send signals", "hand the process to a debugger with debugger()"),
}
_ASKED = ("exit", "clear", "zero", "print", "cat")
"""Actions that a hit can only request from the tool."""

_UNROLLED_MAX = 20
_WAYS_MAX = 16
"""Maximum number of copies of the statements after an ``if``."""


def _assigned(statements: Iterable[script_tree.Statement]) -> Iterator[tuple[str, script_tree.Expression]]:
    """Iterate over the variables that the statements assign, each with its value, without inner blocks."""
    for each in statements:
        if isinstance(each, script_tree.Assignment) and isinstance(each.target, script_tree.Variable):
            yield each.target.name, each.value


class StatementWriter:
    """
    A writer of the statements of a block in DProbes C.

    ``asked`` collects the statements that a handler cannot execute and that an ``every`` block executes for it. With
    ``in_tool``, the block itself is one that the tool executes.
    """

    def __init__(
        self, values: ExpressionWriter, maps: MapUses, asked: list[str] | None = None, *, in_tool: bool = False
    ) -> None:
        self._asked = [] if asked is None else asked
        self._values = values
        self._maps = maps
        self._declared: set[str] = set()
        self._pointers: frozenset[str] = frozenset()
        """The variables that are used as pointers."""
        self._in_tool = in_tool
        self._loops = 0
        self._ways = 1

    def block(self, body: Sequence[script_tree.Statement]) -> list[str]:
        """Return the lines of a block; a variable that an inner block assigns first is declared before it."""
        outer = {name for name, _ in _assigned(body)}
        inner: list[str] = []
        for name, value in _assigned(statements_of(body)):
            if name not in outer and name not in inner and self._is_number(value):
                inner.append(name)
        first = self._first_uses(body, outer)
        self._pointers = frozenset(_pointers_in(body))
        hoisted = [*inner, *sorted(outer - first)]
        self._declared |= {name for name in hoisted if name not in self._values.variables}
        types = self._types_of_pointers(body)
        lines = [f"{types.get(name, 'long ')}{self._values.variable_name(name)} = 0;" for name in hoisted]
        return [*lines, *self._statements(body)]

    @staticmethod
    def _types_of_pointers(body: Sequence[script_tree.Statement]) -> dict[str, str]:
        """Return the C types of the variables to which a cast to a pointer to a structure is assigned, by variable."""
        found: dict[str, str] = {}
        for statement in statements_of(body):
            match statement:
                case script_tree.Assignment(script_tree.Variable(name), "", script_tree.Cast(type_)) if "*" in type_:
                    words = type_.replace("*", " ").split()
                    if words[0] in ("struct", "union"):
                        found.setdefault(name, f"{' '.join(words)} {'*' * type_.count('*')}")
        return found

    def _first_uses(self, body: Sequence[script_tree.Statement], outer: set[str]) -> set[str]:
        """Return those variables of ``outer`` that the block itself assigns before any of its inner blocks does."""
        first: set[str] = set()
        nested: set[str] = set()
        for statement in body:
            own = {name for name, _ in _assigned([statement])}
            first |= own - nested
            if not own:
                nested |= {name for name, _ in _assigned(statements_of([statement]))}
        return first & outer

    def _is_number(self, value: script_tree.Expression) -> bool:
        match value:
            case script_tree.String() | script_tree.Name("comm" | "func" | "probe" | "kstack" | "ustack"):
                return False
            case script_tree.Call("str" | "buf" | "ksym" | "usym" | "kstack" | "ustack" | "ntop"):
                return False
            case script_tree.Map(name):
                return self._maps.kept.get(name) not in (Kept.TEXT, Kept.NAMES, Kept.STACK, Kept.USER_STACK)
            case script_tree.Variable(name):
                return name not in self._values.variables
        return True

    def _statements(self, body: Sequence[script_tree.Statement]) -> list[str]:
        lines: list[str] = []
        printed = PrintWriter(self._values)
        for number, statement in enumerate(body):
            match statement:
                case script_tree.If(condition, then, otherwise) if body[number + 1 :] and self._chooses_strings(
                    statement
                ):
                    return [*lines, *printed.rest(), *self._both_ways(condition, then, otherwise, body[number + 1 :])]
                case script_tree.Do(script_tree.Call("printf") as call):
                    line = printed.add(call)
                    if line is not None:
                        lines.append(line)
                    continue
                case script_tree.Do(script_tree.Call("join", arguments) as call) if arguments:
                    lines += printed.join(call)
                    continue
                case script_tree.Do(script_tree.Call("time")):
                    self._values.note(statement.span, "'time' is left out: the lines of records begin with the time")
                    continue
            lines += [*printed.rest(), *self._statement(statement)]
        return [*lines, *printed.rest()]

    def _statement(self, statement: script_tree.Statement) -> Iterator[str]:
        values = self._values
        match statement:
            case script_tree.Assignment(script_tree.Variable() as target, operator, value):
                yield from self._variable(target, operator, value)
            case script_tree.Assignment(script_tree.Map() as target, operator, value):
                yield from self._map(target, operator, value)
            case script_tree.Do(script_tree.Call() as call):
                yield from self._call(call)
            case script_tree.Do(script_tree.Step(operator, script_tree.Map() as target)):
                yield f"{values.table(target)}{operator};" if operator == "++" else f"{values.table(target)} -= 1;"
            case script_tree.Do(script_tree.Step(operator, script_tree.Variable(name))):
                yield f"{values.variable_name(name)}{operator};"
            case script_tree.Do(expression):
                values.wrong(expression.span, "this expression does nothing")
            case script_tree.If(condition, then, otherwise):
                yield f"if ({values.number(condition)}) {{"
                yield from self._indented(then)
                if otherwise:
                    yield "} else {"
                    yield from self._indented(otherwise)
                yield "}"
            case script_tree.While(condition, body):
                yield f"while ({values.number(condition)}) {{"
                yield from self._indented(body)
                yield "}"
            case script_tree.Unroll(script_tree.Number(count), body) if 1 <= count <= _UNROLLED_MAX and _prints(body):
                for _ in range(count):
                    yield from self._statements(body)
            case script_tree.Unroll(count, body):
                self._loops += 1
                turn = f"turn{self._loops}"
                yield f"for (int {turn} = 0; {turn} < {values.number(count, 10)}; {turn}++) {{"
                yield from self._indented(body)
                yield "}"
            case script_tree.Jump(word):
                yield f"{word};"

    def _chooses_strings(self, statement: script_tree.If) -> bool:
        """Return whether an ``if`` assigns a string, a symbol or another value that is not a number to a variable."""
        return any(not self._is_number(value) for _, value in _assigned(statements_of([statement])))

    def _both_ways(
        self,
        condition: script_tree.Expression,
        then: Sequence[script_tree.Statement],
        otherwise: Sequence[script_tree.Statement],
        rest: Sequence[script_tree.Statement],
    ) -> list[str]:
        """
        Return an ``if`` whose two branches both end with ``rest``, the statements after it in the script.

        A variable that is assigned a different string in each branch is replaced by that string, because DProbes C has
        no variables for strings. Report an error if ``rest`` would be copied more than ``_WAYS_MAX`` times.
        """
        lines = [f"if ({self._values.number(condition)}) {{"]
        self._ways *= 2
        if self._ways > _WAYS_MAX:
            self._values.wrong(
                condition.span, "strings depend on too many conditions", "print them where they are known"
            )
            return []
        state = dict(self._values.variables), set(self._declared)
        for branch in (then, otherwise):
            self._values.variables, self._declared = dict(state[0]), set(state[1])
            lines += [f"    {line}" for line in self._statements([*branch, *rest])]
            if branch is then:
                lines.append("} else {")
        self._ways //= 2
        return [*lines, "}"]

    def _indented(self, body: Sequence[script_tree.Statement]) -> list[str]:
        return [f"    {line}" for line in self._statements(body)]

    def _variable(self, target: script_tree.Variable, operator: str, value: script_tree.Expression) -> Iterator[str]:
        values = self._values
        found = values.value(value)
        if found.form is not Form.NUMBER:
            if operator or target.name in self._declared:
                hint = "use another variable for each"
                values.wrong(target.span, f"'${target.name}' is {found.form.value}, and something else elsewhere", hint)
            values.variables[target.name] = found
            return
        name = values.variable_name(target.name)
        if isinstance(value, script_tree.Field) and not operator:
            values.fields[target.name] = found.text
        if target.name in self._pointers and not found.type and not operator and target.name not in self._declared:
            values.variables[target.name] = found  # only the compiler knows its type
        elif target.name in values.variables:
            values.wrong(target.span, f"'${target.name}' is a string or symbol, and something else elsewhere")
        elif target.name in self._declared or operator:
            yield f"{name} {operator}= {found.text};"
        else:
            self._declared.add(target.name)
            type_ = found.type or "long "
            yield f"{type_}{name} = {found.text};"

    def _map(self, target: script_tree.Map, operator: str, value: script_tree.Expression) -> Iterator[str]:
        values = self._values
        table = values.table(target)
        if operator not in ("", "+", "-"):
            values.wrong(target.span, f"a table has no '{operator}='", "write '=', '+=' or '-='")
        match value:
            case script_tree.Call(function, arguments) if function in AGGREGATIONS and not operator:
                if len(arguments) != AGGREGATIONS[function]:
                    values.wrong(value.span, f"'{function}' takes {AGGREGATIONS[function]} values in DProbes C")
                    return
                yield f"{table} = {function}({', '.join(values.number(each) for each in arguments)});"
                return
        match self._maps.kept[target.name]:
            case Kept.NUMBER | Kept.SYMBOL:
                yield f"{table} {operator}= {values.number(value)};"
            case Kept.TEXT | Kept.NAMES | Kept.STACK | Kept.USER_STACK if not operator:
                yield f"{table} = {self._kept(value)};"
            case kept:
                values.wrong(value.span, f"a table keeps numbers, strings and call stacks, not {kept.value}")

    def _kept(self, value: script_tree.Expression) -> str:
        """Return the DProbes C expression of a string or call stack that a table stores; report other values."""
        found = self._values.value(value)
        if found.form is Form.NUMBER:  # an array of characters
            return f"str({found.text})"
        if found.form not in (Form.TEXT, Form.LITERAL, Form.STACK):
            self._values.wrong(value.span, f"a table does not keep {found.form.value}")
        return found.text

    def _call(self, call: script_tree.Call) -> Iterator[str]:
        values = self._values
        match call.function, call.arguments:
            case "delete", [script_tree.Map() as map_]:
                yield f"delete({values.table(map_)});"
            case "delete", [script_tree.Map(name, ()) as map_, *keys]:
                yield f"delete({values.table(script_tree.Map(name, tuple(keys), map_.span))});"
            case "override", [value]:
                number = values.number(value)
                values.options.append("--allow-write")
                yield f"skip({number});"
            case "print", [value] if not isinstance(value, script_tree.Map):
                yield from filter(None, [PrintWriter(values).add(_printed(value, values.value(value).form, call))])
            case name, arguments if name in _ASKED and not self._in_tool and _is_for_tool(name, arguments):
                yield self._ask(call)
            case "exit", _ if self._in_tool:
                yield "exit();"
            case "cat", [script_tree.String(path)] if self._in_tool:
                yield f'cat("{path}");'
            case "clear" | "zero", [script_tree.Map(_, ()) as map_] if self._in_tool:
                yield f"clear({values.table(map_)});"
            case "print", [script_tree.Map(_, ()) as map_, *rows] if self._in_tool:
                yield f"print({', '.join([values.table(map_), *(values.number(each) for each in rows[:1])])});"
            case "print", _:
                values.wrong(call.span, "a table is printed as a whole")
            case name, _ if name in _ABSENT:
                message, hint = _ABSENT[name]
                values.wrong(call.span, message, hint)
            case _:
                values.value(call)  # it reports the error

    def _ask(self, call: script_tree.Call) -> str:
        """
        Return a statement that sets a variable, so that an ``every`` block executes the call.

        Calls such as ``exit()`` are possible only in blocks of the tool.
        """
        (text,) = StatementWriter(self._values, self._maps, in_tool=True).block([script_tree.Do(call, call.span)])
        if text not in self._asked:
            self._asked.append(text)
        self._values.note(call.span, f"'{call.function}' is done by the tool, up to 100 ms after the hit")
        return f"{asked_variable(self._asked.index(text))} = 1;"


def asked_variable(number: int) -> str:
    """Return the name of the program variable that a hit sets to have statement ``number`` executed by the tool."""
    return f"asked_of_tool{number + 1}"


def _is_for_tool(name: str, arguments: Sequence[script_tree.Expression]) -> bool:
    match name, arguments:
        case "exit", _:
            return True
        case "cat", [script_tree.String()]:
            return True
        case "clear" | "zero", [script_tree.Map(_, ())]:
            return True
        case "print", [script_tree.Map(_, ()), *_]:
            return True
    return False


def _printed(value: script_tree.Expression, form: Form, call: script_tree.Call) -> script_tree.Call:
    """Return a call of ``printf`` that prints a value and a newline: a number by ``%d``, other forms by ``%s``."""
    letter = "d" if form is Form.NUMBER else "s"
    return script_tree.Call("printf", (script_tree.String(f"%{letter}\\n", call.span), value), call.span)


def _prints(body: Sequence[script_tree.Statement]) -> bool:
    return any(isinstance(each, script_tree.Do) and _is_print(each.expression) for each in statements_of(body))


def _is_print(expression: script_tree.Expression) -> bool:
    return isinstance(expression, script_tree.Call) and expression.function == "printf"


def _pointers_in(body: Sequence[script_tree.Statement]) -> Iterator[str]:
    """Iterate over the variables that are used as pointers, by ``->``, in any expression of a block."""
    for expression in expressions_in(body):
        match expression:
            case script_tree.Field(script_tree.Variable(name), _, True):
                yield name
