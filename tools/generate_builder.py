"""
Write src/dprobes/api/mnemonics.py from the instruction table; with --check only compare.

A method stands for one instruction, or for its two forms where the operand may also be popped from the stack.
"""

from __future__ import annotations

import keyword
import sys
import textwrap
from pathlib import Path

from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_set import OperandKind, Row

OUTPUT = Path(__file__).parent.parent / "src" / "dprobes" / "api" / "mnemonics.py"

HEADER = '''\
"""
One method for each instruction of the language.

Written by ``make docs`` from ``rpn/instruction_set.py``; do not edit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Instructions"]


class Instructions(ABC):
    """
    Write instructions, one a call; every method returns the object itself, so that calls can be chained.

    A method is called as the instruction is written, with ``_`` between the words: ``push_r("arg0")`` is
    ``push r, arg0``. "Stack" says what is popped and pushed, top of stack rightmost.
    """

    @abstractmethod
    def _add(self, words: str, operand: int | str | None = None) -> Self:
        """Write an instruction: its fixed words, and the operand behind them."""
'''

TEXT = (
    OperandKind.LABEL,
    OperandKind.PROCEDURE,
    OperandKind.EXTENSION,
    OperandKind.FIELD,
    OperandKind.TEXT,
    OperandKind.TABLE,
)
VALUES = (OperandKind.VALUE, OperandKind.REGISTER)


def words_of(row: Row) -> str:
    """Return the fixed words of an instruction as they are written."""
    fixed = ", ".join(o for o in row.operands if isinstance(o, str))
    return f"{row.operator} {fixed}".strip()


def methods() -> dict[str, list[Row]]:
    """Return the rows of each method by its fixed words, in the order of the table."""
    found: dict[str, list[Row]] = {}
    for row in instruction_set.ROWS:
        found.setdefault(words_of(row), []).append(row)
    return found


def method_name(words: str) -> str:
    """Return the name of the method for fixed words."""
    name = words.replace(", ", "_").replace(" ", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


def parameter(kind: OperandKind) -> tuple[str, str]:
    """Return name and type of the parameter for an operand."""
    types = "str" if kind in TEXT else "int | str" if kind in VALUES else "int"
    return {OperandKind.PROCEDURE: "procedure", OperandKind.DISPLACEMENT: "n"}.get(kind, kind.value), types


def method(words: str, rows: list[Row]) -> str:
    """Return the text of a method."""
    kinds = [row.operand_kind for row in rows]
    given = next((kind for kind in kinds if kind is not None), None)
    head, call = "self", f'"{words}"'
    if given is not None:
        name, types = parameter(given)
        head += f", {name}: {types}" + (" | None = None" if None in kinds else "")
        call += f", {name}"
    lines = [f"    def {method_name(words)}({head}) -> Self:", *docstring(rows), f"        return self._add({call})"]
    return "\n".join(lines)


def docstring(rows: list[Row]) -> list[str]:
    """Return the lines of a method's documentation."""
    first, *others = sorted(rows, key=lambda row: row.operand_kind is None)
    summary = first.doc if not first.doc.startswith("As ") else f"Do the same a{first.doc[1:]}"
    paragraphs = [f"{first.syntax}: stack ``{first.effect}``{facts(first)}."]
    paragraphs += [f"{row.syntax}: stack ``{row.effect}``{facts(row)}. {row.doc}" for row in others]
    lines = [] if fits(summary) else textwrap.wrap(summary, 110)
    if not lines:
        lines = [summary]
    if len(lines) > 1:
        # The first line is a whole sentence of its own.
        summary, _, rest = first.doc.partition("; ")
        lines = [f"{summary}.", "", *textwrap.wrap(rest[:1].upper() + rest[1:], 110)]
    for paragraph in paragraphs:
        lines += ["", *textwrap.wrap(paragraph, 110, break_on_hyphens=False)]
    return ['        """', *(f"        {line}".rstrip() for line in lines), '        """']


def facts(row: Row) -> str:
    """Return what else the table says of an instruction."""
    said = f"; raises {', '.join(fault.name for fault in row.faults)}" if row.faults else ""
    return said + ("; needs ``allow_write``" if row.writes else "")


def fits(text: str) -> bool:
    """Return whether a text has room on one line of a docstring."""
    return len(text) <= 110


def document() -> str:
    """Return the text of the module."""
    return HEADER + "".join(f"\n{method(words, rows)}\n" for words, rows in methods().items())


def main(arguments: list[str]) -> int:
    """Write the file, or say that it is out of date."""
    text = document()
    if arguments == ["--check"]:
        if OUTPUT.exists() and OUTPUT.read_text() == text:
            return 0
        print(f"{OUTPUT.name} is not what the table says: run 'make docs'", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
