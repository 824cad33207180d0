"""Typing of keyed tables: the kinds of their values and key fields, which the first use of a table decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import is_of_system
from dprobes.diagnostics import Note, did_you_mean
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typers.provided_names import CALL_FORMS, KINDS
from dprobes.dpc.typers.table_uses import TEXT, VALUE
from dprobes.dpc.types.c_types import (
    CHAR,
    LONG_LONG,
    UNSIGNED,
    Array,
    Enumeration,
    Integer,
    Pointer,
    Record,
    Stack,
    String,
    size_of,
)
from dprobes.dpc.types.print_formats import is_text
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE
from dprobes.rpn.keyed_tables import STRING_SIZE, STRING_SIZE_MAX, UNNAMED, Key, KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.typed_values import Argument, Value
    from dprobes.dpc.typers.operator_typer import ExpressionTyper, TextTyper
    from dprobes.source_text import Span

__all__ = ["TableTyper", "Tables"]

SIGNED, _UNSIGNED = "signed", "word"
"""Kinds of a one-word key field, signed and unsigned."""


def word_kind(type_: Integer | Enumeration, known: str) -> str:
    """Return the kind of a one-word key field: the kind of the table's first use, or else by the sign of its type."""
    if known in (_UNSIGNED, SIGNED):
        return known
    return SIGNED if (type_.base if isinstance(type_, Enumeration) else type_).is_signed else _UNSIGNED


LONG, SIGNED_LONG = "long", "slong"
"""Kinds of 64-bit key fields in 32-bit programs, and of values, which are always signed."""

_WIDE = (LONG, SIGNED_LONG)

_KEYS_MAX = 8
_WORDS = {
    LONG: "64 bits",
    SIGNED_LONG: "64 bits",
    SIGNED: "word",
    **dict.fromkeys(("text", "cuttext"), "a text in quotes or kept string"),
    **dict.fromkeys(("frames", "uframes"), "a kept call stack"),
}
_STACK_HINT = "write print(@name)"
_TEXT_HINT = "a table has either strings in quotes or str(p) and comm in one place: use two tables"
_KEPT_STACK_HINT = "keep the other call stack in a table as well, and have that for the key: @s[tid] = ustack()"
_MIXED = (
    *((frozenset((text, other)), _TEXT_HINT) for text in ("text", "cuttext") for other in ("str", "cutstr", "comm")),
    (frozenset(("ustack", "uframes")), _KEPT_STACK_HINT),
    (frozenset(("kstack", "frames")), _KEPT_STACK_HINT.replace("ustack", "kstack")),
)
"""Pairs of kinds of strings and call stacks that cannot share a place of a table, with hints."""

_SUMS = {"+": 1, "-": -1}


