"""
The typed tree of DProbes C in a file: the numbers of its statements and values, and its types as one byte each.

A type is what a cell of it holds: its size in bytes, whether it has a sign, and whether it is ``_Bool``; pointers are
unsigned numbers, enumerations those that they are held as.
"""

from __future__ import annotations

import enum

from dprobes.dpc.typedtree.folder import integer_of
from dprobes.dpc.types.ctype import BOOL, VOID, CType, Integer
from dprobes.errors import FormatError

__all__ = ["DEPTH_MAX", "OPERATORS", "SLOTS_MAX", "StatementKind", "ValueKind", "byte_of", "type_of"]

DEPTH_MAX = 250
"""How deep statements and values may stand in each other."""

SLOTS_MAX = 1 << 12
"""How many variables a block or function has at most."""

OPERATORS = ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")
"""The operators of arithmetic."""


class StatementKind(enum.IntEnum):
    """The number before a statement."""

    STEPS = 1
    EVALUATE = 2
    LOG = 3
    TALLY = 4
    UNTALLY = 5
    SHOW = 6
    CLEAR = 7
    QUIT = 8
    SELECT = 9
    LOOP = 10
    SWITCH = 11
    BREAK = 12
    CONTINUE = 13
    RESULT = 14
    END = 15
    TRY = 16
    CAT = 17


class ValueKind(enum.IntEnum):
    """The number before a value; before what may be left out, NONE says that it is."""

    NONE = 0
    CONSTANT = 1
    SYSTEM = 2
    LOCAL = 3
    PARAMETER = 4
    VARIABLE = 5
    GLOBAL = 6
    ARITHMETIC = 7
    NEGATION = 8
    COMPLEMENT = 9
    COMPARISON = 10
    NOT = 11
    BOTH = 12
    EITHER = 13
    CONVERT = 14
    ASSIGN = 15
    STEP = 16
    CHOICE = 17
    SEQUENCE = 18
    CALL = 19
    TABLE_VALUE = 20
    COMM_TEST = 21
    COMM = 22
    KEPT = 23
    KEPT_TEST = 24
    LITERAL = 25


_SIGNED, _BOOL = 0x80, 0x40
_SIZES = (1, 2, 4, 8)
_TYPES = {
    size | sign: Integer(f"{'' if sign else 'u'}int{8 * size}_t", size, is_signed=bool(sign), rank=_SIZES.index(size))
    for size in _SIZES
    for sign in (0, _SIGNED)
}


def byte_of(type_: CType) -> int:
    """Return the byte of a type; 0 if it has no numbers."""
    integer = integer_of(type_)
    if integer is None:
        return 0
    if integer.is_bool:
        return _BOOL | 1
    if integer.size not in _SIZES:
        raise FormatError(f"a PPDF holds numbers of at most 8 bytes, not '{type_}'")
    return integer.size | (_SIGNED if integer.is_signed else 0)


def type_of(byte: int) -> CType | None:
    """Return the type of a byte; None if it is none's."""
    if byte == 0:
        return VOID
    return BOOL if byte == _BOOL | 1 else _TYPES.get(byte)
