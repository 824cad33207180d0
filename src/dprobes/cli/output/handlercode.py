"""The code of a program, disassembled: what ``show`` and ``query --extended`` print of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from dprobes.arch import go_architecture
from dprobes.rpn import controlflow
from dprobes.rpn.decoder import decode_one
from dprobes.rpn.encoder import closed, encode
from dprobes.rpn.isa import OperandKind, rows_by_syntax
from dprobes.rpn.printer import print_instruction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.rpn.encoder import CodeImage
    from dprobes.rpn.program import Code, Program

__all__ = ["Disassembly"]


def _encoded(program: Program, target: Architecture) -> CodeImage:
    """Return a program's code, of which it is not known whether it is about Go, which has more arguments."""
    try:
        return encode(program, target)
    except KeyError:
        return encode(program, go_architecture())


class Disassembly:
    """
    List the code of a program as it is encoded for a processor; ``image`` is its encoding, if there is one already.

    Each instruction is shown with its byte offset and the depth of the RPN stack before it, '?' where that depends on
    the run.
    """

    def __init__(self, program: Program, target: Architecture, image: CodeImage | None = None) -> None:
        self._program = program
        self._target = target
        self.image = image if image is not None else _encoded(program, target)
        self._offsets = [offset for offset, _ in self.image.instructions]
        self._starts = sorted((*self.image.handlers, *self.image.procedures.values(), len(self.image.data)))
        self._gains = controlflow.procedure_gains(program, target)

    def handler(self, number: int) -> Iterator[str]:
        """Iterate over the lines of the handler of a definition."""
        code = self._program.definitions[number].handler
        whole, tables = closed(code, rows_by_syntax()["exit"]), self._program.tables
        depths = controlflow.depths(whole, self._target, self._gains, tables=tables)[0]
        return self._lines(code, self.image.handlers[number], depths)

    def procedures(self) -> Iterator[str]:
        """Iterate over the lines of all procedures."""
        for procedure in self._program.procedures:
            yield ""
            yield f"proc {procedure.name}"
            yield from self._lines(procedure.code, self.image.procedures[procedure.name], {})
            yield "endproc"

    def _lines(self, code: Code, start: int, depths: dict[int, int]) -> Iterator[str]:
        """List the instructions from ``start`` on, the added ``exit`` or ``ret`` included."""
        image = self.image
        first = bisect_left(self._offsets, start)
        behind = bisect_left(self._offsets, self._starts[bisect_right(self._starts, start)])
        for index, (offset, instruction) in enumerate(image.instructions[first:behind]):
            for label in image.labels.get(offset, ()):
                yield f"{label}:"
            depth = depths.get(index, controlflow.UNKNOWN)
            shown = "?" if depth >= controlflow.UNKNOWN else str(depth)
            line = f"  {offset:04x}  {shown:>4}  {print_instruction(instruction)}"
            if index >= len(code.instructions):
                line += "  // added"
            elif instruction.row.operand_kind in (OperandKind.LABEL, OperandKind.PROCEDURE):
                target = decode_one(image.data, offset, image.word_size, image.byte_order).operand
                line += f"  // {target:04x}"
            yield line
