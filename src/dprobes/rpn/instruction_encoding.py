"""
Encoding of a ``Program`` as bytes, as in section 1.2 of the recovered reference.

The handlers come first, in the order of the file, then the procedures. An instruction is its opcode byte and its
operand, unaligned, in the target's byte order::

    jmp label (word of 4)      01 | s32 distance from the byte after the operand
    push value (word of 8)     4c | u64
    push lv, i                 29 | u16

If execution can continue past the end of a handler, an ``exit`` is added, and at the end of a procedure a ``ret``. Back
ends therefore need no rule for this case. Stack traces and INVALID_OPCODE report offsets in this encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_set import Flow, OperandKind, Row, rows_by_opcode, text_problem
from dprobes.rpn.performance_counters import COUNTERS, counter_number
from dprobes.rpn.rpn_program import Code, Expression, Instruction
from dprobes.rpn.word_arithmetic import mask_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.arch import Architecture
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import Span

__all__ = ["CodeImage", "EncodedInstruction", "Relocation", "closed", "decode_all", "decode_one", "encode"]


class Relocation(NamedTuple):
    """A word at byte ``offset`` of the image that is replaced by the run-time address of ``symbol`` plus ``addend``."""

    offset: int
    symbol: str
    addend: int


class CodeImage(NamedTuple):
    """
    Encoded code of a program.

    ``handlers`` has the start offsets of the handlers, in the order of the definitions. ``procedures`` maps a name to
    its start. ``instructions`` lists (offset, instruction) in order, including added ``exit`` and ``ret``. ``labels``
    maps an offset to the names in the source. ``tables`` has the tables to which operands refer by number.
    """

    data: bytes
    word_size: Literal[4, 8]
    byte_order: Literal["little", "big"]
    handlers: tuple[int, ...]
    procedures: dict[str, int]
    instructions: tuple[tuple[int, Instruction], ...]
    labels: dict[int, tuple[str, ...]]
    relocations: tuple[Relocation, ...] = ()
    tables: tuple[Table, ...] = ()

    def span_of(self, offset: int | None) -> Span | None:
        """
        Return the source span of the instruction at a byte offset.

        None means that no instruction starts there, or that it has no span.
        """
        return next((instruction.span for place, instruction in self.instructions if place == offset), None)


def encode(
    program: Program, architecture: Architecture, handlers: Mapping[int, Architecture] | None = None
) -> CodeImage:
    """
    Return the encoded form of a checked program for a processor.

    ``handlers`` maps the index of a definition to the processor whose register names its handler uses; the default is
    ``architecture``. Definitions whose handler is the same object share its encoded form. Raise KeyError for a label,
    procedure, register or table that ``check`` would have reported.
    """
    return _Encoder(program, architecture, handlers or {}).image()


def closed(code: Code, ending: Row) -> Code:
    """Return ``code`` with ``ending`` added if execution can continue past its last instruction, else unchanged."""
    ends = code.instructions and code.instructions[-1].row.flow in (Flow.JUMP, Flow.RETURN, Flow.RAISE, Flow.END)
    if ends and len(code.instructions) not in code.labels.values():
        return code
    return Code((*code.instructions, Instruction(ending)), code.labels)


class _Encoder:
    def __init__(self, program: Program, architecture: Architecture, handlers: Mapping[int, Architecture]) -> None:
        self._architecture = architecture
        self._handlers = handlers
        self._word = architecture.word_size
        self._names = [p.name for p in program.procedures]
        self._tables = program.tables
        self._numbers = {table.name: number for number, table in enumerate(program.tables)}
        rows = instruction_set.rows_by_syntax()
        first: dict[tuple[int, int], int] = {}
        """The index of the first definition with a handler, by the identities of handler and architecture."""
        self._firsts = [
            first.setdefault((id(definition.handler), id(handlers.get(number))), number)
            for number, definition in enumerate(program.definitions)
        ]
        self._blocks = [
            *(
                closed(definition.handler, rows["exit"]) if self._firsts[number] == number else Code()
                for number, definition in enumerate(program.definitions)
            ),
            *(closed(procedure.code, rows["ret"]) for procedure in program.procedures),
        ]

    def image(self) -> CodeImage:
        offsets = self._lay_out()
        starts = [block[0] if block else 0 for block in offsets]
        handler_count = len(starts) - len(self._names)
        procedures = dict(zip(self._names, starts[handler_count:], strict=True))
        data = bytearray()
        instructions: list[tuple[int, Instruction]] = []
        relocations: list[Relocation] = []
        labels: dict[int, list[str]] = {}
        for number, (block, block_offsets) in enumerate(zip(self._blocks, offsets, strict=True)):
            names = self._handlers.get(number, self._architecture)
            places = {label: block_offsets[index] for label, index in block.labels.items()}
            for label, offset in places.items():
                labels.setdefault(offset, []).append(label)
            for offset, instruction in zip(block_offsets, block.instructions, strict=True):
                instructions.append((offset, instruction))
                match instruction.operand:
                    case Expression(addend, str(symbol)):
                        relocations.append(Relocation(offset + 1, symbol, addend))
                data += self._encode(instruction, offset, places, procedures, names)
        return CodeImage(
            bytes(data),
            self._word,
            self._architecture.byte_order,
            tuple(starts[first] for first in self._firsts),
            procedures,
            tuple(instructions),
            {offset: tuple(names) for offset, names in labels.items()},
            tuple(relocations),
            self._tables,
        )

    def _lay_out(self) -> list[list[int]]:
        """Return the byte offset of every instruction, in one list for each block."""
        position = 0
        offsets: list[list[int]] = []
        for block in self._blocks:
            offsets.append([])
            for instruction in block.instructions:
                offsets[-1].append(position)
                position += instruction.row.encoded_size(self._word, instruction.operand)
        return offsets

    def _encode(
        self,
        instruction: Instruction,
        offset: int,
        labels: dict[str, int],
        procedures: dict[str, int],
        names: Architecture,
    ) -> bytes:
        row, kind, operand = instruction.row, instruction.row.operand_kind, instruction.operand
        opcode = bytes([row.opcode])
        if kind is None:
            return opcode
        if kind.width < 0:
            name = str(operand).encode()
            return opcode + bytes([len(name)]) + name
        width = kind.width or self._word
        match kind, operand:
            case (OperandKind.LABEL, str()):
                value = labels[operand] - (offset + 1 + width)
            case (OperandKind.PROCEDURE, str()):
                value = procedures[operand] - (offset + 1 + width)
            case (OperandKind.REGISTER, str()):
                register = names.register(operand)
                if register is None:
                    raise KeyError(operand)
                value = register.index
            case (OperandKind.TABLE, str()):
                value = self._numbers[operand]
            case (OperandKind.COUNTER, str()):
                value = counter_number(operand)
            case (_, Expression()):
                value = operand.addend if operand.symbol is None else 0
            case (_, int()):
                value = operand
            case _:
                raise TypeError(f"operand {operand!r} of '{row.syntax}'")
        # A negative number in "push" is encoded as two's complement, as distances are.
        return opcode + (value & mask_of(8 * width)).to_bytes(width, self._architecture.byte_order)


# Decoded bytes are untrusted: an unknown opcode or a truncated operand decodes to a row of None.

_RELATIVE = (OperandKind.LABEL, OperandKind.PROCEDURE)


class EncodedInstruction(NamedTuple):
    """
    Decoded instruction.

    ``operand`` is the number as encoded (two's complement resolved for signed kinds), the absolute target offset for
    jumps, calls and ``sx``, or the name of an extension or a field. ``row`` is None if the bytes are not an
    instruction.
    """

    offset: int
    row: Row | None
    operand: int | str
    end: int


def decode_one(data: bytes, offset: int, word_size: int, byte_order: Literal["little", "big"]) -> EncodedInstruction:
    """
    Return the instruction at a byte offset.

    ``row`` is None for an unknown opcode, a truncated operand, or an offset outside of ``data``.
    """
    if not 0 <= offset < len(data):
        return EncodedInstruction(offset, None, 0, offset + 1)
    opcode = data[offset]
    row = rows_by_opcode().get(opcode)
    invalid = EncodedInstruction(offset, None, opcode, offset + 1)
    if row is None:
        return invalid
    kind = row.operand_kind
    start = offset + 1
    if kind is None:
        return EncodedInstruction(offset, row, 0, start)
    if kind.width < 0:
        end = start + 1 + data[start] if start < len(data) else len(data) + 1
        operand = data[start + 1 : end].decode("utf-8", "replace")
        if end > len(data) or (kind is OperandKind.TEXT and text_problem(operand) is not None):
            return invalid
        return EncodedInstruction(offset, row, operand, end)
    end = start + (kind.width or word_size)
    if end > len(data):
        return invalid
    number = int.from_bytes(data[start:end], byte_order, signed=kind.is_signed)
    if kind is OperandKind.COUNTER and number >= len(COUNTERS):
        return invalid
    return EncodedInstruction(offset, row, number + end if kind in _RELATIVE else number, end)


def decode_all(data: bytes, word_size: int, byte_order: Literal["little", "big"]) -> Iterator[EncodedInstruction]:
    """Iterate over the instructions from the first byte on; each starts at the end of the previous one."""
    offset = 0
    while offset < len(data):
        instruction = decode_one(data, offset, word_size, byte_order)
        yield instruction
        offset = instruction.end