class KeyedTable(NamedTuple):
    """
    Table: its name in RPN, the kind of its values, and its key fields, as in the statement ``table =``.

    ``value`` is the kind of value unless it is a word: a 64-bit number, a string, a call stack.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    unit: str
    value: str
    span: Span

    @property
    def statement(self) -> str:
        """The statement of the file header."""
        options = [f"{name} = {text}" for name, text in (("unit", self.unit), ("value", self.value)) if text]
        return f"table = {', '.join((self.name, self.kind, *self.keys, *options))}"

    @property
    def contents(self) -> str:
        """The description of values and keys in messages."""
        kept = f" of {_word(self.value)}" if self.value else ""
        return f"'{self.kind}'{kept} by {', '.join(map(_word, self.keys)) or 'no key'}"

    @property
    def kept(self) -> Key | None:
        """The string or call stack that the table keeps; None for numbers."""
        return Key.parsed(self.value) if self.value and self.value != LONG else None


class Tables:
    """
    The tables of a program.

    ``written`` returns the kinds of values of tables that are read before they are written, ``steps`` the kinds of
    tables that ``++``, ``--``, ``+=`` or ``-=`` changes. ``quoted`` returns the sizes in bytes of string literals, by
    the table's name and the position of the key field (or VALUE). ``durations`` returns the variables, and the tables
    as ``@NAME``, whose values are all nanoseconds. ``string_limit`` is the limit of ``str(p)`` in bytes.
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        written: Callable[[], Mapping[str, str]],
        steps: Callable[[], Mapping[str, str]],
        quoted: Callable[[], Mapping[tuple[str, int], int]],
        durations: Callable[[], frozenset[str]],
        string_limit: int,
    ) -> None:
        self.string_limit = string_limit
        self._diagnostics = diagnostics
        self._written = written
        self._steps = steps
        self._quoted = quoted
        self._durations = durations
        self._tables: dict[str, KeyedTable] = {}
        self.named: list[tuple[str, Span]] = []
        """Names of the tables that are printed or cleared, with their places in the source."""

    def __iter__(self) -> Iterator[KeyedTable]:
        return iter(self._tables.values())

    def find(self, name: str) -> KeyedTable | None:
        """Return the table ``@name``, which its first use defines, or None if no use has been reached yet."""
        return self._tables.get(name or UNNAMED)

    def written(self, name: str) -> Kept | None:
        """Return the kind of value that a later statement stores in a table, or None if it is not known."""
        kind = self._written().get(name)
        if kind == TEXT:
            size = self.text_size(name, VALUE)
            return Kept("last", value=f"cutstr[{self.string_limit + 1}]" if size is None else self.text_kind(size))
        return None if kind is None else Kept(kind)

    def stepped(self, name: str) -> str:
        """Return the kind of a table that ``++``, ``--``, ``+=`` or ``-=`` changes: ``count``, ``sum`` or ``last``."""
        return self._steps().get(name, "sum")

    def text_kind(self, size: int) -> str:
        """Return the kind of a key field or value with room for literals of ``size`` bytes, and for other strings."""
        return f"cuttext[{size}]" if size > self.string_limit else f"text[{size}]"

    def written_key(self, name: str) -> Key | None:
        """Return the kind of string that a later statement stores in a table, or None for numbers, or if unknown."""
        written = self.written(name)
        return Key.parsed(written.value) if written is not None and written.value else None

    def text_size(self, name: str, position: int) -> int | None:
        """
        Return the room in bytes for strings in a key field, by its position, or in the value (VALUE) of a table.

        Return None if no handler stores a string literal there.
        """
        return self._quoted().get((name, position))

    def check(self) -> None:
        """Report each table that the program prints or clears, but to which no statement of it assigns."""
        for name, span in self.named:
            if self.find(name) is None:
                near = did_you_mean(f"@{name}", [f"@{each}" for each in self._tables])
                hint = near or "assign it in a probe: @name[keys] = count()"
                self._diagnostics.error(span, f"'@{name}' is never assigned", hint=hint)

    def used(self, name: str, kept: Kept, keys: tuple[str, ...], span: Span) -> KeyedTable:
        """
        Return the table ``name``, which its first use creates.

        Report a use whose values or keys do not match the first. ``kept`` describes the values and ``keys`` the kinds
        of the key fields of this use, which is at ``span``.
        """
        if name.startswith("__"):
            self._diagnostics.error(span, f"'@{name}' is not a name for a table: '__' begins those of dprobes")
        unit = "ns" if kept.kind != "count" and f"@{name}" in self._durations() else ""
        table = KeyedTable(name or UNNAMED, kept.kind, keys, unit, kept.value, span)
        known = self._tables.setdefault(table.name, table)
        if (known.kind, known.keys, known.value) != (table.kind, table.keys, table.value):
            first = Note(f"here it is {known.contents}", known.span)
            is_wider, was_wide = (not {each.value, *each.keys}.isdisjoint(_WIDE) for each in (table, known))
            hint = "convert what is wider: (long)x" if is_wider and not was_wide else None
            hint = hint or _hint_about(known, table)
            self._diagnostics.error(span, f"'@{name}' is {table.contents} here", notes=(first,), hint=hint)
        return known


