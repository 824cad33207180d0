"""Writer of RPN source: lines with the spans of C source from which they were compiled, and the stack's depth."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.typedtree.typed_values import VariableKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.source_text import Span

__all__ = ["INSTRUCTIONS", "Line", "Writer"]

INSTRUCTIONS = {
    VariableKind.LOCAL: "lv",
    VariableKind.GLOBAL: "gv",
    VariableKind.PER_CPU: "cv",
    VariableKind.THREAD: "tv",
}
"""Operands of instructions that access variables, by kind of variable."""

_BINARY = frozenset(("add", "sub", "mul", "and", "or", "xor", "eq", "lt", "ltu", "shl", "shr"))
"""Instructions without an operand that replace two cells by one."""

_LASTS = re.compile(r"(exit|abort|remove|sx .*|ux)\Z")
_HARMLESS = re.compile(
    r"(//.*|L[0-9]+:|push (-?[0-9]\w*|sbp, .*|[lgct]v, .*)|pop (sbp|[lgct]v), .*|(inc|dec) [lgct]v, .*|setmin .*"
    r"|add|xchg)\Z"
)
"""Instructions that end a hit or set another exception handler, or before these raise no exception."""


def _effect(word: str, operand: str) -> int:
    """
    Return by how many cells an instruction, for values of one word, makes the stack deeper; negative for pops.

    ``mem`` and arrays pop one cell more.
    """
    if word == "ros":
        return -int(operand)
    is_indexed = operand in INSTRUCTIONS.values() or operand.startswith("mem")
    if word in ("push", "dup"):
        return 0 if is_indexed else 1
    if word == "pop":
        return -2 if is_indexed else -1
    return -1 if word in _BINARY and not operand else 0


class Line(NamedTuple):
    """Line of RPN source with the span of the C source from which it was compiled, or None."""

    text: str
    span: Span | None


class Writer:
    """
    Lines of a program, and the depth of its stack while they are written.

    ``depth`` is the number of cells above SBP: variables of blocks, then intermediate values. An exception leaves
    intermediate values on the stack, so ``settle`` must restore the depth afterwards.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.depth = 0
        self._labels = 0
        self._span: Span | None = None
        self._handlers: list[str] = []
        self._guard = ""
        """Label to which exceptions are known to jump, outside of ``catching``, or empty if unknown."""

    @contextmanager
    def at(self, span: Span | None) -> Iterator[None]:
        """Set, for the ``with`` block, the span of C source that written lines are marked with."""
        outer, self._span = self._span, span
        try:
            yield
        finally:
            self._span = outer

    def op(self, text: str, effect: int = 0) -> None:
        """Write an RPN instruction that makes the stack ``effect`` cells deeper, and update ``depth``."""
        self.lines.append(Line(f"    {text}", self._span))
        self.depth += effect
        if text.startswith("sx ") or text == "ux":
            self._guard = ""

    def code(self, text: str) -> None:
        """Write instructions that are separated by semicolons; ``depth`` follows from the instructions."""
        for each in text.split("; "):
            self.op(each, _effect(*each.partition(" ")[::2]))

    @property
    def is_catching(self) -> bool:
        """True if exceptions jump to a ``catch`` here."""
        return bool(self._handlers)

    def guard(self, label: str) -> None:
        """Write ``sx label``, which directs exceptions to a label, unless they already jump there."""
        if self._guard != label:
            self.op(f"sx {label}")
            self._guard = label

    def comment(self, text: str) -> None:
        """Write a line that is a comment of the RPN source."""
        self.lines.append(Line(f"    // {text}", self._span))

    def header(self, text: str) -> None:
        """Write a line without indentation: a statement of a program or probe header, or the start of a procedure."""
        self.lines.append(Line(text, self._span))

    def new_label(self) -> str:
        """Return a name for a new label, which ``label`` is to write."""
        self._labels += 1
        return f"L{self._labels}"

    def label(self, name: str) -> None:
        """Write a label before the next instruction; afterwards the current exception handler counts as unknown."""
        self.lines.append(Line(f"{name}:", self._span))
        self._guard = ""

    def number(self, value: int) -> None:
        """Write an instruction that pushes a number."""
        self.op(f"push {value if -9 <= value <= 4096 else f'{value:#x}'}", 1)

    def drop(self, count: int = 1) -> None:
        """Write instructions that drop the top ``count`` cells of the stack."""
        while count > 0:
            part = min(count, 255)
            self.op(f"ros {part}", -part)
            count -= part

    def settle(self, depth: int) -> None:
        """Write code that sets the depth of the stack to ``depth`` cells, from any depth at run time."""
        self.op(f"push {depth}", 1)
        self.op("save sbp", 1)
        self.op("sub", -1)
        self.op("restore tsp", -1)
        self.depth = depth

    @contextmanager
    def catching(self, label: str) -> Iterator[None]:
        """Direct exceptions in the ``with`` block to a label, and after it to that of the enclosing block, if any."""
        self._handlers.append(label)
        self.op(f"sx {label}")
        try:
            yield
        finally:
            self._handlers.pop()
            self.restore_handler()

    def restore_handler(self) -> None:
        """Write code that directs exceptions to the label of the innermost ``catching`` block, else to none."""
        self.op(f"sx {self._handlers[-1]}" if self._handlers else "ux")

    def drop_needless_handlers(self, first: int) -> None:
        """Remove, from line ``first`` on, instructions that clear the exception handler if no exception can occur."""
        self.lines[first:] = [
            line
            for number, line in enumerate(self.lines[first:], first)
            if line.text != "    ux" or not self._is_safe(number + 1)
        ]

    def _is_safe(self, number: int) -> bool:
        """Return whether no instruction from a line to the end of the hit or the next handler raises an exception."""
        for line in self.lines[number:]:
            text = line.text.strip()
            if _LASTS.match(text):
                return True
            if not _HARMLESS.match(text):
                return False
        return False
