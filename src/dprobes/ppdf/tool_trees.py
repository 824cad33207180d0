"""
Blocks of the tool and the functions that they call, stored in a file as typed syntax trees.

``OF_STATEMENTS`` and ``OF_VALUES`` have the stored fields of each node, for writing and reading: in the order of its
declaration, each in the form of its name or declared type, except where the table defines another form. A type is one
byte that describes its cell: size in bytes, signedness, and whether it is ``_Bool``; pointers are unsigned numbers,
enumerations have their base type. Any tree that is read can be executed, whatever the bytes are: jumps leave an
enclosing statement, and numbers refer to existing items.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.dpc.syntax.syntax_tree import PERIOD_MAX, PERIOD_MIN, Block, BlockKind, ToolBlock
from dprobes.dpc.tool_block import SYSTEM, ToolProgram
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.name_scope import FunctionSignature
from dprobes.dpc.typedtree.process_items import ItemKind
from dprobes.dpc.typedtree.typed_program import Ending, Jumping, TypedBlock, TypedFunction
from dprobes.dpc.typedtree.typed_values import VariableKind
from dprobes.dpc.typedtree.value_properties import integer_of
from dprobes.dpc.types.c_types import BOOL, VOID, CType, Integer, Stack, String, size_of
from dprobes.errors import FormatError
from dprobes.ppdf.ppdf_sections import NONE, Writer
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, text_problem
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX, KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.dpc.typedtree.typed_program import Statement
    from dprobes.dpc.typedtree.typed_values import Argument, Value
    from dprobes.ppdf.ppdf_sections import Reader
    from dprobes.ppdf.program_definitions import Spans
    from dprobes.rpn.keyed_tables import Key, Table
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import Span

__all__ = ["BLOCK_KINDS", "OF_STATEMENTS", "OF_VALUES", "StatementKind", "ValueKind", "read_blocks", "write_blocks"]

DEPTH_MAX = 250
"""Maximum depth of nested statements and values."""

SLOTS_MAX = 1 << 12
"""Maximum number of cells for variables in a block or function."""

BLOCK_KINDS = tuple(BlockKind)
"""Kinds of blocks; their indices are their numbers in the file."""

_OPERATORS = ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")
_COMPARISONS = ("==", "<", "<=")
_NUMBERS = (KeyKind.WORD, KeyKind.SIGNED, KeyKind.ADDRESS, KeyKind.LONG, KeyKind.SIGNED_LONG)

_VALUE_SIZE, _STATEMENT_SIZE, _TEST_SIZE, _FUNCTION_SIZE, _BLOCK_SIZE = 1, 5, 21, 17, 22
"""Minimum sizes in bytes of repeated items."""


StatementKind = enum.IntEnum(
    "StatementKind",
    "STEPS EVALUATE LOG TALLY UNTALLY SHOW CLEAR QUIT SELECT LOOP SWITCH BREAK CONTINUE RESULT END TRY CAT EACH "
    "ADDITION",
)
"""The kind of a statement, stored in the byte before its fields; STEPS is 1, and so on in this order."""

ValueKind = enum.IntEnum(
    "ValueKind",
    "NONE CONSTANT SYSTEM LOCAL PARAMETER VARIABLE GLOBAL ARITHMETIC NEGATION COMPLEMENT COMPARISON "
    "NOT BOTH EITHER CONVERT ASSIGN STEP CHOICE SEQUENCE CALL TABLE_VALUE COMM_TEST COMM KEPT "
    "KEPT_TEST LITERAL ITEM_TEXT ITEM_TEST",
    start=0,
)
"""Kind of a value, stored in the byte before its fields. NONE, which is 0, means that an optional value is absent."""

_SIGNED, _BOOL = 0x80, 0x40
_SIZES = (1, 2, 4, 8)
_TYPES: dict[int, CType] = {
    0: VOID,
    _BOOL | 1: BOOL,
    **{
        size | sign: Integer(f"{'' if sign else 'u'}int{8 * size}_t", size, is_signed=bool(sign), rank=rank)
        for rank, size in enumerate(_SIZES)
        for sign in (0, _SIGNED)
    },
}


def _byte_of(type_: CType) -> int:
    """Return the byte that describes a type, 0 for one without numbers; raise ``FormatError`` for more than 8 bytes."""
    integer = integer_of(type_)
    if integer is None:
        return 0
    if integer.is_bool:
        return _BOOL | 1
    if integer.size not in _SIZES:
        raise FormatError(f"a PPDF holds numbers of at most 8 bytes, not '{type_}'")
    return integer.size | (_SIGNED if integer.is_signed else 0)


def write_blocks(out: Writer, tool: ToolProgram, spans: Spans) -> None:
    """Write the syntax trees of the blocks of the tool, and of the functions that they call."""
    trees = _TreeWriter(Writer(out.all_strings), spans, {name: n for n, name in enumerate(tool.tables)})
    for block in tool.blocks:
        kind, written, span = BLOCK_KINDS.index(block.block.kind), block.block.written, spans.number(block.block.span)
        trees.out.row("BsIQI", kind, written, span, block.block.period, block.slots)
        trees.statement(block.body)
    number = 0
    while number < len(trees.functions):  # each function may call others
        trees.statement(tool.functions[list(trees.functions)[number]].body)
        number += 1
    out.row("IBII", len(tool.blocks), tool.word_size, tool.jmpmax, len(trees.functions))
    for name in trees.functions:
        signature = tool.functions[name].signature
        types = bytes(map(_byte_of, signature.parameters))
        span, type_, slots = spans.number(signature.span), _byte_of(signature.type), tool.functions[name].slots
        out.row("sIBbI", name, span, type_, types, slots)
    out.data += trees.out.data


class _TreeWriter:
    """A writer of the trees of a program; ``functions`` maps the called functions to their numbers."""

    def __init__(self, out: Writer, spans: Spans, tables: Mapping[str, int]) -> None:
        self.out = out
        self.functions: dict[str, int] = {}
        self._spans = spans
        self._tables = tables
        self._depth = 0

    def statement(self, statement: Statement | None) -> None:
        """Write a statement; None is written as an empty statement."""
        statement = typed_program.Steps(()) if statement is None else statement
        kind = _kind_of_statement(statement)
        self._deeper()
        self.out.u8(kind)
        if not isinstance(statement, typed_program.Steps):
            self.span(statement.span)
        for name, field in OF_STATEMENTS[kind].fields.items():
            field.write(self, getattr(statement, name))
        self._depth -= 1

    def value(self, value: Argument | None) -> None:
        """Write a value; ``tool_block.check_block`` has rejected values that need a hit."""
        self._deeper()
        if value is None:
            self.out.u8(ValueKind.NONE)
        else:
            kind = _kind_of_value(value)
            self.out.u8(kind)
            self.out.u8(_byte_of(value.type))
            for name, field in OF_VALUES[kind].fields.items():
                field.write(self, getattr(value, name))
        self._depth -= 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FormatError(
                f"the blocks of the tool have statements and values nested deeper than {DEPTH_MAX}",
                hint="put a part of them into a function",
            )

    # The forms of fields

    def span(self, span: Span) -> None:
        self.out.u32(self._spans.number(span))

    def values(self, values: Sequence[Argument]) -> None:
        self.out.u32(len(values))
        for each in values:
            self.value(each)

    def statements(self, statements: Sequence[Statement]) -> None:
        self.out.u32(len(statements))
        for each in statements:
            self.statement(each)

    def tests(self, tests: Sequence[typed_program.Test]) -> None:
        self.out.u32(len(tests))
        for test in tests:
            self.out.row("BwI", test.value is not None, test.value or 0, test.position)

    def table(self, name: str) -> None:
        self.out.u32(self._tables[name])

    def function(self, name: str) -> None:
        self.out.u32(self.functions.setdefault(name, len(self.functions)))

    def parameter(self, slot: int) -> None:
        self.out.u32(-1 - slot)

    def item_kind(self, kind: ItemKind) -> None:
        self.out.u32(tuple(ItemKind).index(kind))

    def nothing(self, _: object) -> None:
        """Write nothing for a field that follows from the others."""


class _Surroundings(NamedTuple):
    """Context of values: variables and tables of the ``program``, and functions. ``word_size`` is in bytes."""

    program: Program
    tables: Mapping[str, Table]
    functions: Mapping[str, FunctionSignature]
    spans: Sequence[Span]
    word_size: int

    def cells(self, type_: CType) -> int:
        """Return the number of cells of the RPN stack that a value of the numeric type ``type_`` takes: 1 or 2."""
        return 2 if (size_of(type_) or 0) > self.word_size else 1


class _Partial(NamedTuple):
    """Node that is being read: its offset and that of its fields, the fields read so far, and the allowed jumps."""

    kind: StatementKind | ValueKind
    at: int
    start: int
    found: dict[str, Any]
    leaving: frozenset[Jumping] = frozenset()


class _TreeReader:
    """A reader of the tree of a block, or of a function with ``cells`` of parameters; it has ``slots`` variables."""

    def __init__(self, reader: Reader, around: _Surroundings, slots: int, cells: int | None = None) -> None:
        self.reader = reader
        self._around = around
        self._slots = slots
        self._cells = cells
        self._depth = 0

    def statement(self, leaving: frozenset[Jumping] = frozenset()) -> Statement:
        """Read a statement in which the jumps ``leaving`` are allowed."""
        reader, at = self.reader, self.reader.offset
        number = reader.u8("the kind of a statement")
        if not 1 <= number <= len(StatementKind):
            reader.fail(f"expected the kind of a statement, found {number}", at)
        self._deeper()
        kind = StatementKind(number)
        layout = OF_STATEMENTS[kind]
        found = dict(layout.given)
        if kind is not StatementKind.STEPS:
            found["span"] = self.span("the number of a span")
        if kind in (StatementKind.BREAK, StatementKind.CONTINUE) and found["kind"] not in leaving:
            reader.fail(f"there is nothing that '{found['kind'].value}' leaves", at)
        if kind is StatementKind.RESULT and self._cells is None:
            reader.fail("expected no result of a block", at)
        if kind is StatementKind.EACH and self._cells is not None:  # the limit of items is that of a block
            reader.fail("expected no loop over items in a function", at)
        partial = _Partial(kind, at, reader.offset, found, leaving)
        for name, field in layout.fields.items():
            found[name] = field.read(self, field.what, partial)
        self._depth -= 1
        read: Statement = layout.node(**found)
        return read

    def _argument(self) -> Argument:
        """Read a value, or an argument that is not a number."""
        reader, at = self.reader, self.reader.offset
        if (kind := self._kind()) in _NO_NUMBERS:
            return self._node(kind, at)
        reader.back(at)
        return self.value("a value")

    def _kind(self) -> ValueKind:
        at = self.reader.offset
        number = self.reader.u8("the kind of a value")
        if number >= len(ValueKind):
            self.reader.fail(f"expected the kind of a value, found {number}", at)
        return ValueKind(number)

    def _node(self, kind: ValueKind, at: int) -> Argument:
        """Read a value after its kind: its type, then the fields of that kind; ``at`` is its offset for messages."""
        layout, byte_at = OF_VALUES[kind], self.reader.offset
        byte = self.reader.u8("a type")
        if (type_ := _TYPES.get(byte)) is None:
            self.reader.fail(f"expected a type, found {byte:#x}", byte_at)
        if layout.node in (typed_values.Arithmetic, typed_values.Negation) and not isinstance(type_, Integer):
            self.reader.fail("expected a type of numbers, found another one", byte_at)
        found = {**layout.given, "type": type_}
        partial = _Partial(kind, at, self.reader.offset, found)
        for name, field in layout.fields.items():  # inlined to save recursion depth
            found[name] = field.read(self, field.what, partial)
        read: Argument = layout.node(**found)
        return read

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self.reader.fail(f"expected at most {DEPTH_MAX} statements and values in each other")

    # The forms of fields

    def span(self, what: str, _: object = None) -> Span:
        return self._around.spans[self.reader.below(len(self._around.spans), what)]

    def value(self, what: str, _: object = None) -> Value:
        at = self.reader.offset
        if (found := self.optional()) is None:
            self.reader.fail(f"expected {what}, found none", at)
        return found

    def optional(self, *_: object) -> Value | None:
        at = self.reader.offset
        kind = self._kind()
        if kind is ValueKind.NONE:
            return None
        if (problem := _NO_NUMBERS.get(kind)) is not None:
            self.reader.fail(f"{problem} is not a number", at)
        self._deeper()
        found: Any = self._node(kind, at)
        self._depth -= 1
        return found  # type: ignore[no-any-return]

    def values(self, *_: object) -> tuple[Argument, ...]:
        return tuple(self._argument() for _ in range(self.reader.count(_VALUE_SIZE, "values")))

    def place(self, *_: object) -> Value:
        at, found = self.reader.offset, self.value("a variable")
        if not isinstance(found, typed_values.Local | typed_values.Variable):
            self.reader.fail("expected a variable, found another value", at)
        return found

    def local(self, *_: object) -> Value | None:
        at, found = self.reader.offset, self.optional()
        if found is not None and not isinstance(found, typed_values.Local):
            self.reader.fail("expected a variable of the block, found another value", at)
        return found

    def one_statement(self, _: str, partial: _Partial) -> Statement:
        return self.statement(partial.leaving)

    def loop_body(self, *_: object) -> Statement:
        return self.statement(frozenset(Jumping))

    def statements(self, _: str, partial: _Partial) -> tuple[Statement, ...]:
        count = self.reader.count(_STATEMENT_SIZE, "statements")
        return tuple(self.statement(partial.leaving) for _ in range(count))

    def tests(self, *_: object) -> tuple[typed_program.Test, ...]:
        flag, wide, u32 = self.reader.flag, self.reader.wide, self.reader.u32
        count = range(self.reader.count(_TEST_SIZE, "labels"))
        rows = (
            (flag("whether a label has a value"), wide("a number"), u32("the number of a statement")) for _ in count
        )
        return tuple(
            typed_program.Test(number if has_value else None, position) for has_value, number, position in rows
        )

    def switched(self, what: str, partial: _Partial) -> tuple[Statement, ...]:
        found = self.statements(what, partial._replace(leaving=partial.leaving | {Jumping.BREAK}))
        if any(test.position > len(found) for test in partial.found["tests"]):
            self.reader.fail("a label leads to no statement", partial.start)
        return found

    def table(self, *_: object) -> str:
        tables = self._around.program.tables
        return tables[self.reader.below(len(tables), "the number of a table")].name

    def keys(self, _: str, partial: _Partial) -> tuple[Argument, ...]:
        at, table = self.reader.offset, self._around.tables[partial.found["table"]]
        found = self.values()
        kinds = tuple(key.kind for key in table.keys)
        if len(found) != len(kinds) or not all(map(self._fits, table.keys, found)):
            expected = ", ".join(kind.value for kind in kinds) or "none"
            self.reader.fail(f"expected the keys of the table '{table.name}' ({expected}), found others", at)
        return found

    def _fits(self, key: Key, value: Argument) -> bool:
        """Return whether the type of a value that was read is the type of a table's key."""
        match value:
            case typed_values.CommName():
                return key.kind is KeyKind.COMM
            case typed_values.Literal(_, limit) | typed_values.ItemText(_, _, limit):
                return key.kind.is_string and limit == (key.size or PROCESS_NAME_SIZE - 1)
            case typed_values.Kept():
                of_type = String if key.kind.is_string else Stack
                return value.cells * self._around.word_size == key.bytes and isinstance(value.type, of_type)
        return key.kind in _NUMBERS

    def tallied(self, _: str, partial: _Partial) -> Argument | None:
        """
        Read the value of a ``tally`` statement, whose table ``partial`` has.

        It is a string or stack if the table keeps these, a number if the table takes one, otherwise None.
        """
        at, table = self.reader.offset, self._around.tables[partial.found["table"]]
        if table.keeps_bytes:
            kept = self._argument()
            if table.value is None or not self._fits(table.value, kept):
                self.reader.fail(f"expected what the table '{table.name}' keeps, found another value", at)
            return kept
        number = self.optional()
        if table.kind.takes_value != (number is not None):
            expected = "a value" if table.kind.takes_value else "no value"
            self.reader.fail(f"expected {expected} for the table '{table.name}'", partial.start)
        return number

    def item_kind(self, what: str, _: object) -> ItemKind:
        return tuple(ItemKind)[self.reader.below(len(ItemKind), what)]

    def item_process(self, _: str, partial: _Partial) -> Value | None:
        at, process = self.reader.offset, self.optional()
        kind = partial.found["kind"]
        if kind.is_of_process != (process is not None):
            expected = "a process" if kind.is_of_process else "no process"
            self.reader.fail(f"expected {expected} for a loop over '{kind.value}'", at)
        return process

    def item_text(self, *_: object) -> Argument:
        at = self.reader.offset
        if (kind := self._kind()) is not ValueKind.ITEM_TEXT:
            self.reader.fail("expected a field of a loop's item, found another value", at)
        return self._node(kind, at)

    def added(self, what: str, partial: _Partial) -> Value:
        """Read the number that is added to an entry; fail if the table, which ``partial`` has, takes no additions."""
        table = self._around.tables[partial.found["table"]]
        if not table.takes_additions:
            self.reader.fail(f"expected a table that keeps numbers, found '{table.name}'", partial.start)
        return self.value(what)

    def kept(self, *_: object) -> Argument:
        at = self.reader.offset
        if (kind := self._kind()) is not ValueKind.KEPT:
            self.reader.fail("expected what a table keeps, found another value", at)
        return self._node(kind, at)

    def kept_table(self, *_: object) -> str:
        at, name = self.reader.offset, self.table()
        table = self._around.tables[name]
        if table.value is None or not table.keeps_bytes:
            self.reader.fail(f"expected a table that keeps strings or call stacks, found '{name}'", at)
        return name

    def kept_keys(self, what: str, partial: _Partial) -> tuple[Argument, ...]:
        self._deeper()
        keys = self.keys(what, partial)
        self._depth -= 1
        return keys

    def kept_cells(self, _: str, partial: _Partial) -> int:
        return self._around.tables[partial.found["table"]].kept_bytes // self._around.word_size

    def kept_type(self, _: str, partial: _Partial) -> CType:
        kept = self._around.tables[partial.found["table"]].value
        assert kept is not None
        size = kept.size or PROCESS_NAME_SIZE - 1
        return String(size) if kept.kind.is_string else Stack(is_kernel=True, frames=size)

    def text_type(self, _: str, partial: _Partial) -> CType:
        text, limit = partial.found["text"], partial.found["limit"]
        if len(text.encode()) > limit or limit > STRING_SIZE_MAX or text_problem(text) is not None:
            self.reader.fail(f"expected a text of at most {limit} bytes, found another one", partial.at)
        return String(limit)

    def item_type(self, _: str, partial: _Partial) -> CType:
        limit = partial.found["limit"]
        if not 1 <= limit <= STRING_SIZE_MAX:
            self.reader.fail(f"expected a string of 1 to {STRING_SIZE_MAX} bytes, found one of {limit}", partial.at)
        return String(limit, marks=True)

    def has_sign(self, _: str, partial: _Partial) -> bool:
        type_ = partial.found["left"].type
        return isinstance(type_, Integer) and type_.is_signed

    def slot(self, what: str, _: object) -> int:
        return self.reader.below(self._slots, what)

    def parameter(self, what: str, _: object) -> int:
        return -1 - self.reader.below(self._cells or 0, what)

    def first(self, what: str, partial: _Partial) -> int:
        reader, at, program = self.reader, self.reader.offset, self._around.program
        count = program.gvars if partial.kind is ValueKind.GLOBAL else program.vars
        first = reader.below(count, what)
        if first + self._around.cells(partial.found["type"]) > count:
            reader.fail(f"expected {count} cells for variables, found a number after them", at)
        return first

    def function(self, what: str, _: object) -> str:
        return list(self._around.functions)[self.reader.below(len(self._around.functions), what)]

    def arguments(self, what: str, partial: _Partial) -> tuple[Value, ...]:
        reader, cells, at = self.reader, self._around.cells, self.reader.offset
        found = tuple(self.value(what) for _ in range(reader.count(_VALUE_SIZE, "arguments")))
        function = self._around.functions[partial.found["name"]]
        if [cells(each.type) for each in found] != list(map(cells, function.parameters)):
            reader.fail(f"expected the arguments of '{function.name}', found others", at)
        return found

    def operator(self, _: str, partial: _Partial) -> str:
        operators = _COMPARISONS if partial.kind is ValueKind.COMPARISON else _OPERATORS
        at, found = self.reader.offset, self.reader.string("an operator")
        if found not in operators:
            self.reader.fail(f"expected one of {' '.join(operators)}, found '{found}'", at)
        return found

    def system(self, what: str, partial: _Partial) -> str:
        name = self.reader.string(what)
        if name not in SYSTEM:
            self.reader.fail(f"expected one of {', '.join(SYSTEM)}, found '{name}'", partial.at)
        return name

    def rows(self, what: str, _: object) -> int | None:
        rows = self.reader.u32(what)
        return None if rows == NONE else rows

    def path(self, what: str, _: object) -> str:
        at, path = self.reader.offset, self.reader.text(what)
        if not path or "\0" in path:
            self.reader.fail("expected the path of a file, found none", at)
        return path


