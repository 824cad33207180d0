"""
Arguments of USDT probes: from their descriptions in a module's notes to the locations of the values.

A note has one word for each argument, ``N@OPERAND`` or ``Nf@OPERAND``. ``N`` is the size in bytes, negative if the
value is signed; ``f`` marks a floating-point number. The compiler chooses the operand, which is in the assembler's AT&T
syntax. Source: SystemTap's <sys/sdt.h> and wiki page "UserSpaceProbeImplementation". The notes are untrusted: every
word becomes an ``Argument``, a malformed one without a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch.processor import RegisterClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch.processor import Architecture

__all__ = ["ARGUMENTS_MAX", "Argument", "MemoryPlace", "RegisterPart", "parse_arguments"]

ARGUMENTS_MAX = 12
"""Maximum number of arguments of a probe of <sys/sdt.h> (STAP_PROBE12)."""

_TEXT_MAX = 256
"""Maximum number of characters of an argument; compilers write a few dozen."""


class RegisterPart(NamedTuple):
    """``bits`` bits of a register from bit ``shift`` on. ``name`` is the register's name in the processor's table."""

    name: str
    shift: int
    bits: int


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """
    Address of an argument in memory: the sum of the fields, with ``index`` times ``scale``, modulo a word's size.

    ``base`` and ``index`` are registers of the processor's table, or empty. ``symbol`` is a symbol of the module, or
    empty.
    """

    displacement: int = 0
    base: str = ""
    index: str = ""
    scale: int = 1
    symbol: str = ""


class Argument(NamedTuple):
    """
    Argument of a USDT probe: ``size`` bytes that are ``signed`` or not. ``text`` is its word in the note.

    ``operand`` is a number, or the location of the value. It is None if a word cannot have the value; ``obstacle`` is
    then the reason, a clause with the subject "it".
    """

    text: str
    size: int
    signed: bool
    operand: int | RegisterPart | MemoryPlace | None
    obstacle: str = ""
    is_float: bool = False
    """True if the value is a floating-point number."""

    @property
    def symbol(self) -> str:
        """The symbol of the module that the location of the value depends on, or ""."""
        return self.operand.symbol if isinstance(self.operand, MemoryPlace) else ""

    @property
    def type_name(self) -> str:
        """The type of the value as messages show it, such as ``s32``."""
        return f"{'f' if self.is_float else 's' if self.signed else 'u'}{8 * self.size}"


def parse_arguments(text: str, architecture: Architecture) -> tuple[Argument, ...]:
    """Return a USDT probe's arguments from the description in its note, such as ``-4@%edi 8@-8(%rbp)``, in order."""
    return tuple(_argument(word, architecture) for word in _words(text))


_WORD = re.compile(r"[^\s(]*(?:\([^)]*\)\S*)?")


def _words(text: str) -> Iterator[str]:
    """Iterate over the words of a description; blanks within parentheses belong to the operand."""
    for match in _WORD.finditer(text):
        if match.group():
            yield match.group()


_FORM = re.compile(r"(?:(-?)(\d+)(f?)@)?(.+)", re.ASCII | re.DOTALL)


def _argument(word: str, architecture: Architecture) -> Argument:
    shown = word if len(word) <= _TEXT_MAX else word[:_TEXT_MAX] + "..."
    match = _FORM.fullmatch(word)
    if match is None or len(word) > _TEXT_MAX:
        return Argument(shown, architecture.word_size, signed=False, operand=None, obstacle="it cannot be understood")
    sign, digits, is_float, operand = match.groups()
    size, signed = (int(digits), sign == "-") if digits else (architecture.word_size, False)
    if size not in (1, 2, 4, 8):
        return Argument(shown, 0, signed, None, f"it has {size} bytes")
    signed, is_number = signed and not is_float, bool(is_float)
    try:
        return Argument(shown, size, signed, _operand(operand, 8 * size, architecture), is_float=is_number)
    except _NoValueError as error:
        return Argument(shown, size, signed, None, error.reason, is_number)


