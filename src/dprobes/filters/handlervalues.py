"""
The values of a filter at a hit: which there are, and the instructions that push them.

What records have and hits have not (the time of a record, the place's name) is refused here, at its place in the
filter. Whether a processor has a register, and a tracepoint a field, is checked with the rest of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.diagnostics import did_you_mean
from dprobes.filters.handlercode import HandlerCode
from dprobes.filters.tree import Memory, Name, Number, StringAt, Sum, Text, Value, fail
from dprobes.rpn.isa import PROCESS_NAME_SIZE
from dprobes.rpn.needs import sets_codes
from dprobes.rpn.program import ModuleType

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.numbertypes import NumberType
    from dprobes.rpn.program import ProbeDefinition, Program
    from dprobes.source import Span

__all__ = ["WIDE_NAMES", "HandlerValues"]

_PROCESS_NAMES = ("comm", "name")
WIDE_NAMES = ("elapsed",)
"""Names of numbers that have 64 bits, whatever a word has."""

_IDS = {"pid": "push pid", "tid": "push tid", "uid": "push uid", "cpu": "push procid", "elapsed": "push elapsed"}
_CODES = ("major", "minor")
_REGISTERS = {"ip": "pc"}
"""Items whose register has another name."""

_OF_RECORDS = {
    "time": "the time of a hit is read with the record",
    "stack_trace": "which record is a stack trace is known when it is there",
    "word_size": "the size of words is the module's",
    "module": "it is the same for all hits of a program",
    "program": "it is the same for all hits of a program",
    "host": "it is the same for all hits of a program",
    "symbol": "places are chosen with 'offset ='",
    "function": "places are chosen with 'offset ='",
}
"""Items that conditions on records know, and why there is nothing to compare at a hit."""

_FIELD, _USER, _ENTRY, _USDT = "tp.", "u.", "entry.", "usdt."
_RESULT = "retval"


class HandlerValues:
    """
    Push the values that a filter names, in handlers of a definition.

    ``diagnostics`` get warnings; without them nobody is warned.
    """

    def __init__(self, program: Program, definition: ProbeDefinition, diagnostics: Diagnostics | None) -> None:
        self._program = program
        self._definition = definition
        self._diagnostics = diagnostics
        self._is_tracepoint = program.modtype is ModuleType.TRACEPOINT

    def is_text(self, value: Value) -> bool:
        """Return whether a value is a string."""
        return isinstance(value, (Text, StringAt)) or (isinstance(value, Name) and value.name in _PROCESS_NAMES)

    def check(self, value: Value) -> None:
        """Raise ``SourceError`` if a number is none that a hit has."""
        self.push(HandlerCode(""), value)

    def advice(self, value: Value) -> str | None:
        """Return what to write if a number is the address of a string."""
        return f"'str({value.span.text})' is the string at an address" if isinstance(value, (Name, Memory)) else None

    def check_process_name(self, text: Text, wanted: str) -> None:
        """Raise ``SourceError`` for a name that no process has."""
        if len(wanted.encode()) >= PROCESS_NAME_SIZE:
            fail(
                text.span,
                f"the kernel keeps {PROCESS_NAME_SIZE - 1} bytes of a process name, and this one has more",
                f'write "{wanted[: PROCESS_NAME_SIZE - 1]}"' if wanted.isascii() else None,
            )

    def is_compared_signed(self, left: Value, sign: str, right: Value, place: Span) -> bool:
        """Return whether an order is that of numbers with a sign; raise ``SourceError`` for one that says nothing."""
        types = [_type_of(value) for value in (left, right)]
        is_signed = any(known is not None and known.is_signed for known in types) or any(
            isinstance(value, Number) and value.value < 0 for value in (left, right)
        )
        is_result = any(isinstance(value, Name) and value.name == _RESULT and not value.type for value in (left, right))
        if is_signed or is_result:
            if is_result:
                self._warn_of_int(next(value for value in (left, right) if isinstance(value, Name)))
            return True
        if isinstance(right, Number) and right.value == 0 and sign in ("<", ">="):
            fail(
                place,
                f"'{left.span.text}' is compared as a number without a sign, which is never below 0",
                f"write '{_untyped(left)}:s64 {sign} 0', or ':s32' for an int",
            )
        return False

    def _warn_of_int(self, name: Name) -> None:
        """Warn that the result of a function may be narrower than a word."""
        if self._diagnostics is not None:
            self._diagnostics.warning(
                name.span,
                f"'{name.name}' is compared as a whole word, in which the -1 of an int is 4294967295",
                hint=f"write '{name.name}:s32' if the function returns an int, else '{name.name}:s64'",
            )

    def push(self, code: HandlerCode, value: Value) -> None:
        """Push a number, one cell."""
        match value:
            case Number(number, span):
                code.push(number, span)
            case Sum(base, addend, span):
                self.push(code, base)
                code.push(addend, span)
                code.add("add")
            case Memory(address, size, span, known):
                self.push(code, address)
                code.add(f"push mem, u{8 * size}", None, span)
                _narrow(code, known)
            case Name(_, _, known):
                self._push_name(code, value)
                _narrow(code, known)
            case Text(text, span) if len(text) == 1:
                code.push(ord(text), span)
            case _:
                fail(value.span, f"'{value.span.text}' is a string, and a number is needed here")

    def _push_name(self, code: HandlerCode, value: Name) -> None:
        name, span = value.name, value.span
        if name in _PROCESS_NAMES:
            fail(span, f"'{name}' is a string, and a number is needed here")
        elif name in _IDS:
            code.add(_IDS[name], None, span)
        elif name in _CODES:
            if sets_codes(self._program):
                fail(span, f"the handlers of this program set '{name}' themselves, behind the filter")
            code.push(getattr(self._program if name == "major" else self._definition, name), span)
        elif name in _OF_RECORDS:
            fail(span, f"'{name}' is known of records, and not at a hit: {_OF_RECORDS[name]}")
        elif name.startswith(_USDT) and name.removeprefix(_USDT).isdecimal():
            code.add("push usdt, <argument>", int(name.removeprefix(_USDT)), span)
        elif name.startswith(_FIELD) or (self._is_tracepoint and not name.startswith((_USER, _ENTRY))):
            code.add("push tp, <field>", name.removeprefix(_FIELD), span)
        else:
            self._push_register(code, value)

    def _push_register(self, code: HandlerCode, value: Name) -> None:
        name, syntax = value.name.lower(), "push r, <register>"
        for prefix, other in ((_USER, "push u, <register>"), (_ENTRY, "push entry, <register>")):
            if name.startswith(prefix):
                name, syntax = name.removeprefix(prefix), other
        name = _REGISTERS.get(name, name)
        known = [(target, target.register(name)) for target in map(architecture, ARCHITECTURE_NAMES)]
        registers = [(target, register) for target, register in known if register is not None]
        if not registers:
            names = [
                *_PROCESS_NAMES,
                *_IDS,
                *_CODES,
                *dict.fromkeys(n for each, _ in known for n in each.register_names),
            ]
            known_ones = "registers such as arg0 and retval, mem(address, bytes), str(address)"
            hint = did_you_mean(value.name, names) or f"there are {', '.join(names[:9])}, {known_ones}"
            fail(value.span, f"there is no '{value.name}' at a hit", hint)
        if any(each.selector_cells or each.cells(target.word_size) > 1 for target, each in registers):
            fail(value.span, f"'{name}' has more bits than a word, and cannot be compared")
        code.add(syntax, name, value.span)


def _type_of(value: Value) -> NumberType | None:
    return value.type if isinstance(value, (Name, Memory)) else None


def _untyped(value: Value) -> str:
    text = value.span.text
    return text.rpartition(":")[0] if _type_of(value) is not None else text


def _narrow(code: HandlerCode, known: NumberType | None) -> None:
    """Keep the low bits of a cell, and extend them as their type says; no word is wider than 64 bits."""
    if known is not None and known.bits < 64:
        code.add(known.extension, known.bits)