class _Field(NamedTuple):
    """A stored field of a node: its writer, its reader, and its name in messages."""

    write: Callable[[_TreeWriter, Any], None]
    read: Callable[[_TreeReader, str, _Partial], Any]
    what: str = ""


class _Layout(NamedTuple):
    """The stored fields of a node, in their order, and those that its kind implies."""

    node: type[Any]
    fields: dict[str, _Field]
    given: dict[str, Any]


def _plain(kind: str, what: str = "") -> _Field:
    """
    Return a field that is not a tree. ``kind`` names the methods of ``Writer`` and ``Reader`` for it.

    ``what`` is the name of the field in messages.
    """
    writes = {"flag": "u8", "text": "block"}.get(kind, kind)

    def write(trees: _TreeWriter, value: Any) -> None:
        getattr(trees.out, writes)(NONE if value is None else value.encode() if kind == "text" else value)

    return _Field(write, lambda trees, what, _: getattr(trees.reader, kind)(what), what)


_VALUE = _Field(_TreeWriter.value, _TreeReader.value, "a value")
_OPTIONAL = _Field(_TreeWriter.value, _TreeReader.optional)
_STATEMENT = _Field(_TreeWriter.statement, _TreeReader.one_statement)
_STATEMENTS = _Field(_TreeWriter.statements, _TreeReader.statements)
_TABLE = _Field(_TreeWriter.table, _TreeReader.table)
_KEYS = _Field(_TreeWriter.values, _TreeReader.keys)
_OPERATOR = _plain("string")._replace(read=_TreeReader.operator)
_IS_PREFIX = _plain("flag", "whether it is a prefix")
_SLOT = _plain("u32", "the number of a variable")._replace(read=_TreeReader.slot)
_FIRST = _SLOT._replace(read=_TreeReader.first)

