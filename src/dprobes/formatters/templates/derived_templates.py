"""
Templates derived from the handlers of a program, with names for the values that they log.

A handler is executed symbolically along all its paths, with a name for each cell: ``push 8; push r, arg0; add; push
mem, u32`` yields ``*(8+arg0)``. If all paths to its end log the same values, these are the template of its records. If
the values differ, or cannot be known (values logged in loops, exception handlers, cells at computed positions), there
is no template, and the data are shown undecoded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture, is_of_system
from dprobes.escapes import escaped
from dprobes.rpn.control_flow import stack_effect
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, Flow, Group
from dprobes.rpn.program_needs import sets_codes
from dprobes.rpn.rpn_program import Expression

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Code, Instruction, Operand, Program

__all__ = ["derived_templates"]

_STEPS_MAX = 1000
"""Maximum number of instructions that are followed on all paths of a handler together."""

_CELLS_MAX = 64
"""Maximum number of cells that are followed; a handler that uses more has no template."""

_NAME_MAX = 40
"""Maximum length of a name in characters; a longer expression is named like any other value."""

_VALUE = "value"
"""The name of a value for which no other name is known."""

_CODE_ADDRESSES = frozenset({"eip", "rip", "ip", "pc"})
"""Names of addresses of code, which are displayed by their symbols."""

_TIME = "time"
"""The name of a time, which is never displayed as an address, however large it is."""

_ARCHITECTURES = {4: "i386", 8: "x86_64"}
"""Architectures by their word size, on which the number of cells of a value depends."""

_SIGNED = "\0s"
"""Mark after the name of a signed number; the number of its bits follows."""

_BITS = {"b": 8, "w": 16, "d": 32, "n": 64}
"""The number of bits of a logged number, by its size in a template."""

_NUMBERS = {"log b, <count>": "b", "log w, <count>": "w", "log d, <count>": "d", "log <count>": "n"}
_ITEMS = {
    "log str": '{}="%*s"',
    "log ars": '{}="%*s"',
    "log mrf": "{}=%*h",
    "log mrs": "{}=%*h",
    "log mrp": "{}=%*h",
    "log lv": "lv=%*v",
    "log gv": "gv=%*v",
    "log cv": "cv=%*v",
    "log tv": "tv=%*v",
    "log kstack": "%*k",
    "log kstack, <frames>": "%*k",
    "log ustack": "%*k",
    "log ustack, <frames>": "%*k",
    "log st": None,  # it has a record of its own
}
"""Templates for the items that instructions log; ``{}`` is the name of the topmost cell, the item's address."""

_DUMP = "%*h"
_LONG = (_DUMP, "%*k")
"""Placeholders with lines of their own."""

_SHORT_MAX = 16
"""Maximum size in bytes of logged memory that is shown within the line. More is shown as a dump of 16 bytes a line."""

_MOVED = ("xchg", "dup <times>", "ros <cells>")
"""Instructions of the group STACK whose documented effect moves cells."""

_UNKNOWN = ("sx <label>", "callk", "callk <name>", "pop lp")
"""Instructions that change the control flow, or the logged data, in a way that is not followed."""


def derived_templates(program: Program) -> dict[int, str]:
    """
    Return the text of a template file for each word size in bytes.

    A word size whose records have no template is omitted.
    """
    if sets_codes(program):
        return {}
    found = {size: _file_of(program, architecture(name)) for size, name in _ARCHITECTURES.items()}
    return {size: text for size, text in found.items() if text}


_REPEATED = re.compile(r"\*(n|\?|cells)\Z")
"""The end of a repeated item in the documented effect of an instruction."""

_ADDRESS = re.compile(r"&[\w.:@$]+")
_SIMPLE = re.compile(r"[*&~]*([\w.:@$]+|\([^()]*\))")
_CONSTANT = re.compile(r"-?[0-9]+")


class _UnknownError(Exception):
    """The logged data of a handler cannot be predicted."""


class _Way(NamedTuple):
    """
    State of execution on one path.

    ``procedure`` is the procedure that is being executed, or None in the handler. ``returns`` has the return positions
    of its callers. ``cells`` has names, from the bottom to the top.
    """

    position: int = 0
    procedure: str | None = None
    returns: tuple[tuple[str | None, int], ...] = ()
    cells: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()


