"""
Code of a program: its encoding for each word size, and the decoding of one encoding into instructions.

*Notes* have the facts that the bytes lack: the name by which a register was written, that a value is negative, and the
intended label among several at one place.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.errors import FormatError
from dprobes.rpn.instruction_encoding import CodeImage, EncodedInstruction, Relocation, decode_one, encode
from dprobes.rpn.instruction_set import OperandKind
from dprobes.rpn.performance_counters import COUNTERS
from dprobes.rpn.rpn_program import Code, Expression, Instruction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.ppdf.ppdf_sections import Reader, Writer
    from dprobes.rpn.rpn_program import Operand, Program
    from dprobes.source_text import Span

__all__ = [
    "Block",
    "Note",
    "NoteKind",
    "Notes",
    "StoredImage",
    "check_images",
    "code_of",
    "notes_of",
    "read_images",
    "write_images",
]

HOSTS = ("x86_64", "i386")
"""Processors for which every program is encoded on any machine, if it suits them."""
MACHINES = (*HOSTS, "aarch64", "riscv64", "s390", "s390x", "ppc", "ppc64")
"""All processors for which programs are encoded; of a program's encodings, the first in this order is decoded."""

_RELOCATION_SIZE = 24


class NoteKind(enum.IntEnum):
    """The kinds of notes with which an encoded operand is converted to its source form; the values are stored."""

    REGISTER = 1
    """The string is the register's name; without a note it was written as a number."""
    NEGATIVE = 2
    """The value is negative: the word is its two's complement. There is no string."""
    LABEL = 3
    """The string is the label that was written. Without a note, it is the first label at the place."""


@dataclass(frozen=True, slots=True)
class Note:
    """A fact about an operand that is not in its encoded bytes."""

    kind: NoteKind
    text: str | None = None


Notes = dict[int, Note]
"""Notes on a block's instructions, by the index of the instruction."""


@dataclass(frozen=True, slots=True)
class Block:
    """The labels, spans and notes of a handler or procedure; ``spans`` are those of the instructions."""

    labels: Mapping[str, int]
    spans: Sequence[Span | None]
    notes: Notes


@dataclass(frozen=True, slots=True)
class StoredImage:
    """The encoding of a program as stored in the file, with its offset there."""

    architecture: Architecture
    data: bytes
    handlers: tuple[int, ...]
    procedures: tuple[int, ...]
    relocations: tuple[Relocation, ...]
    offset: int


def write_images(out: Writer, images: Mapping[str, CodeImage]) -> None:
    """Write the encoded code of a program for each processor, by the processor's name."""
    out.u32(len(images))
    for name, image in images.items():
        out.row("sb", name, image.data)
        out.numbers(image.handlers)
        out.numbers(tuple(image.procedures.values()))
        out.u32(len(image.relocations))
        for relocation in image.relocations:
            out.row("Isw", relocation.offset, relocation.symbol, relocation.addend)


def read_images(reader: Reader) -> tuple[StoredImage, ...]:
    """Return the encodings, at most one for each processor; raise ``FormatError`` if there is none or a bad one."""
    images: dict[str, StoredImage] = {}
    for _ in range(reader.count(4, "encodings", len(MACHINES))):
        at = reader.offset
        name = reader.string("a processor")
        if name not in MACHINES or name in images:
            reader.fail(f"expected each of {', '.join(MACHINES)} once at most, found '{name}'", at)
        data = reader.block("bytes of code")
        handlers, procedures = reader.numbers("handlers"), reader.numbers("procedures")
        relocations = tuple(
            Relocation(reader.u32("a place"), reader.string("a symbol"), reader.wide("a number to add"))
            for _ in range(reader.count(_RELOCATION_SIZE, "relocations"))
        )
        images[name] = StoredImage(architecture(name), data, handlers, procedures, relocations, at)
    if not images:
        reader.fail("expected the code for at least one processor, found none")
    reader.end()
    return tuple(images.values())


def notes_of(program: Program, image: CodeImage, target: Architecture) -> list[Notes]:
    """Return the notes on each block; raise ``FormatError`` for an operand that the encoding cannot represent."""
    starts = (*image.handlers, *image.procedures.values())
    names = {start: name for name, start in image.procedures.items()}
    tables = [table.name for table in program.tables]
    found: list[Notes] = []
    symbols = {relocation.offset: relocation for relocation in image.relocations}
    for code, start in zip(program.bodies(), starts, strict=True):
        stored = _Encoded(image.data, target, start, len(code.instructions), code.labels)
        notes: Notes = {}
        for index, (instruction, encoded) in enumerate(zip(code.instructions, stored.instructions, strict=True)):
            note = _note_on(instruction.operand, encoded, stored)
            if note is not None:
                notes[index] = note
            if stored.operand(encoded, note, symbols, names, tables, target) != instruction.operand:
                raise FormatError(f"'{instruction}' cannot be encoded in {image.word_size}-byte words")
        found.append(notes)
    return found


def _note_on(operand: Operand, encoded: EncodedInstruction, stored: _Encoded) -> Note | None:
    kind = encoded.row.operand_kind if encoded.row is not None else None
    match kind, operand:
        case OperandKind.REGISTER, str(name):
            return Note(NoteKind.REGISTER, name)
        case OperandKind.VALUE, Expression(addend, None) if addend < 0:
            return Note(NoteKind.NEGATIVE)
        case OperandKind.LABEL, str(name) if stored.first_label(encoded.operand) != name:
            return Note(NoteKind.LABEL, name)
    return None