_FORMS = {
    "table": _TABLE, "keys": _KEYS, "operator": _OPERATOR, "is_prefix": _IS_PREFIX, "slot": _SLOT, "first": _FIRST,
    "Value": _VALUE,
    "Value | None": _OPTIONAL,
    "Argument | None": _OPTIONAL,
    "Place": _Field(_TreeWriter.value, _TreeReader.place),
    "Local | None": _Field(_TreeWriter.value, _TreeReader.local),
    "tuple[Argument, ...]": _Field(_TreeWriter.values, _TreeReader.values),
    "Statement": _STATEMENT,
    "Statement | None": _STATEMENT,
    "tuple[Statement, ...]": _STATEMENTS,
    "tuple[Test, ...]": _Field(_TreeWriter.tests, _TreeReader.tests),
    "int": _plain("wide", "a number"),
}  # fmt: skip
"""Forms of fields, by their names or else their declared types."""


def _of(node: type[Any], stored: str = "", /, given: dict[str, Any] | None = None, **own: _Field) -> _Layout:
    """
    Return the layout of a node, whose kind implies the fields ``given``.

    ``stored`` are the names of the others if their order is not the declared one, ``own`` those with another form.
    """
    given, types = given or {}, node.__annotations__
    names = stored.split() or [name for name in types if name not in {"span", "type", *given} - own.keys()]
    return _Layout(node, {name: own.get(name) or _FORMS.get(name) or _FORMS[types[name]] for name in names}, given)