def _file_of(program: Program, processor: Architecture) -> str:
    procedures = {procedure.name: procedure.code for procedure in program.procedures}
    known: dict[object, str | None] = {}  # generated programs have thousands of equal handlers
    found: dict[int, set[str | None]] = {}
    for definition in program.definitions:
        code = definition.handler
        key = (tuple((each.row.opcode, each.operand) for each in code.instructions), tuple(code.labels.items()))
        if key not in known:
            known[key] = _Walk(code, procedures, processor, program.tables).text()
        found.setdefault(definition.minor, set()).add(known[key])
    lines = []
    for minor, (text, *others) in sorted(found.items()):
        if text is not None and not others:
            lines += [f"minor = {minor}", *(f"fmt = {_quoted(line)}" for line in text.split("\n"))]
    return "\n".join((f"major = {program.major}", *lines, "")) if lines else ""


class _Walk:
    """A symbolic execution of all paths of a handler."""

    def __init__(
        self, handler: Code, procedures: Mapping[str, Code], processor: Architecture, tables: Sequence[Table]
    ) -> None:
        self._handler = handler
        self._procedures = procedures
        self._processor = processor
        self._tables = tables

    def text(self) -> str | None:
        """Return the lines of the template of the handler's records, or None if there is none."""
        try:
            ends = set(self._ends())
        except _UnknownError:
            return None
        return _joined(_with_names(ends.pop(), self._processor.word_size)) if len(ends) == 1 else None

    def _ends(self) -> Iterator[tuple[str, ...]]:
        """Iterate over the logged data at each end of the handler that writes a record."""
        waiting = [_Way()]
        seen = set(waiting)
        while waiting:
            if len(seen) > _STEPS_MAX:
                raise _UnknownError
            way = waiting.pop()
            code = self._code(way.procedure)
            if way.position == len(code.instructions):
                if way.returns:
                    raise _UnknownError
                yield way.logged
                continue
            instruction = code.instructions[way.position]
            way = self._after(instruction, way)
            if instruction.row.flow is Flow.END:
                if instruction.row.operator != "abort":
                    yield way.logged
                continue
            new = set(self._next(instruction, code, way)) - seen
            seen |= new
            waiting += new

    def _code(self, procedure: str | None) -> Code:
        return self._handler if procedure is None else self._procedures[procedure]

    def _next(self, instruction: Instruction, code: Code, way: _Way) -> Iterator[_Way]:
        """
        Iterate over the states after a jump, call, return or other instruction.

        ``way`` is the state before the instruction, with its stack and log effects applied. Raise ``_UnknownError`` for
        a missing label or procedure, and a return without a call.
        """
        target, following = str(instruction.operand), way.position + 1
        match instruction.row.flow:
            case Flow.NEXT:
                yield way._replace(position=following)
            case Flow.JUMP if target in code.labels:
                yield way._replace(position=code.labels[target])
            case Flow.BRANCH if target in code.labels:
                yield way._replace(position=following)
                yield way._replace(position=code.labels[target])
            case Flow.CALL if target in self._procedures:
                returns = (*way.returns, (way.procedure, following))
                yield way._replace(position=0, procedure=target, returns=returns)
            case Flow.RETURN if way.returns:
                procedure, position = way.returns[-1]
                yield way._replace(position=position, procedure=procedure, returns=way.returns[:-1])
            case _:
                raise _UnknownError

    def _after(self, instruction: Instruction, way: _Way) -> _Way:
        """
        Return the state with an instruction's effect on the named stack cells and on the logged values.

        The position is unchanged: ``_next`` follows jumps. Raise ``_UnknownError`` if the effect cannot be predicted.
        """
        row, cells, logged = instruction.row, list(way.cells), list(way.logged)
        effect = stack_effect(instruction, self._processor, self._tables)
        is_moved = row.group is not Group.STACK or row.syntax in _MOVED
        if not effect.exact or not is_moved or row.syntax in _UNKNOWN:
            raise _UnknownError
        if effect.popped > len(cells) or len(cells) + effect.pushed > _CELLS_MAX:
            raise _UnknownError
        popped = [cells.pop() for _ in range(effect.popped)]
        if row.syntax in _NUMBERS:
            logged += [_number(name, _NUMBERS[row.syntax]) for name in popped]
        elif row.syntax in _ITEMS:
            logged += _item(_ITEMS[row.syntax], popped)
        elif row.operator == "log":
            raise _UnknownError
        cells += _pushed(instruction, popped, effect.pushed)
        return way._replace(cells=tuple(cells), logged=tuple(logged))


