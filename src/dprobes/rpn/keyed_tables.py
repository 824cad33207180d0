"""
Keyed tables as data: the model of the header statement ``table =``, and its text form.

A table maps keys to values and is updated at the hit. ``dprobes.keyed.table_layout`` defines the layout of keys and
values in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Self, assert_never

from dprobes.errors import EngineError
from dprobes.globs import compile_glob
from dprobes.rpn.instruction_set import KERNEL_FRAMES_MAX, PROCESS_NAME_SIZE, USER_FRAMES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.instruction_set import Row
    from dprobes.source_text import Span

__all__ = [
    "BUCKETS_MAX",
    "BYTES_SIZE",
    "FAULTS",
    "HIST_BUCKETS",
    "KEYS_MAX",
    "KEY_SIZE_MAX",
    "MEMORY_MAX",
    "ROOM",
    "ROOM_MAX",
    "STRING_SIZE",
    "STRING_SIZE_MAX",
    "TABLES_MAX",
    "UNNAMED",
    "VALUE_KINDS",
    "Key",
    "KeyKind",
    "Range",
    "Table",
    "TableKind",
    "Unit",
    "operated_table",
    "table_of",
    "tables_matching",
]

TABLES_MAX, KEYS_MAX = 64, 8
"""Maximum number of tables in a program, and of key fields that identify an entry of a table."""

FAULTS = "__faults"
"""Name of the table of a DProbes C program in which handlers count the exceptions that end them."""

UNNAMED = "_"
"""Name of the unnamed table, which is shown as "@"."""

ROOM, ROOM_MAX = 4096, 1 << 20
"""Default and maximum number of entries for which a table has room."""

STRING_SIZE, STRING_SIZE_MAX = 64, 512
"""Default and maximum size of a string key field in bytes; longer strings are truncated."""

BYTES_SIZE = 16
"""Default size of a ``bytes`` key field in bytes."""

BUCKETS_MAX = 1000
"""Maximum number of buckets of a linear histogram, without the two for values below and above its range."""

HIST_BUCKETS = 128
"""Number of buckets of a power-of-two histogram: 64 for negative numbers, one for 0, 63 for positive numbers."""

KEY_SIZE_MAX = 4096
"""Maximum total size of the key fields of an entry in bytes."""

MEMORY_MAX = 64 << 20
"""Maximum size of the entries of a full table in bytes."""


class TableKind(Enum):
    """The kind of the value in an entry of a table; the enum value is the word in the statement."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    STATS = "stats"
    HIST = "hist"
    LHIST = "lhist"
    LAST = "last"

    @property
    def takes_value(self) -> bool:
        """True if ``tally`` pops a value."""
        return self is not TableKind.COUNT