OF_STATEMENTS: dict[StatementKind, _Layout] = {
    StatementKind.STEPS: _of(typed_program.Steps),
    StatementKind.EVALUATE: _of(typed_program.Evaluate),
    StatementKind.LOG: _of(
        typed_program.Log, "template items", given={"number": 0}, template=_plain("text", "a template")
    ),
    StatementKind.TALLY: _of(typed_program.Tally, value=_OPTIONAL._replace(read=_TreeReader.tallied)),
    StatementKind.UNTALLY: _of(typed_program.Untally),
    StatementKind.SHOW: _of(
        typed_program.Show, rows=_plain("u32", "the number of rows")._replace(read=_TreeReader.rows)
    ),
    StatementKind.CLEAR: _of(typed_program.Clear),
    StatementKind.QUIT: _of(typed_program.Quit),
    StatementKind.SELECT: _of(typed_program.Select, condition=_VALUE._replace(what="a condition")),
    StatementKind.LOOP: _of(
        typed_program.Loop,
        "tests_first condition step body",
        tests_first=_plain("flag", "what comes first"),
        body=_STATEMENT._replace(read=_TreeReader.loop_body),
    ),
    StatementKind.SWITCH: _of(
        typed_program.Switch, "value tests statements", statements=_STATEMENTS._replace(read=_TreeReader.switched)
    ),
    StatementKind.BREAK: _of(typed_program.Jump, given={"kind": Jumping.BREAK}),
    StatementKind.CONTINUE: _of(typed_program.Jump, given={"kind": Jumping.CONTINUE}),
    StatementKind.RESULT: _of(typed_program.Result),
    StatementKind.END: _of(typed_program.End, given={"kind": Ending.RETURN}),
    StatementKind.TRY: _of(typed_program.TryCatch, "code address body handler"),
    StatementKind.CAT: _of(typed_program.Cat, path=_plain("text", "a path")._replace(read=_TreeReader.path)),
    StatementKind.EACH: _of(
        typed_program.EachItem,
        kind=_Field(_TreeWriter.item_kind, _TreeReader.item_kind, "the kind of a loop's items"),
        process=_OPTIONAL._replace(read=_TreeReader.item_process),
        number=_plain("u32", "the number of a loop"),
        body=_STATEMENT._replace(read=_TreeReader.loop_body),
    ),
    StatementKind.ADDITION: _of(typed_program.Addition, value=_VALUE._replace(read=_TreeReader.added)),
}

