"""
One method for each instruction of the language, made from the instruction table.

``mnemonics.pyi`` declares the same methods for type checkers and editors; ``make docs`` generates it.
"""

from __future__ import annotations

import keyword
from abc import ABC, abstractmethod
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Self

from dprobes.rpn.instruction_set import ROWS, OperandKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.rpn.instruction_set import Row

__all__ = ["Instructions"]

_TEXT = (
    OperandKind.LABEL,
    OperandKind.PROCEDURE,
    OperandKind.EXTENSION,
    OperandKind.FIELD,
    OperandKind.TEXT,
    OperandKind.TABLE,
    OperandKind.COUNTER,
)
_VALUES = (OperandKind.VALUE, OperandKind.REGISTER)
_NAMES = {OperandKind.PROCEDURE: "procedure", OperandKind.DISPLACEMENT: "n"}


class Instructions(ABC):
    """
    Write instructions, one a call; every method returns the object itself, so that calls can be chained.

    A method is called as the instruction is written, with ``_`` between the words: ``push_r("arg0")`` is
    ``push r, arg0``. "Stack" says what is popped and pushed, top of stack rightmost.
    """

    @abstractmethod
    def _add(self, words: str, operand: int | str | None = None) -> Self:
        """Add an instruction with these fixed words, followed by the operand unless it is None."""


def methods() -> Iterator[Callable[..., Instructions]]:
    """Iterate over the methods, in the order of the table; rows with the same fixed words have one method."""
    found: dict[str, list[Row]] = {}
    for row in ROWS:
        fixed = ", ".join(o for o in row.operands if isinstance(o, str))
        found.setdefault(f"{row.operator} {fixed}".strip(), []).append(row)
    return (_method(words, rows) for words, rows in found.items())


def _method(words: str, rows: list[Row]) -> Callable[..., Instructions]:
    """
    Return the method of ``Instructions`` that appends an instruction with the mnemonic ``words``.

    ``rows`` are its forms: two if the operand may also be popped from the stack, which makes the parameter optional.
    """
    kinds = [row.operand_kind for row in rows]
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    if (given := next((kind for kind in kinds if kind is not None), None)) is not None:
        types = "str" if given in _TEXT else "int | str" if given in _VALUES else "int"
        name, kind = _NAMES.get(given, given.value), Parameter.POSITIONAL_OR_KEYWORD
        optional = Parameter(name, kind, default=None, annotation=f"{types} | None")
        parameters.append(optional if None in kinds else Parameter(name, kind, annotation=types))
    signature = Signature(parameters, return_annotation="Self")

    def method(*arguments: object, **named: object) -> Instructions:
        this, *operands = signature.bind(*arguments, **named).arguments.values()
        return this._add(words, *operands)  # noqa: SLF001 - of the class that it is a method of

    name = words.replace(", ", "_").replace(" ", "_")
    method.__name__ = f"{name}_" if keyword.iskeyword(name) else name
    method.__qualname__ = f"{Instructions.__name__}.{method.__name__}"
    method.__doc__ = _documentation(sorted(rows, key=lambda row: row.operand_kind is None))
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _documentation(rows: list[Row]) -> str:
    """Return the docstring for a method with these forms: effect, stack, exceptions, and the option ``allow_write``."""
    first = rows[0]
    text = first.doc if not first.doc.startswith("As ") else f"Do the same a{first.doc[1:]}"
    for row in rows:
        faults = f"; raises {', '.join(fault.name for fault in row.faults)}" if row.faults else ""
        needs = "; needs ``allow_write``" if row.writes else ""
        text += f"\n\n{row.syntax}: stack ``{row.effect}``{faults}{needs}.{'' if row is first else f' {row.doc}'}"
    return text


for _each in methods():
    setattr(Instructions, _each.__name__, _each)