class KeyKind(Enum):
    """The kind of a key field; the enum value is the word in the statement."""

    WORD = "word"
    SIGNED = "signed"
    """A signed word, which is sign-extended to the 64 bits of the table."""
    ADDRESS = "address"
    STRING = "str"
    BYTES = "bytes"
    """Bytes of memory; the size in brackets is their number."""
    COMM = "comm"
    USER_STACK = "ustack"
    KERNEL_STACK = "kstack"
    LONG = "long"
    """A number of 64 bits; in programs with 32-bit words it takes two cells, the low word on top."""
    SIGNED_LONG = "slong"
    """A signed number of 64 bits, in cells as for ``LONG``."""
    TEXT = "text"
    """A string in cells, the first bytes in the low bits of the top cell."""
    CUT_STRING = "cutstr"
    """A string in memory that marks truncation: if it fills its room, the last byte only marks the truncation."""
    CUT_TEXT = "cuttext"
    """A string in cells that marks truncation as ``CUT_STRING`` does."""
    FRAMES = "frames"
    """A call stack of the kernel as addresses in cells, the innermost frame on top."""
    USER_FRAMES = "uframes"
    """A call stack of a program in cells: the process id on top, then the addresses, the innermost frame first."""

    @property
    def is_string(self) -> bool:
        """True if the key field is a NUL-terminated string."""
        return self is KeyKind.COMM or self.is_string_in_memory or self.is_string_in_cells

    @property
    def is_string_in_memory(self) -> bool:
        """True if the key field is a string that is read at an address, up to its NUL."""
        return self in (KeyKind.STRING, KeyKind.CUT_STRING)

    @property
    def is_string_in_cells(self) -> bool:
        """True if the key field is a string whose bytes are in cells of the RPN stack."""
        return self in (KeyKind.TEXT, KeyKind.CUT_TEXT)

    @property
    def is_in_memory_order(self) -> bool:
        """True if an entry stores the bytes in the order of memory. False if it stores numbers."""
        return self.is_string or self is KeyKind.BYTES

    @property
    def is_kernel_stack(self) -> bool:
        """True if the key field is a call stack of the kernel."""
        return self in (KeyKind.KERNEL_STACK, KeyKind.FRAMES)

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The default and the maximum of the number in brackets after the word, or None if the kind takes no size."""
        return _SIZES.get(self)


_SIZES = {
    KeyKind.STRING: (STRING_SIZE, STRING_SIZE_MAX),
    KeyKind.BYTES: (BYTES_SIZE, STRING_SIZE_MAX),
    KeyKind.USER_STACK: (USER_FRAMES_MAX, USER_FRAMES_MAX),
    KeyKind.KERNEL_STACK: (KERNEL_FRAMES_MAX, KERNEL_FRAMES_MAX),
    KeyKind.TEXT: (STRING_SIZE, STRING_SIZE_MAX),
    KeyKind.CUT_STRING: (STRING_SIZE, STRING_SIZE_MAX),
    KeyKind.CUT_TEXT: (STRING_SIZE, STRING_SIZE_MAX),
    KeyKind.FRAMES: (KERNEL_FRAMES_MAX, KERNEL_FRAMES_MAX),
    KeyKind.USER_FRAMES: (USER_FRAMES_MAX, USER_FRAMES_MAX),
}

VALUE_KINDS = (
    KeyKind.LONG,
    KeyKind.STRING,
    KeyKind.COMM,
    KeyKind.TEXT,
    KeyKind.CUT_STRING,
    KeyKind.CUT_TEXT,
    KeyKind.USER_STACK,
    KeyKind.KERNEL_STACK,
    KeyKind.FRAMES,
    KeyKind.USER_FRAMES,
)
"""Kinds that a kept value may have, apart from a word."""


class Unit(Enum):
    """The unit of a keyed table's values, which text output shows."""

    NONE = ""
    NANOSECONDS = "ns"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Key:
    """Key field of a table, or the value of an entry. ``size`` is in bytes, or in frames for a call stack."""

    kind: KeyKind
    size: int = 0

    @classmethod
    def parsed(cls, text: str) -> Self:
        """
        Return the key field that a string describes, the inverse of ``str``.

        Raise ``ValueError`` if it describes none.
        """
        word, bracket, size = text.removesuffix("]").partition("[")
        kind = KeyKind(word)
        least, largest = (1, kind.sizes[1]) if kind.sizes is not None else (0, 0)
        key = cls(kind, int(size) if bracket else (kind.sizes or (0, 0))[0])
        if not least <= key.size <= largest or bool(bracket) > (kind.sizes is not None):
            raise ValueError(f"'{text}' describes no key")
        return key

    @property
    def bytes(self) -> int:
        """Size of the field in an entry in bytes, a multiple of 8. A string has room for its NUL."""
        match self.kind:
            case KeyKind.STRING | KeyKind.TEXT | KeyKind.CUT_STRING | KeyKind.CUT_TEXT:
                return (self.size // 8 + 1) * 8
            case KeyKind.BYTES:
                return -(-self.size // 8) * 8
            case KeyKind.COMM:
                return PROCESS_NAME_SIZE
            case KeyKind.USER_STACK | KeyKind.USER_FRAMES:
                return 8 * (1 + self.size)
            case KeyKind.KERNEL_STACK | KeyKind.FRAMES:
                return 8 * self.size
            case KeyKind.WORD | KeyKind.SIGNED | KeyKind.ADDRESS | KeyKind.LONG | KeyKind.SIGNED_LONG:
                return 8
            case kind:
                assert_never(kind)

    def can_be_kept_by(self, kind: TableKind) -> bool:
        """
        Return whether a table of this kind may have the field as its ``value =``.

        A 64-bit number suits every kind of table that takes a value; the other ``VALUE_KINDS`` suit ``last`` only.
        """
        if self.kind is KeyKind.LONG:
            return kind.takes_value
        return kind is TableKind.LAST and self.kind in VALUE_KINDS

    def popped(self, word_size: int) -> int:
        """Return the number of cells that ``tally`` pops for the field."""
        match self.kind:
            case KeyKind.WORD | KeyKind.SIGNED | KeyKind.ADDRESS | KeyKind.STRING | KeyKind.BYTES | KeyKind.CUT_STRING:
                return 1
            case KeyKind.LONG | KeyKind.SIGNED_LONG | KeyKind.FRAMES | KeyKind.USER_FRAMES:
                return self.bytes // word_size
            case KeyKind.TEXT | KeyKind.CUT_TEXT:
                return self.bytes // word_size
            case KeyKind.COMM | KeyKind.USER_STACK | KeyKind.KERNEL_STACK:
                return 0
            case kind:
                assert_never(kind)

    def __str__(self) -> str:
        sizes = self.kind.sizes
        return f"{self.kind.value}[{self.size}]" if sizes is not None and self.size != sizes[0] else self.kind.value


class Range(NamedTuple):
    """Range of a linear histogram: buckets of ``step`` from ``low`` (included) to ``high`` (excluded)."""

    low: int
    high: int
    step: int

    @property
    def buckets(self) -> int:
        """The number of buckets, without the two for values below and above the range."""
        return -(-(self.high - self.low) // self.step)


@dataclass(frozen=True, slots=True)
class Table:
    """
    Keyed table of up to ``room`` entries.

    ``value`` describes the value that ``tally`` pops, or is None for a word.
    """

    name: str
    kind: TableKind
    keys: tuple[Key, ...] = ()
    range: Range | None = None
    room: int = ROOM
    unit: Unit = Unit.NONE
    span: Span | None = field(default=None, compare=False, repr=False)
    value: Key | None = None

    @property
    def parts(self) -> tuple[Key, ...]:
        """The key fields, followed by the kept value unless it is a word."""
        return self.keys if self.value is None else (*self.keys, self.value)

    @property
    def keeps_bytes(self) -> bool:
        """True if the values are strings or call stacks, not numbers."""
        return self.value is not None and self.value.kind is not KeyKind.LONG

    @property
    def takes_additions(self) -> bool:
        """True if ``add table`` adds to the values: numbers that ``tally`` sets, whose keys are known at the hit."""
        return self.kind is TableKind.LAST and not self.keeps_bytes and not self.has_user_stack

    @property
    def kept_bytes(self) -> int:
        """Size in bytes of a value that is a string or a call stack, or 0 if it is a number."""
        return self.value.bytes if self.value is not None and self.keeps_bytes else 0

    def key_cells(self, word_size: int) -> int:
        """Return the number of cells of the RPN stack that the key fields occupy."""
        return sum(key.popped(word_size) for key in self.keys)

    def tallied_cells(self, word_size: int) -> int:
        """Return the number of cells that ``tally`` pops for the value, in addition to ``key_cells``."""
        if self.value is not None:
            return self.value.popped(word_size)
        return int(self.kind.takes_value)

    def shown_cells(self, word_size: int) -> int:
        """Return the number of cells that ``push table`` pushes for a value."""
        return 1 if self.value is None else self.value.bytes // word_size

    @property
    def capacity(self) -> int:
        """The maximum number of entries: ``room``, or 1 for a table without key fields."""
        return self.room if self.keys else 1

    @property
    def has_user_stack(self) -> bool:
        """True if a key field or the kept value is a user call stack."""
        return any(part.kind is KeyKind.USER_STACK for part in self.parts)

    @property
    def key_size(self) -> int:
        """The size of all key fields in bytes."""
        return sum(key.bytes for key in self.keys)

    @property
    def value_cells(self) -> int:
        """The number of 64-bit words of the value in an entry."""
        match self.kind:
            case TableKind.LAST:
                return max(self.kept_bytes // 8, 1)
            case TableKind.AVG:
                return 2
            case TableKind.STATS:
                return 4
            case TableKind.HIST:
                return HIST_BUCKETS
            case TableKind.LHIST:
                assert self.range is not None
                return 2 + self.range.buckets
            case TableKind.COUNT | TableKind.SUM | TableKind.MIN | TableKind.MAX:
                return 1
            case kind:
                assert_never(kind)

    @property
    def memory(self) -> int:
        """The size in bytes of the entries of a full table."""
        return self.capacity * (8 + self.key_size + 8 * self.value_cells)

    def __str__(self) -> str:
        """Return the operand of ``table =``, from which the parser makes an equal table."""
        kind = self.kind.value
        if self.range is not None:
            kind += f"({self.range.low}, {self.range.high}, {self.range.step})"
        parts = [self.name, kind, *map(str, self.keys)]
        if self.room != ROOM:
            parts.append(f"room = {self.room}")
        if self.unit is not Unit.NONE:
            parts.append(f"unit = {self.unit.value}")
        if self.value is not None:
            parts.append(f"value = {self.value}")
        return ", ".join(parts)


def tables_matching(pattern: str, tables: Sequence[Table]) -> list[int]:
    """Return the numbers of the tables whose names match a glob pattern; raise ``EngineError`` if none matches."""
    matches = compile_glob(pattern).match
    found = [number for number, table in enumerate(tables) if matches(table.name)]
    if not found:
        names = ", ".join(table.name for table in tables)
        raise EngineError(
            f"no keyed table is called '{pattern}'", hint=f"there are: {names}" if names else "the program has none"
        )
    return found


def operated_table(row: Row, operand: object, tables: Sequence[Table]) -> Table | None:
    """Return the table on which an instruction operates; None if there is none, or if its kind is not suitable."""
    table = table_of(operand, tables)
    return None if table is None or (row.operator == "add" and not table.takes_additions) else table


def table_of(operand: object, tables: Sequence[Table]) -> Table | None:
    """Return the table whose name or number is ``operand``, or None if there is none."""
    match operand:
        case int():
            return tables[operand] if 0 <= operand < len(tables) else None
        case str():
            return next((table for table in tables if table.name == operand), None)
    return None