OF_VALUES: dict[ValueKind, _Layout] = {
    ValueKind.CONSTANT: _of(typed_values.Constant),
    ValueKind.SYSTEM: _of(
        typed_values.System, "name", name=_plain("string", "what the system knows")._replace(read=_TreeReader.system)
    ),
    ValueKind.LOCAL: _of(typed_values.Local),
    ValueKind.PARAMETER: _of(
        typed_values.Local, slot=_Field(_TreeWriter.parameter, _TreeReader.parameter, "the number of a parameter")
    ),
    ValueKind.VARIABLE: _of(typed_values.Variable, given={"kind": VariableKind.LOCAL}),
    ValueKind.GLOBAL: _of(typed_values.Variable, given={"kind": VariableKind.GLOBAL}),
    ValueKind.ARITHMETIC: _of(typed_values.Arithmetic),
    ValueKind.NEGATION: _of(typed_values.Negation, given={"is_complement": False}),
    ValueKind.COMPLEMENT: _of(typed_values.Negation, given={"is_complement": True}),
    ValueKind.COMPARISON: _of(typed_values.Comparison, is_signed=_Field(_TreeWriter.nothing, _TreeReader.has_sign)),
    ValueKind.NOT: _of(typed_values.Not),
    ValueKind.BOTH: _of(typed_values.Both),
    ValueKind.EITHER: _of(typed_values.Either),
    ValueKind.CONVERT: _of(typed_values.Convert),
    ValueKind.ASSIGN: _of(typed_values.Assign),
    ValueKind.STEP: _of(typed_values.Step, is_postfix=_plain("flag", "which value counts")),
    ValueKind.CHOICE: _of(typed_values.Choice),
    ValueKind.SEQUENCE: _of(typed_values.Sequence),
    ValueKind.CALL: _of(
        typed_values.FunctionCall,
        "name span arguments",
        name=_Field(_TreeWriter.function, _TreeReader.function, "the number of a function"),
        span=_Field(_TreeWriter.span, _TreeReader.span, "the number of a span"),
        arguments=_Field(_TreeWriter.values, _TreeReader.arguments, "an argument"),
    ),
    ValueKind.TABLE_VALUE: _of(typed_values.TableValue),
    ValueKind.COMM_TEST: _of(typed_values.CommTest, text=_plain("text", "a name")),
    ValueKind.COMM: _of(typed_values.CommName),
    ValueKind.KEPT: _of(
        typed_values.Kept,
        "table keys cells type",
        table=_TABLE._replace(read=_TreeReader.kept_table),
        keys=_KEYS._replace(read=_TreeReader.kept_keys),
        cells=_Field(_TreeWriter.nothing, _TreeReader.kept_cells),
        type=_Field(_TreeWriter.nothing, _TreeReader.kept_type),
    ),
    ValueKind.KEPT_TEST: _of(
        typed_values.KeptTest, kept=_Field(_TreeWriter.value, _TreeReader.kept), text=_plain("text", "a string")
    ),
    ValueKind.LITERAL: _of(
        typed_values.Literal,
        text=_plain("text", "a text"),
        limit=_plain("u32", "the size of a string"),
        type=_Field(_TreeWriter.nothing, _TreeReader.text_type),
    ),
    ValueKind.ITEM_TEXT: _of(
        typed_values.ItemText,
        number=_plain("u32", "the number of a loop"),
        index=_plain("u32", "the number of a string"),
        limit=_plain("u32", "the size of a string"),
        type=_Field(_TreeWriter.nothing, _TreeReader.item_type),
    ),
    ValueKind.ITEM_TEST: _of(
        typed_values.ItemTest, field=_Field(_TreeWriter.value, _TreeReader.item_text), text=_plain("text", "a string")
    ),
}

