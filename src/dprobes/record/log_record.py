"""
The binary record of the paper (seed 000, section 5): the one place where its layout is written.

::

    u32 flags | the items whose flag is set, in this order | the log buffer

    flag    item                    type
    0x0001  major code              u32
    0x0002  minor code              u32
    0x0004  cpu                     u32
    0x0008  pid                     u32
    0x0010  uid                     u32
    0x0020  cs                      u32
    0x0040  ip                      u32, with WIDE u64
    0x0080  ss                      u32
    0x0100  sp                      u32, with WIDE u64
    0x0200  time                    u64, nanoseconds of CLOCK_MONOTONIC
    0x0400  process name            up to 15 bytes and a NUL
    0x2000  thread id               u32, not in the paper

Three flags describe the record instead of an item: 0x0800 WIDE, 8-byte words; 0x1000 STACK_TRACE, the log buffer is a
stack trace; 0x4000 CUT (not in the paper), the log buffer had no room for what comes after the data. Only the low 16
bits are used, so that a reader can detect the byte order, which is the target's, from the flag word. A record without
any flag, which no engine produces, is read as little-endian.

The log buffer may consist of self-describing items: a token byte, a 16-bit length or count, and the data. Words that
``log <count>`` wrote have no prefix. A buffer is therefore assumed to describe itself only if it can be split into
items without a remainder. This is a heuristic; a template describes the data exactly.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from dprobes.arch import ByteOrder
from dprobes.errors import FormatError
from dprobes.escapes import CUT
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, UNSEEN_ENTRY, Token

if TYPE_CHECKING:
    from dprobes.record.record_origin import Place

__all__ = [
    "ABOUT_RECORDS",
    "CODES_END",
    "CUT_ITEM",
    "ITEM_TOKENS",
    "KERNEL_STACK",
    "PROCESS_NAME_MAX",
    "UNSEEN",
    "USER_STACK",
    "ByteOrder",
    "Item",
    "ItemHead",
    "LogItem",
    "LogRecord",
    "LoggedItems",
    "codes_in",
    "decode_record",
    "encode_record",
    "flag_word",
    "header_struct",
    "is_unseen_entry",
    "item_head",
    "split_items",
    "time_of",
]

_T = TypeVar("_T")

PROCESS_NAME_MAX = 15
"""Maximum length of a process name in bytes, without its NUL: TASK_COMM_LEN of the kernel less one."""


class Item(IntFlag):
    """Flags of the items in a record's header, and flags that describe the record."""

    MAJOR = 0x0001
    MINOR = 0x0002
    CPU = 0x0004
    PID = 0x0008
    UID = 0x0010
    CS = 0x0020
    IP = 0x0040
    SS = 0x0080
    SP = 0x0100
    TIME = 0x0200
    PROCESS_NAME = 0x0400
    WIDE = 0x0800
    STACK_TRACE = 0x1000
    TID = 0x2000
    CUT = 0x4000


ABOUT_RECORDS = Item.WIDE | Item.STACK_TRACE | Item.CUT
"""Flags that describe the record. They are not items that users can request."""

FIXED_ITEMS = (
    (Item.MAJOR, "major"),
    (Item.MINOR, "minor"),
    (Item.CPU, "cpu"),
    (Item.PID, "pid"),
    (Item.UID, "uid"),
    (Item.CS, "cs"),
    (Item.IP, "ip"),
    (Item.SS, "ss"),
    (Item.SP, "sp"),
    (Item.TIME, "time"),
)
"""Items before the process name, in the order of the record, with their fields of ``LogRecord``."""

_CODES = {Item.IP: "Q", Item.SP: "Q", Item.TIME: "Q"}


