"""Keyed tables with types: what is kept in each and under which keys, as its first use says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.dpc.syntax import tree
from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.types.ctype import Enumeration, Integer, Pointer
from dprobes.lazydataclass import dataclass
from dprobes.rpn.tables import STRING_SIZE_MAX, UNNAMED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.typed import Argument, Value
    from dprobes.dpc.typers.typerinterface import ExpressionTyper, TextTyper
    from dprobes.source import Span

__all__ = ["KINDS", "KeyedTable", "TableTyper", "Tables"]

KINDS = {"count": 0, "sum": 1, "min": 1, "max": 1, "avg": 1, "stats": 1, "hist": 1, "lhist": 4, "last": 1}
"""What a table may keep, and how many arguments that takes."""

_KEYS_MAX = 8
_KEY_STRING = 64
_SUMS = {"+": 1, "-": -1}


@dataclass(frozen=True, slots=True)
class KeyedTable:
    """A table: its name in RPN, what it keeps, and its keys, as the statement ``table =`` says them."""

    name: str
    kind: str
    keys: tuple[str, ...]
    unit: str
    span: Span

    @property
    def statement(self) -> str:
        """The statement of the file header."""
        parts = [self.name, self.kind, *self.keys, *((f"unit = {self.unit}",) if self.unit else ())]
        return f"table = {', '.join(parts)}"


class Tables:
    """The tables of a program."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._tables: dict[str, KeyedTable] = {}
        self.named: list[tuple[str, Span]] = []
        """The tables that are printed or cleared."""

    def __iter__(self) -> Iterator[KeyedTable]:
        return iter(self._tables.values())

    def find(self, name: str) -> KeyedTable | None:
        """Return the table of a name, if it was used already."""
        return self._tables.get(name or UNNAMED)

    def check(self) -> None:
        """Report the tables that are printed or cleared, and into which nothing is put."""
        for name, span in self.named:
            if self.find(name) is None:
                self._diagnostics.error(span, f"nothing is put into '@{name}'")

    def used(self, name: str, kind: str, keys: tuple[str, ...], unit: str, span: Span) -> KeyedTable:
        """Return the table of a name, made by its first use; report a use that does not fit that."""
        if name.startswith("__"):
            self._diagnostics.error(span, f"'@{name}' is no name for a table: '__' begins those of dprobes")
        table = KeyedTable(name or UNNAMED, kind, keys, unit, span)
        known = self._tables.setdefault(table.name, table)
        if (known.kind, known.keys) != (table.kind, table.keys):
            first = Note(f"here it is '{known.kind}' by {_shown(known.keys)}", known.span)
            self._diagnostics.error(span, f"'@{name}' is '{kind}' by {_shown(keys)} here", notes=(first,))
        return known


def _shown(keys: tuple[str, ...]) -> str:
    return ", ".join(keys) or "no key"