_NO_NUMBERS = {
    ValueKind.COMM: "the name of the process",
    ValueKind.KEPT: "what a table keeps",
    ValueKind.LITERAL: "a text",
    ValueKind.ITEM_TEXT: "a text",
}
_STATEMENT_KINDS = {layout.node: kind for kind, layout in OF_STATEMENTS.items()}
_STATEMENT_KINDS[typed_program.Skip] = StatementKind.END
_VALUE_KINDS = {layout.node: kind for kind, layout in OF_VALUES.items()}


def _kind_of_statement(statement: Statement) -> StatementKind:
    if isinstance(statement, typed_program.Jump):
        return StatementKind.BREAK if statement.kind is Jumping.BREAK else StatementKind.CONTINUE
    return _STATEMENT_KINDS[type(statement)]


def _kind_of_value(value: Argument) -> ValueKind:
    match value:
        case typed_values.Local(slot):
            return ValueKind.LOCAL if slot >= 0 else ValueKind.PARAMETER
        case typed_values.Variable(kind):
            return ValueKind.VARIABLE if kind is VariableKind.LOCAL else ValueKind.GLOBAL
        case typed_values.Negation(_, _, is_complement):
            return ValueKind.COMPLEMENT if is_complement else ValueKind.NEGATION
    return _VALUE_KINDS[type(value)]