class _Encoded:
    """The instructions of one block in an encoding, at most as many as in the source, and their labels."""

    def __init__(self, data: bytes, target: Architecture, start: int, count: int, labels: Mapping[str, int]) -> None:
        self._bits = target.word_bits
        self.instructions: list[EncodedInstruction] = []
        places = [start]
        for _ in range(count):
            self.instructions.append(decode_one(data, places[-1], target.word_size, target.byte_order))
            places.append(self.instructions[-1].end)
            if self.instructions[-1].row is None:
                break
        self._labels: dict[int | str, str] = {}
        self._places: dict[str, int] = {}
        for label, index in labels.items():
            if index < len(places):
                self._labels.setdefault(places[index], label)
                self._places[label] = places[index]

    def first_label(self, offset: int | str) -> str:
        """Return the first label at an offset of the encoding; raise KeyError if there is none."""
        return self._labels[offset]

    def operand(
        self,
        encoded: EncodedInstruction,
        note: Note | None,
        symbols: Mapping[int, Relocation],
        procedures: Mapping[int, str],
        tables: Sequence[str],
        target: Architecture,
    ) -> Operand:
        """
        Return the operand in source form; raise KeyError or ValueError if the encoded operand has none.

        ``note`` is the note on the instruction, None without one. The mappings give names to encoded numbers.
        """
        row, value = encoded.row, encoded.operand
        kind = row.operand_kind if row is not None else None
        expected = {NoteKind.REGISTER: OperandKind.REGISTER, NoteKind.NEGATIVE: OperandKind.VALUE,
                    NoteKind.LABEL: OperandKind.LABEL}  # fmt: skip
        if note is not None and expected[note.kind] is not kind:
            raise ValueError("a note on an operand that needs none")
        text = note.text if note is not None else None
        match kind, value:
            case None, _:
                return None
            case OperandKind.LABEL, _:
                if text is None:
                    return self.first_label(value)
                return text if self._places[text] == value else _unknown("label")
            case OperandKind.PROCEDURE, int():
                return procedures[value]
            case OperandKind.COUNTER, int():
                return COUNTERS[value].name
            case OperandKind.TABLE, int():
                return tables[value] if value < len(tables) else _unknown("table")
            case OperandKind.REGISTER, int() if text is not None:
                register = target.register(text)
                return text if register is not None and register.index == value else _unknown("register")
            case OperandKind.VALUE, int():
                relocation = symbols.get(encoded.offset + 1)
                if relocation is not None:
                    return Expression(relocation.addend, relocation.symbol)
                return Expression(value if note is None else value - (1 << self._bits))
        return value


def _unknown(what: str) -> str:
    raise ValueError(f"a {what} that is not there")


def code_of(
    image: StoredImage, blocks: Sequence[tuple[int, Block]], names: Sequence[str], tables: Sequence[str] = ()
) -> Iterator[Code]:
    """
    Iterate over the code of the blocks, each with its number of instructions, handlers first.

    ``names`` are the names of the procedures, ``tables`` those of the tables. Raise ``FormatError`` for bytes that are
    not the code of these blocks.
    """
    starts = (*image.handlers, *image.procedures)
    if len(image.procedures) != len(names) or len(starts) != len(blocks):
        raise FormatError(
            f"expected code for {len(blocks) - len(names)} handlers and {len(names)} procedures, "
            f"found {len(image.handlers)} and {len(image.procedures)}",
            offset=image.offset,
        )
    symbols = {relocation.offset: relocation for relocation in image.relocations}
    procedures = dict(zip(image.procedures, names, strict=True))
    for start, (count, block) in zip(starts, blocks, strict=True):
        stored = _Encoded(image.data, image.architecture, start, count, block.labels)
        instructions = []
        for index, encoded in enumerate(stored.instructions):
            if encoded.row is None:
                raise FormatError(
                    f"expected an instruction at byte {encoded.offset} of the program, found none", offset=image.offset
                )
            note = block.notes.get(index)
            try:
                operand = stored.operand(encoded, note, symbols, procedures, tables, image.architecture)
            except (KeyError, ValueError):
                raise FormatError(
                    f"the operand of '{encoded.row.syntax}' at byte {encoded.offset} of the program leads nowhere",
                    offset=image.offset,
                ) from None
            instructions.append(Instruction(encoded.row, operand, block.spans[index]))
        yield Code(tuple(instructions), block.labels)


def check_images(program: Program, images: Sequence[StoredImage]) -> None:
    """Encode a decoded program again, and raise ``FormatError`` if the result differs from a stored encoding."""
    for image in images:
        try:
            made = encode(program, image.architecture)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"the program cannot be encoded for {image.architecture.name}: {error}", offset=image.offset
            ) from None
        same = (made.data, made.handlers, tuple(made.procedures.values()), made.relocations)
        if same != (image.data, image.handlers, image.procedures, image.relocations):
            raise FormatError(f"the code for {image.architecture.name} is not that of the program", offset=image.offset)