class TableTyper:
    """Type the uses of tables; ``values`` types numbers, ``strings`` strings and stacks."""

    def __init__(self, values: ExpressionTyper, strings: TextTyper, tables: Tables) -> None:
        self._values = values
        self._strings = strings
        self._tables = tables

    def assignment(self, target: tree.TableAccess, operator: str, value: tree.Expression) -> typedstatement.Tally:
        """Return what ``@name[keys] = value`` does: ``value`` may be what is to be kept, ``hist(x)``."""
        kinds, keys = self._keys(target)
        kind, number, unit = self._kept(operator, value)
        table = self._tables.used(target.name, kind, kinds, unit, target.span)
        return typedstatement.Tally(table.name, keys, number, target.span)

    def step(self, target: tree.TableAccess, amount: int) -> typedstatement.Tally:
        """Return what ``@name[keys]++`` does."""
        kinds, keys = self._keys(target)
        known = self._tables.find(target.name)
        kind = "count" if amount == 1 and (known is None or known.kind == "count") else "sum"
        table = self._tables.used(target.name, kind, kinds, "", target.span)
        number = None if kind == "count" else typed.Constant(amount, self._values.types.long)
        return typedstatement.Tally(table.name, keys, number, target.span)

    def whole(self, access: tree.TableAccess) -> str:
        """Return the name of a table that is meant as a whole; what it keeps may be written below."""
        self._tables.named.append((access.name, access.span))
        return access.name or UNNAMED

    def removal(self, target: tree.TableAccess) -> typedstatement.Untally:
        """Return what ``delete(@name[keys])`` does."""
        kinds, keys = self._keys(target)
        self._check(target, kinds)
        return typedstatement.Untally(target.name or UNNAMED, keys, target.span)

    def value(self, access: tree.TableAccess) -> typed.TableValue:
        """Return what a table has under its keys."""
        kinds, keys = self._keys(access)
        self._check(access, kinds)
        return typed.TableValue(access.name or UNNAMED, keys, self._values.types.long)

    def _check(self, access: tree.TableAccess, kinds: tuple[str, ...]) -> None:
        known = self._tables.find(access.name)
        if known is None:
            raise self._values.wrong(access.span, f"nothing was put into '@{access.name}' above")
        self._tables.used(access.name, known.kind, kinds, "", access.span)

    def _kept(self, operator: str, value: tree.Expression) -> tuple[str, Value | None, str]:
        """Return what is kept, the value that is taken in, and its unit."""
        if operator in _SUMS:
            number = self._number(value)
            return "sum", number if operator == "+" else self._values.operators.unary("-", number, value.span), ""
        if operator:
            raise self._values.wrong(
                value.span, f"'{operator}=' is nothing that a table does", "write '=', '+=' or '-='"
            )
        if not isinstance(value, tree.Call) or value.function not in KINDS:
            return "last", self._number(value), ""
        count = KINDS[value.function]
        if len(value.arguments) != count:
            raise self._values.wrong(
                value.span, f"'{value.function}' takes {count} argument{'' if count == 1 else 's'}"
            )
        if not count:
            return "count", None, ""
        number = self._number(value.arguments[0])
        unit = "ns" if isinstance(value.arguments[0], tree.Name) and value.arguments[0].name == "elapsed" else ""
        if value.function != "lhist":
            return value.function, number, unit
        bounds = [self._values.constant(argument) for argument in value.arguments[1:]]
        return f"lhist({', '.join(str(bound or 0) for bound in bounds)})", number, unit

    def _number(self, expression: tree.Expression) -> Value:
        value = self._values.value(expression)
        value = self._values.operators.one_cell(value, expression.span, "a value in a table")
        return self._values.converted(value, self._values.types.long, expression.span)

    def _keys(self, access: tree.TableAccess) -> tuple[tuple[str, ...], tuple[Argument, ...]]:
        if len(access.keys) > _KEYS_MAX:
            raise self._values.wrong(access.span, f"a table has at most {_KEYS_MAX} keys")
        found = [self._key(key) for key in access.keys]
        return tuple(kind for kind, _ in found), tuple(value for _, value in found)

    def _key(self, key: tree.Expression) -> tuple[str, Argument]:
        text = self._strings.text(key, limit=_KEY_STRING)
        match text:
            case typed.CommName():
                return "comm", text
            case typed.Text(_, limit):
                if limit > STRING_SIZE_MAX:
                    message = f"a string that is a key has at most {STRING_SIZE_MAX} bytes, not {limit}"
                    raise self._values.wrong(key.span, message)
                return f"str[{limit}]", text
            case typed.StackTrace(is_kernel, frames):
                return f"{'k' if is_kernel else 'u'}stack" + ("" if frames is None else f"[{frames}]"), text
            case typed.Register():
                return "address", text
            case typed.Bytes():
                raise self._values.wrong(key.span, "bytes are no key", "use str(p, n)")
        value = self._values.operators.one_cell(self._values.value(key), key.span, "a key")
        match value.type:
            case Pointer():
                return "address", value
            case Integer() | Enumeration():
                is_code = isinstance(value, typed.Register) and value.name == "pc"
                is_address = is_code or (isinstance(key, tree.Call) and key.function == "sym")
                return "address" if is_address else "word", value
        raise self._values.wrong(key.span, f"'{value.type}' is no key")
