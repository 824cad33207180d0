"""A value of a script as DProbes C writes it: its text, how strongly that binds, and what it is."""

from __future__ import annotations

import enum

from dprobes.lazydataclass import dataclass

__all__ = ["ATOM", "CONDITIONAL", "PRECEDENCE", "PREFIX", "Form", "Value"]

PRECEDENCE = {
    "||": 2, "&&": 3, "|": 4, "^": 5, "&": 6, "==": 7, "!=": 7, "<": 8, ">": 8, "<=": 8, ">=": 8, "<<": 9, ">>": 9,
    "+": 10, "-": 10, "*": 11, "/": 11, "%": 11,
}  # fmt: skip
"""How strongly operators bind, as in C."""

CONDITIONAL, PREFIX, ATOM = 1, 12, 13


class Form(enum.Enum):
    """Say what a value is: all but a number can only be printed, compared, or be a key."""

    NUMBER = "a number"
    TEXT = "a string"
    LITERAL = "a text in quotes"
    SYMBOL = "a symbol"
    STACK = "a call stack"
    BYTES = "bytes"
    NETWORK = "a network address"


@dataclass(frozen=True, slots=True)
class Value:
    """A value; ``type`` is the C type of a pointer that was cast, else empty."""

    text: str
    precedence: int = ATOM
    form: Form = Form.NUMBER
    type: str = ""

    def within(self, precedence: int) -> str:
        """Return its text as an operand of something that binds so strongly."""
        return self.text if self.precedence >= precedence else f"({self.text})"

    @property
    def number(self) -> str:
        """Its text where a number is needed: the address of what a symbol names."""
        return "pc" if self.form is Form.SYMBOL and self.text in ("func", "probe") else self.text

    @property
    def key(self) -> str:
        """Its text as a key of a table."""
        return f"sym({self.text})" if self.form is Form.SYMBOL and self.text not in ("func", "probe") else self.text