def _hint_about(one: KeyedTable, other: KeyedTable) -> str | None:
    """Return a hint for uses of a table with different kinds of strings or stacks in one place; None for others."""
    if len(one.keys) != len(other.keys):
        return None
    for place in zip((one.value, *one.keys), (other.value, *other.keys), strict=True):
        kinds = {each.partition("[")[0] for each in place}
        if (hint := next((hint for mixed, hint in _MIXED if kinds == mixed), None)) is not None:
            return hint
    return None


def _with_room(
    text: typed_values.Literal | typed_values.TextChoice, size: int
) -> typed_values.Literal | typed_values.TextChoice:
    """Return a string literal, or a choice between string literals, with the size in bytes of its place."""
    if isinstance(text, typed_values.Literal):
        return text.replaced(limit=size, type=String(size))
    return text.replaced(yes=_with_room(text.yes, size), no=_with_room(text.no, size), type=String(size))


class Kept(NamedTuple):
    """Kind of values that one use of a table stores, and their type if they are not words, as in ``KeyedTable``."""

    kind: str
    value: str = ""


def _word(key: str) -> str:
    kind, _, size = key.removesuffix("]").partition("[")
    if kind == KeyKind.CUT_STRING.value:
        return f"{KeyKind.STRING.value}[{int(size or STRING_SIZE) - 1}]"
    return _WORDS.get(key) or _WORDS.get(kind, key)


