"""
The self-describing items of a log buffer: a token byte, a 16-bit length or count, and the data.

Words that ``log <count>`` wrote have no prefix, so a buffer that holds any is taken to describe itself only if it can
be cut into items without a remainder. That is a guess; a template knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.rpn.isa import Token

if TYPE_CHECKING:
    from dprobes.record.layout import ByteOrder

__all__ = ["LogItem", "split_items"]

_BYTES = {Token.MEMORY: "memory", Token.STRING: "string"}
_FAULTS = {Token.ADDRESS_FAULT: "fault", Token.SELECTOR_FAULT: "selector fault"}
_WORDS = {
    Token.STACK_COUNT: "stack",
    Token.LOCAL_VARIABLES: "lv",
    Token.GLOBAL_VARIABLES: "gv",
    Token.CPU_VARIABLES: "cv",
}


@dataclass(frozen=True, slots=True)
class LogItem:
    """Hold one item: bytes for ``memory`` and ``string``, the address or selector of a fault, words for the rest."""

    kind: str
    value: bytes | int | tuple[int, ...]

    @property
    def text(self) -> str:
        """The item for people: a string as text, other bytes in hexadecimal, an address or words as numbers."""
        match self.value:
            case bytes() as value:
                return value.decode("utf-8", "backslashreplace") if self.kind == "string" else value.hex(" ")
            case int() as value:
                return f"<{self.kind} at {value:#x}>"
            case words:
                return " ".join(str(word) for word in words)


def split_items(data: bytes, word_size: int, byte_order: ByteOrder) -> list[LogItem] | None:
    """Return the items of a log buffer, or None if it is empty or holds something else."""
    items = []
    position = 0
    while position < len(data):
        if position + 3 > len(data):
            return None
        token = data[position]
        length = int.from_bytes(data[position + 1 : position + 3], byte_order)
        size = length * word_size if token in _WORDS else length
        position += 3
        body = data[position : position + size]
        position += size
        if len(body) < size:
            return None
        if token in _BYTES:
            items.append(LogItem(_BYTES[Token(token)], body))
        elif token in _FAULTS and size == word_size:
            items.append(LogItem(_FAULTS[Token(token)], int.from_bytes(body, byte_order)))
        elif token in _WORDS:
            words = (int.from_bytes(body[n : n + word_size], byte_order) for n in range(0, size, word_size))
            items.append(LogItem(_WORDS[Token(token)], tuple(words)))
        else:
            return None
    return items or None