def read_blocks(reader: Reader, program: Program, spans: Sequence[Span]) -> ToolProgram | None:
    """Return the program of the tool, None if there are no blocks; raise ``FormatError`` if it cannot be executed."""
    count = reader.count(_BLOCK_SIZE, "blocks")
    if not count:
        reader.end()
        return None
    at, word_size = reader.offset, reader.u8("the size of a word")
    if word_size not in (4, 8):
        reader.fail(f"expected words of 4 or 8 bytes, found {word_size}", at)
    jmpmax = reader.below(1 << 16, "the number of jumps")
    signatures: dict[str, FunctionSignature] = {}
    slots: list[int] = []
    for _ in range(reader.count(_FUNCTION_SIZE, "functions")):
        signature = _signature(reader, spans)
        if signature.name in signatures:
            reader.fail(f"there are two functions '{signature.name}'")
        signatures[signature.name] = signature
        slots.append(reader.below(SLOTS_MAX + 1, "the number of variables"))
    tables = {table.name: table for table in program.tables}
    around = _Surroundings(program, tables, signatures, spans, word_size)
    blocks = tuple(_block(reader, around) for _ in range(count))
    functions = {}
    for signature, size in zip(signatures.values(), slots, strict=True):
        cells = sum(map(around.cells, signature.parameters))
        functions[signature.name] = TypedFunction(signature, _TreeReader(reader, around, size, cells).statement(), size)
    reader.end()
    return ToolProgram(blocks, functions, tuple(tables), word_size, jmpmax)


