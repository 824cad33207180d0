"""
The self-describing items of a log buffer: a token byte, a 16-bit length or count, and the data.

Words that ``log <count>`` wrote have no prefix. A buffer is therefore assumed to describe itself only if it can be
split into items without a remainder. This is a heuristic; a template describes the data exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, UNSEEN_ENTRY, Token

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder

__all__ = [
    "CUT_ITEM",
    "ITEM_TOKENS",
    "KERNEL_STACK",
    "UNSEEN",
    "USER_STACK",
    "ItemHead",
    "LogItem",
    "is_unseen_entry",
    "item_head",
    "split_items",
]

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
    """Return whether a fault's address is UNSEEN_ENTRY: the handler ran at a return whose entry was not seen."""
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
    """Return the items of a log buffer; None if it is empty or does not consist of items."""
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
