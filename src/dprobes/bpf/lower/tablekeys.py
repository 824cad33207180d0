"""The key of a table, put together in the state of a handler (``StateLayout.key``) as ``keyed.layout`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.layout import power_of_two
from dprobes.bpf.lower.rows.world import throw_fault
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ExceptionCode
from dprobes.rpn.tables import STRING_SIZE_MAX, KeyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Writer
    from dprobes.rpn.tables import Key

__all__ = ["clear", "pop_keys"]

_R = Register

_ADDRESS, _READ, _POSITION, _SNAPSHOT = 1, 9, 10, 14
"""
The words of work: the addresses of up to 8 strings and bytes, of keys and what is kept; bytes of a string that are
read, the address of the next one; four words for a snapshot.
"""

_POSITION_MASK = power_of_two(STRING_SIZE_MAX + 1) - 1


def pop_keys(w: Writer, keys: Sequence[Key]) -> None:
    """
    Pop the cells of keys, and put the key together; nothing is in registers behind it. Work word 0 stays.

    What a table keeps may be the last one of them: it comes behind the key.
    """
    asm = w.asm
    places: list[int] = []
    end = 0
    for key in keys:
        places.append(w.state.key + end)
        end += key.bytes
    parts = list(zip(keys, places, strict=True))
    read = [place for key, place in parts if key.kind is KeyKind.BYTES or key.kind.is_string_in_memory]
    has_strings = any(key.kind.is_string_in_memory for key in keys)
    word_size = 8 if w.wide else 4
    for key, place in reversed(parts):
        for number in range(key.popped(word_size)):
            cell = w.stack.pop_register()
            if place in read:
                asm.store(SCRATCH, w.work(_ADDRESS + read.index(place)), cell)
            else:
                asm.mov(_R.R9, SCRATCH)
                asm.alu(Alu.ADD, _R.R9, place)
                whole = key.kind in (KeyKind.WORD, KeyKind.SIGNED, KeyKind.ADDRESS)
                if key.kind is KeyKind.SIGNED and not w.wide:
                    asm.alu(Alu.LSH, cell, 32)
                    asm.alu(Alu.ARSH, cell, 32)
                asm.store(_R.R9, word_size * number, cell, Size.DW if whole else Size.of(word_size))
            w.stack.release()
    if has_strings:
        w.open_loop()
    else:
        w.stack.settle()
    for key, place in parts:
        match key.kind:
            case KeyKind.STRING | KeyKind.CUT_STRING:
                clear(w, place, key.bytes)
                _read_string(w, place, key.size, w.work(_ADDRESS + read.index(place)))
            case KeyKind.BYTES:
                clear(w, place, key.bytes)
                _read_bytes(w, place, key.size, w.work(_ADDRESS + read.index(place)), in_loop=has_strings)
            case KeyKind.COMM:
                _point_to(w, _R.R1, place)
                w.host.process_name()
            case KeyKind.USER_STACK:
                clear(w, place, key.bytes)
                w.host.pid()
                _point_to(w, _R.R1, place)
                asm.store(_R.R1, 0, _R.R0)
                _point_to(w, _R.R1, place + 8)
                asm.mov(_R.R2, key.bytes - 8)
                w.host.user_stack(w.state.snapshot, w.work(_SNAPSHOT), w.state.log_mask, place + 8)
            case KeyKind.KERNEL_STACK:
                clear(w, place, key.bytes)
                _point_to(w, _R.R1, place)
                asm.mov(_R.R2, key.bytes)
                w.host.kernel_stack()
    if has_strings:
        w.close_loop()


def _point_to(w: Writer, register: Register, place: int) -> None:
    w.asm.mov(register, SCRATCH)
    w.asm.alu(Alu.ADD, register, place)


def clear(w: Writer, place: int, size: int) -> None:
    """Clear bytes of the state; takes R1."""
    _point_to(w, _R.R1, place)
    for position in range(0, size, 8):
        w.asm.store(_R.R1, position, 0)


def _read_bytes(w: Writer, place: int, size: int, address: int, *, in_loop: bool) -> None:
    """Read ``size`` bytes at the address that a field holds; zeros are behind them already."""
    asm, fault = w.asm, w.asm.label()

    def arguments() -> None:
        _point_to(w, _R.R1, place)
        asm.mov(_R.R2, size)
        asm.load(_R.R3, SCRATCH, address)

    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: throw_fault(w, fault, size, address, in_loop=in_loop))


def _read_string(w: Writer, place: int, size: int, address: int) -> None:
    """
    Read up to ``size`` bytes of the string at the address that a field holds; zeros are there already.

    A helper reads it at once, but neither pages in nor looks at fewer bytes than it may write, so where it fails the
    string is read byte by byte.
    """
    asm, known, slow = w.asm, w.asm.label(), w.asm.label()
    _point_to(w, _R.R1, place)
    asm.mov(_R.R2, size + 1)
    asm.load(_R.R3, SCRATCH, address)
    w.host.read_string()
    asm.jump_if(Jump.JSLT, _R.R0, 1, slow)
    asm.place(known)

    def by_bytes() -> None:
        asm.place(slow)
        _read_by_bytes(w, place, size, address, known)

    w.defer(by_bytes)


def _read_by_bytes(w: Writer, place: int, size: int, address: int, known: Label) -> None:
    asm, read, position = w.asm, w.work(_READ), w.work(_POSITION)
    head, fault, ended = asm.label(), asm.label(), asm.label()
    clear(w, place, (size // 8 + 1) * 8)  # what was read before the helper failed
    asm.store(SCRATCH, read, 0)
    asm.load(_R.R1, SCRATCH, address)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, read)
    asm.jump_if(Jump.JGE, _R.R1, size, ended)

    def arguments() -> None:
        _point_to_byte(w, place, read)
        asm.mov(_R.R2, 1)
        asm.load(_R.R3, SCRATCH, position)

    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    _point_to_byte(w, place, read)
    asm.load(_R.R1, _R.R1, 0, Size.B)
    asm.jump_if(Jump.JEQ, _R.R1, 0, ended)
    for field in (read, position):
        asm.load(_R.R1, SCRATCH, field)
        asm.alu(Alu.ADD, _R.R1, 1, wide=w.wide)
        asm.store(SCRATCH, field, _R.R1)
    w.loops.goto(head)
    asm.place(fault)
    w.close_loop()
    asm.load(_R.R1, SCRATCH, position)
    w.throw(ExceptionCode.INVALID_ADDR, _R.R1)
    asm.place(ended)
    w.loops.goto(known)


def _point_to_byte(w: Writer, place: int, read: int) -> None:
    w.asm.load(_R.R1, SCRATCH, read)
    w.pointer(_R.R1, place, _POSITION_MASK)
