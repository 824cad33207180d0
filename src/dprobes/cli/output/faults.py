"""The exceptions that ended hits, by the lines of a program in DProbes C that they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.keyed.layout import key_parts, shown_value
from dprobes.rpn.isa import ExceptionCode
from dprobes.rpn.tables import FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.rpn.program import Program

__all__ = ["fault_lines"]

_REASONS = {
    ExceptionCode.INVALID_ADDR: "memory that is not there",
    ExceptionCode.DIVIDE_BY_ZERO: "a division by zero",
    ExceptionCode.JMP_MAX: "more jumps than jmpmax allows",
    ExceptionCode.CALL_MAX: "calls nested too deep",
    ExceptionCode.INVALID_OPERAND: "an index that the array does not have",
    ExceptionCode.SEG_FAULT: "a segment that is not there",
}

_ENTRIES = ("push entry", "push elapsed")
"""Instructions that raise INVALID_ADDR where the entry of a call was not seen, too."""


def fault_lines(program: Program, tables: Sequence[TableContents]) -> Iterator[str]:
    """Iterate over lines that say how many hits an exception has ended at which line of the program."""
    contents = next((each for each in tables if each.table.name == FAULTS), None)
    if contents is None:
        return
    span = program.spans.get("name")
    name = span.file.name if span is not None else program.name
    reasons = dict(_REASONS)
    if any(each.row.syntax.startswith(_ENTRIES) for code in program.bodies() for each in code.instructions):
        reasons[ExceptionCode.INVALID_ADDR] += ", or an entry that was not seen"
    found = []
    for row in contents.rows:
        code, line = key_parts(contents.table.keys, row.key)
        assert isinstance(code, int)
        assert isinstance(line, int)
        found.append((line, code, shown_value(contents.table, row.cells)))
    for line, code, count in sorted(found):
        try:
            known = ExceptionCode(code)
            reason = reasons.get(known, known.name)
        except ValueError:
            reason = f"exception {code:#x}"
        yield f"{count} fault{'s' if count != 1 else ''} at {name}:{line}: {reason}"