class TableTyper:
    """A typer of uses of tables; ``values`` types numbers, ``strings`` strings and stacks."""

    def __init__(self, values: ExpressionTyper, strings: TextTyper, tables: Tables, *, is_tool: bool) -> None:
        self._values = values
        self._strings = strings
        self._tables = tables
        self._is_tool = is_tool

    def assignment(
        self, target: syntax_tree.TableAccess, operator: str, value: syntax_tree.Expression
    ) -> typed_program.Tally | typed_program.Addition:
        """
        Return the statement ``@name[keys] = value``. ``operator`` is the operator before ``=``, or empty.

        ``value`` may be a call of an aggregation such as ``hist(x)``.
        """
        kinds, keys = self._keys(target)
        if operator in _SUMS:
            number, kind = self._number(value, self._tables.find(target.name))
            number = number if operator == "+" else self._values.operators.unary("-", number, value.span)
            kept = Kept(self._tables.stepped(target.name), kind)
            return self._sum(self._used(target, kept, kinds), keys, number, target)
        if operator:
            raise self._values.wrong(
                value.span, f"'{operator}=' is not an operator of tables", "write '=', '+=' or '-='"
            )
        kept, taken = self._kept(value, target.name)
        return typed_program.Tally(self._used(target, kept, kinds).name, keys, taken, target.span)

    def _used(self, target: syntax_tree.TableAccess, kept: Kept, kinds: tuple[str, ...]) -> KeyedTable:
        """Return the table in which a statement keeps a value under keys; report keys without a place for the value."""
        if kept.value and len(kinds) == _KEYS_MAX:
            raise self._values.wrong(target.span, f"a table that keeps no words has at most {_KEYS_MAX - 1} keys")
        return self._tables.used(target.name, kept, kinds, target.span)

    def step(self, target: syntax_tree.TableAccess, amount: int) -> typed_program.Tally | typed_program.Addition:
        """Return the statement ``@name[keys]++`` or, for a negative ``amount``, ``@name[keys]--``."""
        kinds, keys = self._keys(target)
        known, kind = self._tables.find(target.name), self._tables.stepped(target.name)
        value = known.value if known is not None and known.value == LONG and kind != "count" else ""
        table = self._tables.used(target.name, Kept(kind, value=value), kinds, target.span)
        if kind == "count":
            return typed_program.Tally(table.name, keys, None, target.span)
        number = typed_values.Constant(amount, self._number_type(value))
        return self._sum(table, keys, number, target)

    def _sum(
        self, table: KeyedTable, keys: tuple[Argument, ...], number: Value, target: syntax_tree.TableAccess
    ) -> typed_program.Tally | typed_program.Addition:
        """Return the statement that adds a number to an entry of a table of kind ``sum`` or ``last``."""
        if table.kind != "last":
            return typed_program.Tally(table.name, keys, number, target.span)
        if any(key.partition("[")[0] == KeyKind.USER_STACK.value for key in table.keys):
            message = f"'@{target.name}' has call stacks of the program as keys: it cannot be both set and added to"
            raise self._values.wrong(target.span, message, "only add to it, or only set it")
        return typed_program.Addition(table.name, keys, number, target.span)

    def whole(self, access: syntax_tree.TableAccess) -> str:
        """Return the name of a table that is printed or cleared; the statements that write it may follow later."""
        self._tables.named.append((access.name, access.span))
        return access.name or UNNAMED

    def removal(self, target: syntax_tree.TableAccess) -> typed_program.Untally:
        """Return the statement ``delete(@name[keys])``."""
        kinds, keys = self._keys(target)
        self._check(target, kinds)
        return typed_program.Untally(target.name or UNNAMED, keys, target.span)

    def value(self, access: syntax_tree.TableAccess) -> Value:
        """Return the number that ``@name[keys]`` denotes, or report that it is a table of strings or call stacks."""
        if (kept := self.kept(access)) is not None:
            raise self._values.wrong(
                access.span,
                f"'@{access.name}' keeps a {kept.type}, which is not a value",
                "it can be printed, tested, be a key, and a string be compared with a text",
            )
        kinds, keys = self._keys(access)
        known = self._check(access, kinds)
        return typed_values.TableValue(access.name or UNNAMED, keys, self._number_type(known.value))

    def kept(self, access: syntax_tree.TableAccess) -> typed_values.Kept | None:
        """Return the string or call stack that ``@table[keys]`` denotes, or None if the table has numbers as values."""
        known = self._tables.find(access.name)
        key = known.kept if known is not None else self._tables.written_key(access.name)
        if key is None:
            return None
        if key.kind is KeyKind.USER_STACK and self._is_tool:
            message = f"'@{access.name}' keeps call stacks of the program, which only printing the table shows here"
            raise self._values.wrong(access.span, message, _STACK_HINT)
        kinds, keys = self._keys(access)
        self._check(access, kinds)
        cells = key.bytes // self._values.types.word_size
        limit = key.size or PROCESS_NAME_SIZE - 1
        marks = key.kind in (KeyKind.CUT_STRING, KeyKind.CUT_TEXT)
        type_ = String(limit, marks) if key.kind.is_string else Stack(key.kind.is_kernel_stack, key.size)
        return typed_values.Kept(access.name or UNNAMED, keys, cells, type_)

    def _number_type(self, value: str) -> Integer:
        return LONG_LONG if value == LONG else self._values.types.long

    def _check(self, access: syntax_tree.TableAccess, kinds: tuple[str, ...]) -> KeyedTable:
        known = self._tables.find(access.name)
        if known is None and (written := self._tables.written(access.name)) is not None:
            return self._tables.used(access.name, written, kinds, access.span)
        if known is None:
            raise self._values.wrong(access.span, f"'@{access.name}' is not assigned above")
        return self._tables.used(access.name, Kept(known.kind, known.value), kinds, access.span)

    def _kept(self, value: syntax_tree.Expression, name: str) -> tuple[Kept, Argument | None]:
        """Return the kind of value that an assignment stores in a table, and the argument; None for ``count``."""
        known = self._tables.find(name)
        if not isinstance(value, syntax_tree.Call) or value.function not in KINDS:
            return self._last(value, name)
        count = KINDS[value.function]
        if len(value.arguments) != count:
            takes = f"'{value.function}' takes {count} argument{'' if count == 1 else 's'}"
            raise self._values.wrong(value.span, takes, f"write {CALL_FORMS[value.function]}")
        if not count:
            return Kept("count"), None
        if value.function == "last":
            return self._last(value.arguments[0], name)
        number, kind = self._number(value.arguments[0], known)
        if value.function != "lhist":
            return Kept(value.function, kind), number
        bounds = [self._values.constant(argument) for argument in value.arguments[1:]]
        return Kept(f"lhist({', '.join(str(bound or 0) for bound in bounds)})", kind), number

    def _last(self, value: syntax_tree.Expression, name: str) -> tuple[Kept, Argument]:
        """Return the kind of value that ``@name = value`` stores, and the value: a number, a string or a call stack."""
        known, text = self._tables.find(name), self._strings.text(value)
        if text is None or isinstance(text, typed_values.Register):
            number, kind = self._number(value, known)
            return Kept("last", kind), number
        if isinstance(text, typed_values.Bytes):
            raise self._values.wrong(value.span, "a table keeps no bytes", "use str(p, n), or mem(p, n) as a key")
        if isinstance(text, typed_values.NetworkAddress):
            raise self._values.wrong(value.span, "a table keeps no network addresses", "keep its number")
        size = self._tables.text_size(name, VALUE)
        kind, text = self._fitting(text, known.value if known is not None else "", size, value.span)
        return Kept("last", value=kind), text

    def _number(self, expression: syntax_tree.Expression, known: KeyedTable | None) -> tuple[Value, str]:
        """Return a number to store, and its kind, which is empty for a word."""
        value = self._values.value(expression)
        kind = LONG if self._values.operators.is_wide(value.type) or (known is not None and known.value == LONG) else ""
        return self._values.converted(value, self._number_type(kind), expression.span), kind

    def _keys(self, access: syntax_tree.TableAccess) -> tuple[tuple[str, ...], tuple[Argument, ...]]:
        if len(access.keys) > _KEYS_MAX:
            raise self._values.wrong(access.span, f"a table has at most {_KEYS_MAX} keys")
        table = self._tables.find(access.name)
        known = table.keys if table is not None and len(table.keys) == len(access.keys) else ("",) * len(access.keys)
        found = [
            self._key(key, kind, self._tables.text_size(access.name, position))
            for position, (key, kind) in enumerate(zip(access.keys, known, strict=True))
        ]
        return tuple(kind for kind, _ in found), tuple(value for _, value in found)

    def _key(self, key: syntax_tree.Expression, known: str, size: int | None) -> tuple[str, Argument]:
        """
        Return (kind, value) of a key field of a table; ``known`` is its kind from earlier uses, "" if there are none.

        ``size`` is the room in bytes for strings if handlers store string literals there, else None.
        """
        text = self._strings.text(key)
        if isinstance(text, typed_values.NetworkAddress):
            raise self._values.wrong(key.span, "a network address is not a key", "use its number")
        if text is None:
            text = self._object(key)
        if isinstance(text, typed_values.Bytes):
            return f"bytes[{self._byte_count(text, key.span)}]", text
        if text is not None:
            return self._fitting(text, known, size, key.span)
        value = self._values.value(key)
        match value.type:
            case Pointer():
                return "address", value
            case Integer() | Enumeration() as type_ if self._values.operators.is_wide(type_):
                return known if known in _WIDE else SIGNED_LONG if word_kind(type_, "") == SIGNED else LONG, value
            case Integer() | Enumeration() if known in _WIDE:
                return known, self._values.converted(value, LONG_LONG, key.span)
            case Integer() | Enumeration() as type_:
                register = value.name if isinstance(value, typed_values.Register) else ""
                if (
                    register == "pc"
                    or is_of_system(register)
                    or (isinstance(key, syntax_tree.Call) and key.function == "sym")
                ):
                    return "address", value
                kind, types = word_kind(type_, known), self._values.types
                return kind, self._values.converted(value, types.long if kind == SIGNED else types.word, key.span)
        raise self._values.wrong(key.span, f"'{value.type}' is not a key")

    def _object(self, key: syntax_tree.Expression) -> typed_values.Text | typed_values.Bytes | None:
        """
        Return the string in a character array, or the bytes of another array or a structure.

        Return None for other values.
        """
        if not isinstance(key, syntax_tree.Name | syntax_tree.MemberAccess | syntax_tree.Index | syntax_tree.Unary):
            return None
        if isinstance(key, syntax_tree.Unary) and key.operator != "*":
            return None
        type_ = self._values.type_of(key)
        if not isinstance(type_, Array | Record):
            return None
        address = self._values.value(key if isinstance(type_, Array) else syntax_tree.Unary("&", key, key.span))
        if isinstance(type_, Array) and type_.count and is_text(type_):
            return self._strings.array_text(address, type_.count)
        if isinstance(type_, Array) and type_.count is None and is_text(Array(type_.element, 1)):
            return self._strings.array_text(address, None)
        whole = self._values.converted(address, self._values.types.word, key.span)
        return typed_values.Bytes(whole, typed_values.Constant(size_of(type_) or 0, UNSIGNED), Array(CHAR, None))

    def _byte_count(self, value: typed_values.Bytes, span: Span) -> int:
        """Return the size in bytes of a key field. Report an error if it is not constant, or out of range."""
        match value.size:
            case typed_values.Constant(count) if 1 <= count <= STRING_SIZE_MAX:
                return count
        if isinstance(value.size, typed_values.Constant) and not span.text.startswith("mem"):
            message = f"as a key, an object has 1 to {STRING_SIZE_MAX} bytes, not {value.size.value}"
            raise self._values.wrong(span, message, "use a part of it")
        message = f"as a key, 'mem' takes a constant number of bytes, from 1 to {STRING_SIZE_MAX}"
        raise self._values.wrong(span, message, "use str(p, n) for a string, mem(p, 16) for bytes")

    def _fitting(self, text: Argument, known: str, size: int | None, span: Span) -> tuple[str, Argument]:
        """
        Return the kind of a key field or kept value that is not a number, and the value.

        In blocks of the tool, strings have the ``known`` kind. ``size`` is the room in bytes if handlers store string
        literals there.
        """
        if size is not None:
            match text:
                case typed_values.Literal() | typed_values.TextChoice():
                    return self._tables.text_kind(size), _with_room(text, size)
                case typed_values.Kept(_, _, cells, String(limit)) if limit < size and not self._is_tool:
                    whole = Key(KeyKind.TEXT, size).bytes // self._values.types.word_size
                    return self._tables.text_kind(size), text.replaced(padding=whole - cells)
        if (
            not self._is_tool
            or not isinstance(text, typed_values.Literal | typed_values.ItemText | typed_values.Kept)
            or not isinstance(text.type, String)
        ):
            return self._part(text, span), text
        key = Key.parsed(known) if known else None
        if key is None or not key.kind.is_string:
            return self._part(text, span), text
        limit = key.size or PROCESS_NAME_SIZE - 1
        if isinstance(text, typed_values.Kept):
            return known if text.type.limit == limit else self._part(text, span), text
        if isinstance(text, typed_values.ItemText):
            return known, text.replaced(limit=limit, type=String(limit))
        if len(text.text.encode()) > (shown := limit - (key.kind in (KeyKind.CUT_STRING, KeyKind.CUT_TEXT))):
            raise self._values.wrong(span, f"this table has room for {shown} bytes of a string")
        return known, typed_values.Literal(text.text, limit, String(limit))

    def _part(self, text: Argument, span: Span) -> str:
        """Return the kind of a string, call stack or process name in a table, as in the RPN statement ``table =``."""
        match text:
            case typed_values.CommName():
                return "comm"
            case typed_values.Literal(content, limit) if len(content.encode()) >= limit:
                raise self._values.wrong(span, f"this table has room for {limit - 1} bytes of a string")
            case typed_values.Text(_, limit, String(_, marks)):
                if limit > STRING_SIZE_MAX:
                    message = f"a string in a table has at most {STRING_SIZE_MAX - 1} bytes, not {limit - marks}"
                    raise self._values.wrong(span, message)
                return f"{'cut' if marks else ''}str[{limit}]"
            case typed_values.Literal(_, limit) | typed_values.ItemText(_, _, limit):
                return f"cutstr[{limit}]"
            case typed_values.StackTrace(is_kernel, frames):
                return f"{'k' if is_kernel else 'u'}stack" + ("" if frames is None else f"[{frames}]")
            case typed_values.Kept(_, _, _, String(limit, marks)):
                return f"{'cut' if marks else ''}text[{limit}]"
            case typed_values.Kept(_, _, _, Stack(is_kernel, frames)):
                return f"{'' if is_kernel else 'u'}frames[{frames}]"
        return "address"