class LogRecord(NamedTuple):
    """
    Decoded record, in which an item that the record lacks is None.

    There may be a million records per second, and a named tuple is created several times faster than a dataclass.
    ``time`` is CLOCK_MONOTONIC in nanoseconds. If ``is_stack_trace`` is True, ``data`` is a stack trace. If ``is_cut``
    is True, the log buffer (``logmax``) had no room for what comes after ``data``. ``place`` is not part of a record's
    bytes; it is added where the probepoint is known.
    """

    major: int | None = None
    minor: int | None = None
    cpu: int | None = None
    pid: int | None = None
    uid: int | None = None
    cs: int | None = None
    ip: int | None = None
    ss: int | None = None
    sp: int | None = None
    time: int | None = None
    process_name: str | None = None
    tid: int | None = None
    data: bytes = b""
    word_size: Literal[4, 8] = 8
    byte_order: ByteOrder = "little"
    is_stack_trace: bool = False
    is_cut: bool = False
    place: Place | None = None

    @property
    def logged(self) -> LoggedItems:
        """Header items with types that exclude None. Access to a missing item raises ``FormatError``."""
        return LoggedItems(self)

    def words(self, size: int | None = None) -> tuple[int, ...]:
        """
        Return ``data`` as unsigned numbers of ``size`` bytes, by default words, the format of ``log <count>``.

        An incomplete number at the end is omitted.
        """
        size = size or self.word_size
        data, order = self.data, self.byte_order
        return tuple(int.from_bytes(data[n : n + size], order) for n in range(0, len(data) // size * size, size))

    def to_dict(self) -> dict[str, object]:
        """
        Return the contents of the record by name: header items, the place, and the values of its data.

        Names are those of the columns of SQL tables, but ``time`` is CLOCK_MONOTONIC in nanoseconds. The name of a
        value comes from a template, or from the logged expression: ``arg0``; a duplicate name gets a number. Data
        without a description appear as ``data``, and as ``items`` if they describe themselves.

        If a template prints an address by name, there is also a value ``NAME_name``; for a call stack it is
        ``NAME_names``. These names need the mappings of the process, so the record must have the items ``pid`` and
        ``time``.
        """
        header: dict[str, object] = {
            name: value for name, value in zip(self._fields[:_DATA], self, strict=False) if value is not None
        }
        reader = None
        if (place := self.place) is not None:
            reader = place.reader
            function = place.routine if reader is None else reader.function(self)
            header |= {"module": place.module, "symbol": place.symbol, "function": function}
            header["at_return"] = place.at_return
        if self.is_cut:
            header["is_cut"] = True
        named = None if reader is None else reader.values(self)
        if named is None:
            items = [(item.kind, item.value) for item in self.items()]
            return {**header, **({"items": items} if items else {}), "data": self.data}
        for name, value in named.items():
            unique, number = name, 2
            while unique in header:
                unique, number = f"{name}_{number}", number + 1
            header[unique] = value
        return header

    def items(self) -> tuple[LogItem, ...]:
        """
        Return the items that ``log str``, ``log mrf``, ``log lv`` and similar instructions logged.

        Return an empty tuple if the data do not consist of such items. If ``is_cut`` is True, the last item marks the
        truncation.
        """
        if self.is_stack_trace:
            return ()
        items = split_items(self.data, self.word_size, self.byte_order) or []
        if self.is_cut and (items or not self.data):
            items.append(LogItem(CUT_ITEM, CUT.encode()))
        return tuple(items)


_DATA = LogRecord._fields.index("data")


class LoggedItems:
    """
    Header items of a record, with the types that they have if they were logged.

    Access to an item that the record lacks raises ``FormatError``. The items of a record are chosen when a program is
    inserted.
    """

    __slots__ = ("_record",)

    def __init__(self, record: LogRecord) -> None:
        self._record = record

    @property
    def major(self) -> int:
        """The major code of the program."""
        return _there(self._record.major, "major")

    @property
    def minor(self) -> int:
        """The minor code of the probepoint."""
        return _there(self._record.minor, "minor")

    @property
    def cpu(self) -> int:
        """The number of the CPU on which the hit occurred."""
        return _there(self._record.cpu, "cpu")

    @property
    def pid(self) -> int:
        """The process id."""
        return _there(self._record.pid, "pid")

    @property
    def tid(self) -> int:
        """The thread id."""
        return _there(self._record.tid, "tid")

    @property
    def uid(self) -> int:
        """The real user id of the process."""
        return _there(self._record.uid, "uid")

    @property
    def cs(self) -> int:
        """The code segment selector."""
        return _there(self._record.cs, "cs")

    @property
    def ip(self) -> int:
        """The address of the instruction."""
        return _there(self._record.ip, "ip")

    @property
    def ss(self) -> int:
        """The stack segment selector."""
        return _there(self._record.ss, "ss")

    @property
    def sp(self) -> int:
        """The stack pointer."""
        return _there(self._record.sp, "sp")

    @property
    def time(self) -> int:
        """The time, CLOCK_MONOTONIC in nanoseconds."""
        return _there(self._record.time, "time")

    @property
    def process_name(self) -> str:
        """The name of the process."""
        return _there(self._record.process_name, "process_name")


def _there(value: _T | None, name: str) -> _T:
    if value is None:
        raise FormatError(
            f"the record carries no item '{name}'",
            hint=f"have it logged: items=Item.{name.upper()}, or --log of the command line",
        )
    return value


@cache
def header_struct(flags: int, byte_order: ByteOrder) -> struct.Struct:
    """Return the ``struct`` of the flag word and the header items before the process name that ``flags`` announce."""
    wide = bool(flags & Item.WIDE)
    codes = "".join(
        _CODES.get(item, "I") if wide or item is Item.TIME else "I" for item, _ in FIXED_ITEMS if flags & item
    )
    return struct.Struct(("<" if byte_order == "little" else ">") + "I" + codes)


# Encode and decode records.

_KNOWN = sum(Item)


def encode_record(record: LogRecord) -> bytes:
    """Return the bytes of a record, without the items that are None."""
    flags = Item.WIDE if record.word_size == 8 else Item(0)
    if record.is_stack_trace:
        flags |= Item.STACK_TRACE
    if record.is_cut:
        flags |= Item.CUT
    values = []
    for item, name in FIXED_ITEMS:
        if (value := getattr(record, name)) is not None:
            flags |= item
            values.append(value)
    tail = b""
    if record.process_name is not None:
        flags |= Item.PROCESS_NAME
        encoded = record.process_name.encode("utf-8", "surrogateescape").partition(b"\0")[0]
        tail = encoded[:PROCESS_NAME_MAX] + b"\0"
    if record.tid is not None:
        flags |= Item.TID
        tail += record.tid.to_bytes(4, record.byte_order)
    return header_struct(int(flags), record.byte_order).pack(int(flags), *values) + tail + record.data


def decode_record(data: bytes, place: Place | None = None) -> LogRecord:
    """Decode a record of the probepoint at ``place``; raise ``FormatError`` if it is invalid."""
    if len(data) < 4:
        raise FormatError(f"a record of {len(data)} bytes has no flag word", offset=0)
    flags, byte_order = flag_word(data)
    shape = _shape(flags, byte_order)
    position = shape.layout.size
    if len(data) < position:
        raise FormatError(f"a record needs {position} bytes, found {len(data)}", offset=len(data))
    values = shape.template.copy()
    for field, value in zip(shape.fields, shape.layout.unpack_from(data)[1:], strict=True):
        values[field] = value
    if shape.has_process_name:
        end = data.find(b"\0", position, position + PROCESS_NAME_MAX + 1)
        if end < 0:
            raise FormatError("the process name of a record has no end", offset=position)
        values[_PROCESS_NAME] = data[position:end].decode("utf-8", "surrogateescape")
        position = end + 1
    if shape.has_tid:
        if position + 4 > len(data):
            raise FormatError("a record ends in its thread id", offset=position)
        values[_TID] = int.from_bytes(data[position : position + 4], byte_order)
        position += 4
    values[_RECORD_DATA] = data[position:]
    values[_PLACE] = place
    return LogRecord._make(values)


_PROCESS_NAME, _TID, _RECORD_DATA, _PLACE = (
    LogRecord._fields.index(name) for name in ("process_name", "tid", "data", "place")
)


def flag_word(data: bytes) -> tuple[int, ByteOrder]:
    """Return the flag word of a record, and the byte order that it implies. ``data`` has at least 4 bytes."""
    # Only 16 bits are used: the half of the word that is zero shows the byte order.
    byte_order: ByteOrder = "little" if data[2:4] == b"\0\0" else "big"
    return int.from_bytes(data[:4], byte_order), byte_order


CODES_END = 12
"""Size in bytes of the flag word, major and minor code at the beginning of a record that has both codes."""

_CODES_WORDS = {"little": struct.Struct("<4xII"), "big": struct.Struct(">4xII")}


class BeginCodes(NamedTuple):
    """The flag word and the codes that a group of records shares."""

    flags: int
    byte_order: ByteOrder
    major: int
    minor: int

    @property
    def word_size(self) -> Literal[4, 8]:
        """Size of a word in bytes."""
        return 8 if self.flags & Item.WIDE else 4


def codes_in(begin: bytes) -> BeginCodes | None:
    """Return the decoded first ``CODES_END`` bytes of a record, or None if it lacks a code or is shorter."""
    flags, byte_order = flag_word(begin.ljust(CODES_END, b"\0"))
    if len(begin) < CODES_END or not flags & Item.MAJOR or not flags & Item.MINOR:
        return None
    return BeginCodes(flags, byte_order, *_CODES_WORDS[byte_order].unpack_from(begin))


def time_of(data: bytes) -> int | None:
    """
    Return the time of an encoded record, in nanoseconds of CLOCK_MONOTONIC, without decoding the rest.

    Return None if the record has no time, or if the bytes are not a record.
    """
    flags, byte_order = flag_word(data)
    if not flags & Item.TIME or flags & ~_KNOWN:
        return None
    end = header_struct(flags, byte_order).size  # the last of the fixed items
    return int.from_bytes(data[end - 8 : end], byte_order) if len(data) >= end else None


class _Shape(NamedTuple):
    """
    Layout of records with one flag word, computed once for each flag word that occurs.

    ``fields`` has the indices in a LogRecord of the unpacked values. ``template`` has all other values.
    """

    layout: struct.Struct
    fields: tuple[int, ...]
    has_process_name: bool
    has_tid: bool
    template: list[Any]


@cache
def _shape(flags: int, byte_order: ByteOrder) -> _Shape:
    if flags & ~_KNOWN:
        raise FormatError(f"unknown flags {flags & ~_KNOWN:#x} in a record", offset=0)
    record = LogRecord(
        word_size=8 if flags & Item.WIDE else 4,
        byte_order=byte_order,
        is_stack_trace=bool(flags & Item.STACK_TRACE),
        is_cut=bool(flags & Item.CUT),
    )
    return _Shape(
        header_struct(flags, byte_order),
        tuple(LogRecord._fields.index(name) for item, name in FIXED_ITEMS if flags & item),
        bool(flags & Item.PROCESS_NAME),
        bool(flags & Item.TID),
        list(record),
    )


KERNEL_STACK, USER_STACK = "kstack", "ustack"
"""The kinds of the items that are call stacks."""

CUT_ITEM = "cut"
"""The kind of the item at the end of a truncated log buffer."""

UNSEEN = "entry not seen"
"""The kind of the item that replaces a value captured at the entry of a call, if only the return was seen."""

_TEXT = "string"
_BYTES = {Token.MEMORY: "memory", Token.STRING: _TEXT}
_FAULTS = {Token.ADDRESS_FAULT: "fault", Token.SELECTOR_FAULT: "selector fault"}
_WORDS = {
    Token.STACK_COUNT: "stack",
    Token.LOCAL_VARIABLES: "lv",
    Token.GLOBAL_VARIABLES: "gv",
    Token.CPU_VARIABLES: "cv",
    Token.THREAD_VARIABLES: "tv",
    Token.KERNEL_STACK: KERNEL_STACK,
    Token.USER_STACK: USER_STACK,
}
ITEM_TOKENS = frozenset((*_BYTES, *_FAULTS, *_WORDS))
"""The token bytes that begin items."""


@dataclass(frozen=True, slots=True)
class LogItem:
    """
    An item of a log buffer.

    The value is bytes for ``memory`` and ``string``, the address or selector of a fault, and words for other kinds.
    """

    kind: str
    value: bytes | int | tuple[int, ...]

    @property
    def text(self) -> str:
        """The item as text for users: a string as text, other bytes in hexadecimal, an address or words as numbers."""
        match self.value:
            case bytes() as value:
                return value.decode("utf-8", "backslashreplace") if self.kind in (_TEXT, CUT_ITEM) else value.hex(" ")
            case int() if self.kind == UNSEEN:
                return f"<{UNSEEN}>"
            case int() as value:
                return f"<{self.kind} at {value:#x}>"
            case words if self.kind in (KERNEL_STACK, USER_STACK):
                return " ".join(f"{word:#x}" for word in words)
            case words:
                return " ".join(str(word) for word in words)


class ItemHead(NamedTuple):
    """The prefix of an item: its token, the offset of its data, and the announced size of the data in bytes."""

    token: Token
    start: int
    size: int


def is_unseen_entry(address: int, word_size: int) -> bool:
    """Return True if a fault's address is UNSEEN_ENTRY: the handler ran at a return whose entry was not seen."""
    return address == UNSEEN_ENTRY % (1 << 8 * word_size)


def item_head(data: bytes, position: int, word_size: int, byte_order: ByteOrder) -> ItemHead | None:
    """
    Return the prefix at byte ``position`` of a log buffer, or None if no item begins there.

    The announced data may extend past the end of the buffer.
    """
    start = position + ITEM_PREFIX_SIZE
    if start > len(data) or data[position] not in ITEM_TOKENS:
        return None
    token = Token(data[position])
    length = int.from_bytes(data[position + 1 : start], byte_order)
    return ItemHead(token, start, length * word_size if token in _WORDS else length)


def split_items(data: bytes, word_size: int, byte_order: ByteOrder) -> list[LogItem] | None:
    """Return the items of a log buffer, or None if it is empty or does not consist of items."""
    items = []
    position = 0
    while position < len(data):
        head = item_head(data, position, word_size, byte_order)
        if head is None:
            return None
        token, start, size = head
        position = start + size
        body = data[start:position]
        if len(body) < size:
            return None
        if token in _BYTES:
            items.append(LogItem(_BYTES[token], body))
        elif token in _WORDS:
            words = (int.from_bytes(body[n : n + word_size], byte_order) for n in range(0, size, word_size))
            items.append(LogItem(_WORDS[token], tuple(words)))
        elif size == word_size:
            address = int.from_bytes(body, byte_order)
            is_unseen = token is Token.ADDRESS_FAULT and is_unseen_entry(address, word_size)
            items.append(LogItem(UNSEEN if is_unseen else _FAULTS[token], address))
        else:
            return None
    return items or None