def _signature(reader: Reader, spans: Sequence[Span]) -> FunctionSignature:
    name, span = reader.string("the name of a function"), spans[reader.below(len(spans), "the number of a span")]
    at = reader.offset
    types = [_TYPES.get(byte) for byte in (reader.u8("a type"), *reader.block("types of parameters"))]
    result, *parameters = [each for each in types if each is not None]
    if len(parameters) + 1 != len(types):
        reader.fail("expected types, found something else", at)
    return FunctionSignature(name, result, tuple(parameters), span)


def _block(reader: Reader, around: _Surroundings) -> TypedBlock:
    kind = BLOCK_KINDS[reader.below_byte(len(BLOCK_KINDS), "the kind of a block")]
    written = reader.string("what a block is called")
    span = around.spans[reader.below(len(around.spans), "the number of a span")]
    at, period = reader.offset, reader.u64("a period")
    if kind is BlockKind.EVERY and not PERIOD_MIN <= period <= PERIOD_MAX:
        reader.fail(f"expected from {PERIOD_MIN} to {PERIOD_MAX} nanoseconds, found {period}", at)
    slots = reader.below(SLOTS_MAX + 1, "the number of variables")
    body = _TreeReader(reader, around, slots).statement()
    return TypedBlock(ToolBlock(kind, Block((), span), span, written, period), body, slots)
