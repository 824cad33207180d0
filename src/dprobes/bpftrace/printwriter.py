"""``printf`` of a script as DProbes C has it: one for each line, without the end of the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpftrace import tree
from dprobes.bpftrace.value import PREFIX, Form
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    import re

    from dprobes.bpftrace.expressionwriter import ExpressionWriter
    from dprobes.source import Span

__all__ = ["PrintWriter"]

_CONVERSION = lazy_pattern(
    r"%(?:(?P<percent>%)|(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>(?:\.\d+)?)"
    r"(?:hh|h|ll|l|z|j|t)?(?P<letter>[a-zA-Z]))"
)
_NUMBERS = "diuxXocp"
_JOINED_MAX = 6
_WIDTH_MAX = 4095
"""The largest width and precision that DProbes C takes."""


def _number(digits: str) -> int:
    """Return a width or precision; one of many digits is a number that is too large."""
    return (
        int(digits[-len(str(_WIDTH_MAX)) :] or 0) if not digits[: -len(str(_WIDTH_MAX))].strip("0") else _WIDTH_MAX + 1
    )


class PrintWriter:
    """Collect what is printed up to the end of a line."""

    def __init__(self, values: ExpressionWriter) -> None:
        self._values = values
        self._format = ""
        self._arguments: list[str] = []
        self._joins = 0

    def add(self, call: tree.Call) -> str | None:
        """Take a ``printf``; return the statement if it ends a line."""
        if not call.arguments or not isinstance(call.arguments[0], tree.String):
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

    def join(self, call: tree.Call) -> list[str]:
        """Return what prints the strings that an array of pointers has, up to a null pointer."""
        array, *separator = call.arguments
        between = separator[0].text if separator and isinstance(separator[0], tree.String) else " "
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
        """Return the statement for what has been collected; None if that is nothing."""
        format_, arguments = self._format.removesuffix("\\n"), self._arguments
        self._format, self._arguments = "", []
        if not format_.strip():
            return None
        return f'printf("{format_}"{"".join(f", {each}" for each in arguments)});'

    def _converted(self, match: re.Match[str], argument: tree.Expression) -> str:
        value = self._values.value(argument)
        letter, layout = match["letter"], f"{match['flags'].translate(_FLAGS)}{match['width']}{match['precision']}"
        text = value.text
        match value.form:
            case Form.LITERAL:
                return text[1:-1].replace("%", "%%").ljust(int(match["width"] or 0) if "-" in match["flags"] else 0)
            case Form.SYMBOL if letter == "s":
                layout, letter = "", "s" if text in ("func", "probe") else "a"
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
        self._arguments.append(text)
        return f"%{layout}{letter}"

    def _as_text(self, argument: tree.Expression, text: str) -> tuple[str, str]:
        """Return how what seems a number is printed as a string: as an array of characters, if it is a field."""
        if isinstance(argument, tree.Variable) and argument.name in self._values.fields:
            return "s", self._values.fields[argument.name]
        if isinstance(argument, tree.Field):
            return "s", f"str({text}, 16)" if text.startswith("args.") else text
        return "d", text  # a name that a table does not keep

    def _misfit(self, span: Span, conversion: str, form: Form) -> str:
        self._values.wrong(span, f"'{conversion}' does not print {form.value}")
        return ""


_FLAGS = str.maketrans("", "", "+ #")