def _pushed(instruction: Instruction, popped: list[str], count: int) -> list[str]:
    """Return names for the cells that an instruction pushes, the top last; ``popped`` begins with the top."""
    row, operand = instruction.row, instruction.operand
    if row.syntax == "dup <times>":
        return popped * count
    if row.group not in (Group.STACK, Group.EXECUTION):
        popped = [_plain(each) for each in popped]
    if row.syntax == "pbl <bits>":
        return [f"{popped[0]}{_SIGNED}{operand}"]
    name = _name_of(row.syntax, operand, popped)
    before, _, after = (part.split() for part in row.effect.partition("--"))
    results = [_REPEATED.sub("", each) for each in after]
    if name is None and len(results) == count:
        cells = dict(zip(reversed(before), popped, strict=False))
        return [_limited(_computed(each, cells)) for each in results]
    name = _limited(name or results[0]) if count else ""
    # The least significant of several cells is on top.
    return [name] if count == 1 else [f"{name}.{n}" for n in reversed(range(count))]


def _name_of(syntax: str, operand: Operand, popped: Sequence[str]) -> str | None:
    """
    Return the name of the value that an instruction pushes, such as ``lv0`` or ``rdi``.

    ``popped`` are the names of the popped cells. None means that the name follows from these alone, or is unknown.
    """
    match syntax.split(" ")[:2], operand:
        case ["push", "mem," | "phys,"], _:
            return _content(popped[0])
        case ["push", "<value>"], Expression(addend, symbol):
            return str(addend) if symbol is None else f"&{escaped(symbol)}" + (f"{addend:+}" if addend else "")
        case ["push", ("lv," | "gv," | "cv," | "tv,") as kind], int():
            return f"{kind[:-1]}{operand}"
        case ["push", "usdt,"], int():
            return f"usdt{operand}"
        case ["push", _], str():  # a register or a field
            return operand
        case ["push", ("task" | "comm") as word], None:
            return word
    return None


def _plain(name: str) -> str:
    """Return the name of a value without the mark that it is signed."""
    return name.partition(_SIGNED)[0]


def _content(address: str) -> str:
    """Return the name of the memory at an address, whose own name is ``address``."""
    return address[1:] if _ADDRESS.fullmatch(address) else f"*{_operand(address)}"


def _computed(result: str, cells: Mapping[str, str]) -> str:
    """Return the name of a result in the notation of the documented effect: ``a+b`` with names for ``a`` and ``b``."""
    if result in cells:
        return cells[result]
    return re.sub(r"\b[abx]\b", lambda match: _operand(cells.get(match[0], match[0])), result)


def _operand(name: str) -> str:
    return name if _SIMPLE.fullmatch(name) else f"({name})"


def _limited(name: str) -> str:
    return name if len(name) <= _NAME_MAX else _VALUE


def _shown(name: str) -> str:
    """Return the name of a value as a field name of a template; a constant gets the name of any other value."""
    return _VALUE if _CONSTANT.fullmatch(name) else name.replace("%", "%%")


def _quoted(line: str) -> str:
    return '"' + line.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _number(name: str, size: str) -> str:
    conversion = "v"
    name, _, bits = name.partition(_SIGNED)
    if bits and int(bits) <= _BITS[size]:
        return f"{_shown(name)}=%{size}d"
    if name in _CODE_ADDRESSES:
        conversion = "a" if size in "dn" else "x"
    elif is_of_system(name):
        conversion = "p" if size in "dn" else "x"
    elif name == _TIME:
        conversion = "u"
    return f"{_shown(name)}=%{size}{conversion}"


def _item(form: str | None, popped: list[str]) -> list[str]:
    if form is None:
        return []
    if form.endswith(_DUMP) and _CONSTANT.fullmatch(popped[-1]) and int(popped[-1]) <= _SHORT_MAX:
        form = form.replace(_DUMP, "%*02bx")
    return [form.format(_shown(_plain(popped[0])) if popped else "")]


def _with_names(logged: tuple[str, ...], word_size: int) -> tuple[str, ...]:
    """Return the logged values, with adjacent cells of a process name joined into one string."""
    cells = tuple(_number(f"comm.{n}", "n") for n in range(PROCESS_NAME_SIZE // word_size))
    found: list[str] = []
    for each in logged:
        found.append(each)
        if tuple(found[-len(cells) :]) == cells:
            found[-len(cells) :] = [f'comm="%.{PROCESS_NAME_SIZE}s"']
    return tuple(found)


def _joined(logged: tuple[str, ...]) -> str:
    """Return placeholders joined to lines; a dump or a call stack, which fills whole lines, begins a new line."""
    lines = [""]
    for each in logged:
        if each.endswith(_LONG):
            lines += [each, ""]
        else:
            lines[-1] += f" {each}" if lines[-1] else each
    return "\n".join(line for line in lines if line)
