"""
Templates that compare a process name or a string with a text, and push a process name.

What is compared comes to a buffer among the words of work. It has room for the longest text, its NUL, and one byte
more, which tells that a string goes on. Whether bytes are the same is worked out without a branch, so that there is
one path for the verifier.
"""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import PROCESS_NAME_SIZE, ExceptionCode

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_R = Register

_ADDRESS, _LENGTH, _POSITION, _BUFFER = 0, 1, 2, 4
"""The words of work: where the string is, its length with the NUL, the byte that is looked at; then the buffer."""

_POSITION_MASK = 255
"""The mask of positions in a string: a power of two above the longest text."""


def _point_to_buffer(w: Writer) -> None:
    w.asm.mov(_R.R1, SCRATCH)
    w.asm.alu(Alu.ADD, _R.R1, w.work(_BUFFER))


def _load_process_name(w: Writer) -> None:
    w.stack.settle()
    _point_to_buffer(w)
    w.host.process_name()


def _push_process_name(w: Writer, i: EncodedInstruction) -> None:
    _load_process_name(w)
    for start in reversed(range(0, PROCESS_NAME_SIZE, w.word_size)):
        value = w.stack.take()
        w.asm.load(value, SCRATCH, w.work(_BUFFER) + start, w.size)
        w.stack.push(value)


def _match_process_name(*, whole: bool) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        wanted = str(i.operand).encode()
        if len(wanted) >= PROCESS_NAME_SIZE:
            w.stack.push(1)
            return
        _load_process_name(w)
        differs = w.stack.copy(0)
        _compare(w, differs, wanted + b"\0" * whole)
        _push_whether(w, differs)

    return template


def _match_string(*, whole: bool) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        wanted = str(i.operand).encode()
        limit = len(wanted) + whole
        if not limit:
            w.stack.drop(1)
            w.stack.push(0)
            return
        _read_string(w, limit)
        differs = w.field(w.work(_LENGTH))
        w.asm.alu(Alu.XOR, differs, len(wanted) + 1)
        _compare(w, differs, wanted)
        _push_whether(w, differs)

    return template


def _compare(w: Writer, differs: Register, wanted: bytes) -> None:
    """Set bits of ``differs`` unless the buffer begins with ``wanted``."""
    part = w.stack.take()
    for start in range(0, len(wanted), 8):
        piece = wanted[start : start + 8]
        unused = 64 - 8 * len(piece)
        w.asm.load(part, SCRATCH, w.work(_BUFFER) + start)
        if unused:
            w.asm.alu(Alu.LSH, part, unused)
        w.asm.mov(_R.R9, int.from_bytes(piece, "little") << unused)
        w.asm.alu(Alu.XOR, part, _R.R9)
        w.asm.alu(Alu.OR, differs, part)


def _push_whether(w: Writer, bits: Register) -> None:
    """Push 1 if a register is not 0, else 0: the highest bit of ``bits | -bits``."""
    negative = w.stack.copy(0)
    w.asm.alu(Alu.SUB, negative, bits)
    w.asm.alu(Alu.OR, bits, negative)
    w.asm.alu(Alu.RSH, bits, 63)
    w.stack.push(bits)


def _read_string(w: Writer, limit: int) -> None:
    """
    Pop an address, and read up to ``limit`` bytes of the string there to the buffer.

    Its length with the NUL comes to a word of work, ``limit + 1`` if it has none so far. A helper reads it at once,
    but neither pages in nor looks at fewer bytes than it may write, so where it fails the string is read byte by byte.
    """
    asm, known, slow = w.asm, w.asm.label(), w.asm.label()
    asm.store(SCRATCH, w.work(_ADDRESS), w.stack.pop_register())
    w.open_loop()
    _point_to_buffer(w)
    asm.mov(_R.R2, limit + 1)
    asm.load(_R.R3, SCRATCH, w.work(_ADDRESS))
    w.host.read_string()
    asm.jump_if(Jump.JSLT, _R.R0, 1, slow)
    asm.store(SCRATCH, w.work(_LENGTH), _R.R0)
    asm.place(known)

    def by_bytes() -> None:
        asm.place(slow)
        _read_by_bytes(w, limit, known)

    w.defer(by_bytes)


def _read_by_bytes(w: Writer, limit: int, known: Label) -> None:
    asm, address, length, position = w.asm, w.work(_ADDRESS), w.work(_LENGTH), w.work(_POSITION)
    head, fault, ended = asm.label(), asm.label(), asm.label()
    asm.store(SCRATCH, length, 1)
    asm.load(_R.R1, SCRATCH, address)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, length)
    asm.jump_if(Jump.JGT, _R.R1, limit, ended)

    def arguments() -> None:
        _point_to_byte(w)
        asm.mov(_R.R2, 1)
        asm.load(_R.R3, SCRATCH, position)

    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    _point_to_byte(w)
    asm.load(_R.R1, _R.R1, 0, Size.B)
    asm.jump_if(Jump.JEQ, _R.R1, 0, ended)
    for field in (length, position):
        asm.load(_R.R1, SCRATCH, field)
        asm.alu(Alu.ADD, _R.R1, 1, wide=w.wide)
        asm.store(SCRATCH, field, _R.R1)
    w.loops.goto(head)
    asm.place(fault)
    w.close_loop()
    asm.load(_R.R1, SCRATCH, position)
    w.throw(ExceptionCode.INVALID_ADDR, _R.R1)
    asm.place(ended)
    w.close_loop()
    w.loops.goto(known)


def _point_to_byte(w: Writer) -> None:
    """Let R1 point to the byte of the buffer that is to be read: the length counts the NUL that may be there."""
    w.asm.load(_R.R1, SCRATCH, w.work(_LENGTH))
    w.asm.alu(Alu.SUB, _R.R1, 1)
    w.pointer(_R.R1, w.work(_BUFFER), _POSITION_MASK)


TEMPLATES: dict[str, Template] = {
    "push comm": _push_process_name,
    "match comm, <text>": _match_process_name(whole=True),
    "match commn, <text>": _match_process_name(whole=False),
    "match str, <text>": _match_string(whole=True),
    "match strn, <text>": _match_string(whole=False),
}