class _NoValueError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _operand(text: str, bits: int, architecture: Architecture) -> int | RegisterPart | MemoryPlace:
    if text.startswith("$"):
        try:
            return int(text[1:], 0)
        except ValueError:
            return _address_constant(text)
    if text.startswith("%") and ":" not in text:
        part = _register(text[1:], architecture)
        return RegisterPart(part.name, part.shift, min(part.bits, bits))
    return _memory(text, architecture)


def _address_constant(text: str) -> int:
    raise _NoValueError(f"its operand '{text}' is a number that only the linker knows")


_LETTERS = {
    **{f"{letter}x": f"e{letter}x" for letter in "abcd"},
    **{name: f"e{name}" for name in ("si", "di", "bp", "sp")},
}
"""The 16-bit registers with separate names, by the names of the table."""


def _register(text: str, architecture: Architecture) -> RegisterPart:
    """Return the part of a register by its name: ``rax``, ``eax``, ``ax``, ``al``, ``ah``, ``r8d`` ...."""
    name, shift, bits = text.lower(), 0, 0
    if name in _LETTERS:
        name, bits = _LETTERS[name], 16
    elif name[:-1] in _LETTERS and name[-1] == "l":  # sil, dil, bpl, spl
        name, bits = _LETTERS[name[:-1]], 8
    elif len(name) == 2 and name[0] in "abcd" and name[1] in "lh":
        name, shift, bits = f"e{name[0]}x", 8 * (name[1] == "h"), 8
    elif match := re.fullmatch(r"(r(?:8|9|1[0-5]))([dwb]?)", name):
        name, bits = match[1], {"": 64, "d": 32, "w": 16, "b": 8}[match[2]]
    elif re.fullmatch(r"e(?:[abcd]x|[sd]i|[sb]p|ip)", name):
        bits = 32
    register = architecture.register(name)
    is_usable = register is not None and register.kind is RegisterClass.GENERAL and register.memory_offset is None
    if register is None or not is_usable or register.bits > architecture.word_bits:
        raise _NoValueError(f"its operand '%{text}' is not a general register of {architecture.name}")
    return RegisterPart(register.name, shift, min(bits or register.bits, register.bits))


_MEMORY = re.compile(r"([^()]*)(?:\(\s*(?:%(\w+))?\s*(?:,\s*%(\w+)\s*(?:,\s*([1248])\s*)?)?\))?", re.ASCII)
_TERM = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_.$][\w.$]*(?:@\w+)?)\s*", re.ASCII)


def _memory(text: str, architecture: Architecture) -> MemoryPlace:
    match = _MEMORY.fullmatch(text)
    if match is None or ":" in match[1]:
        raise _NoValueError(f"its operand '{text}' cannot be read: only numbers, registers and memory are")
    displacement, symbol = _sum(match[1], text)
    base, index = (_whole_register(name, text, architecture) for name in match.group(2, 3))
    symbol, at, relation = symbol.partition("@")
    if at and relation != "GOTOFF":
        raise _NoValueError(f"its operand '{text}' is relative to something that is not known ('@{relation}')")
    if relation or base == "eip":
        if not symbol:
            raise _NoValueError(f"its operand '{text}' has no symbol")
        base = ""  # the base only turns an offset into the symbol's address
    return MemoryPlace(displacement, base, index, int(match[4] or 1), symbol)


def _sum(text: str, operand: str) -> tuple[int, str]:
    """Return the number and the symbol, or "", of a sum such as ``symbol+8``; ``operand`` is for the error message."""
    number, symbol, end = 0, "", 0
    for term in _TERM.finditer(text):
        if term.start() != end:
            break
        end = term.end()
        sign, word = term.groups()
        if word[0].isdigit():
            number += int(f"{sign}{word}", 0)
        elif symbol or sign == "-":
            break
        else:
            symbol = word
    else:
        if end == len(text):
            return number, symbol
    raise _NoValueError(f"its operand '{operand}' cannot be read: only numbers, registers and memory are")


def _whole_register(name: str | None, operand: str, architecture: Architecture) -> str:
    if name is None:
        return ""
    part = _register(name, architecture)
    if part.shift or part.bits != architecture.word_bits:
        raise _NoValueError(f"its operand '{operand}' is at an address of {part.bits} bits")
    return part.name
