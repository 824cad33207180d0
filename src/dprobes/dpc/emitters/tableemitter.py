"""Keyed tables as RPN: their keys and what they keep in cells, and comparisons of strings that they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.dpc.typedtree import typed
from dprobes.rpn.tables import Key, KeyKind

if TYPE_CHECKING:
    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.types.ctype import CType

__all__ = ["TableEmitter"]


class Values(Protocol):
    """Write values."""

    def exact(self, value: typed.Value) -> None:
        """Push a value."""

    def width(self, type_: CType) -> int:
        """Return how many cells a value of a type takes."""

    def branch(self, condition: typed.Value, label: str, *, when: bool) -> None:
        """Go to a label if a condition is as ``when`` says."""

    def landing(self, label: str) -> None:
        """Put the label of a branch here."""


class TableEmitter:
    """Write what tables take and give."""

    def __init__(self, values: Values, writer: Writer, word_size: int) -> None:
        self._values = values
        self._w = writer
        self._word_size = word_size

    def cells(self, parts: tuple[typed.Argument, ...]) -> int:
        """Push keys of a table, or what it keeps; return how many cells they take."""
        cells = 0
        for part in parts:
            match part:
                case typed.Text(address) | typed.Bytes(address):
                    self._values.exact(address)
                    cells += 1
                case typed.Kept(table, keys, count, _, padding):
                    for _ in range(padding):
                        self._w.number(0)
                    self._w.op(f"push table, {table}", count - self.cells(keys))
                    cells += padding + count
                case typed.Literal() | typed.TextChoice():
                    cells += self._text(part)
                case typed.CommName() | typed.StackTrace() | typed.NetworkAddress():
                    pass
                case _:
                    self._values.exact(part)
                    cells += self._values.width(part.type)
        return cells

    def _text(self, text: typed.Literal | typed.TextChoice) -> int:
        """Push the bytes of a text in quotes, its beginning on top; return how many cells they take."""
        w, size = self._w, self._word_size
        if isinstance(text, typed.Literal):
            content = text.text.encode().ljust(Key(KeyKind.TEXT, text.limit).bytes, b"\0")
            places = range(0, len(content), size)
            for place in reversed(places):
                w.number(int.from_bytes(content[place : place + size], "little"))
            return len(places)
        other, end = w.new_label(), w.new_label()
        self._values.branch(text.condition, other, when=False)
        cells = self._text(text.yes)
        w.op(f"jmp {end}")
        self._values.landing(other)
        w.depth -= cells
        self._text(text.no)
        w.label(end)
        return cells

    def differs(self, test: typed.KeptTest) -> None:
        """Push 0 if what a table keeps is the text that it is compared with, else another number."""
        w, size, text = self._w, self._word_size, test.text.encode()
        if not test.is_prefix:
            text += b"\0"  # zeros are behind it
        self.cells((test.kept,))
        words = [text[start : start + size] for start in range(0, len(text), size)]
        for number, word in enumerate(words):
            if number:
                w.op("xchg")
            if len(word) < size:
                w.op(f"pzl {8 * len(word)}")
            w.number(int.from_bytes(word, "little"))
            w.op("xor", -1)
            if number:
                w.op("or", -1)
        if below := test.kept.cells - max(len(words), 1):
            w.op(f"pop tsp, {below}", -1)
            w.drop(below - 1)
        if not words:  # everything begins with nothing
            w.number(0)
            w.op("and", -1)
