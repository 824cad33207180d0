"""Templates that log memory and strings."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.logbuffer import (
    advance,
    append,
    begin,
    check_prefix,
    end,
    overflow_if,
    room,
    write_prefix,
)
from dprobes.bpf.lower.rows.world import PAGE, next_page, read_byte
from dprobes.bpf.lower.state.handlerstate import LOG, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, KERNEL_FRAMES_MAX, ExceptionCode, Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_R = Register


def _pop_range(w: Writer) -> None:
    """Pop address and length into work words 0 and 1."""
    w.lp = None
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.asm.store(SCRATCH, w.work(1), w.stack.pop_register())
    w.open_loop()
    begin(w)


def _memory(w: Writer, i: EncodedInstruction) -> None:
    asm, address, length, kept = w.asm, w.work(0), w.work(1), w.work(2)
    done, fits, empty, fault = asm.label(), asm.label(), asm.label(), asm.label()
    _pop_range(w)
    check_prefix(w, done)
    asm.load(_R.R1, SCRATCH, length)
    asm.store(SCRATCH, kept, _R.R1)
    room(w, _R.R2, 1, ITEM_PREFIX_SIZE)
    asm.jump_if(Jump.JGE, _R.R2, _R.R1, fits)
    asm.store(SCRATCH, kept, _R.R2)
    asm.place(fits)

    def arguments() -> None:
        _log_address(w, _R.R1)
        asm.load(_R.R2, SCRATCH, kept)
        asm.alu(Alu.AND, _R.R2, w.state.log_mask)
        asm.load(_R.R3, SCRATCH, address)

    asm.load(_R.R2, SCRATCH, kept)
    asm.jump_if(Jump.JEQ, _R.R2, 0, empty)
    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: _find_fault(w, fault))
    asm.place(empty)
    write_prefix(w, Token.MEMORY, kept)
    advance(w, kept)
    asm.load(_R.R1, SCRATCH, kept)
    asm.load(_R.R2, SCRATCH, length)
    overflow_if(w, Jump.JNE, _R.R1, _R.R2, done)
    end(w)
    asm.place(done)


def _kernel_stack(w: Writer, i: EncodedInstruction) -> None:
    _stack(w, i, Token.KERNEL_STACK, w.host.kernel_stack)


def _user_stack(w: Writer, i: EncodedInstruction) -> None:
    _stack(w, i, Token.USER_STACK, lambda: w.host.user_stack(w.state.snapshot, w.work(4), w.state.log_mask))


def _stack(w: Writer, i: EncodedInstruction, token: Token, write: Callable[[], None]) -> None:
    """Log what ``write`` puts to R1, up to R2 bytes; R0 is their number then, or negative."""
    assert i.row is not None
    asm, kept, size = w.asm, w.work(2), w.work(3)
    frames = KERNEL_FRAMES_MAX if i.row.operand_kind is None else int(i.operand)
    done, fits, empty, found = asm.label(), asm.label(), asm.label(), asm.label()
    w.lp = None
    w.stack.settle()
    begin(w)
    check_prefix(w, done)
    room(w, _R.R2, w.word_size, ITEM_PREFIX_SIZE)
    asm.jump_if(Jump.JLE, _R.R2, frames, fits)
    asm.mov(_R.R2, frames)
    asm.place(fits)
    asm.store(SCRATCH, kept, 0)
    asm.store(SCRATCH, size, 0)
    asm.alu(Alu.MUL, _R.R2, w.word_size)
    asm.alu(Alu.AND, _R.R2, w.state.log_mask)
    asm.jump_if(Jump.JEQ, _R.R2, 0, empty)
    _log_address(w, _R.R1)
    write()
    asm.jump_if(Jump.JSGT, _R.R0, 0, found)
    asm.jump(empty)
    asm.place(found)
    asm.store(SCRATCH, size, _R.R0)
    asm.alu(Alu.RSH, _R.R0, w.word_size.bit_length() - 1)
    asm.store(SCRATCH, kept, _R.R0)
    asm.place(empty)
    write_prefix(w, token, kept)
    advance(w, size)
    end(w)
    asm.place(done)


def _log_address(w: Writer, register: Register) -> None:
    """Let a register point to what comes behind a prefix at LP."""
    w.asm.load(register, SCRATCH, Field.LP)
    w.pointer(register, LOG + ITEM_PREFIX_SIZE, w.state.log_mask)


def _find_fault(w: Writer, label: Label) -> None:
    """
    Find the first byte that cannot be read, page by page; log and raise it.

    If a page has come into memory meanwhile, it is the last one of the range that is shown.
    """
    asm, address, kept, position = w.asm, w.work(0), w.work(2), w.work(4)
    head, found = asm.label(), asm.label()
    asm.place(label)
    w.open_loop()
    asm.load(_R.R1, SCRATCH, address)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.head(head)
    read_byte(w, position)
    asm.jump_if(Jump.JNE, _R.R0, 0, found)
    next_page(w, _R.R1, position)
    asm.mov(_R.R2, _R.R1)
    asm.load(_R.R3, SCRATCH, address)
    asm.alu(Alu.SUB, _R.R2, _R.R3, wide=w.wide)
    asm.load(_R.R3, SCRATCH, kept)
    asm.jump_if(Jump.JGE, _R.R2, _R.R3, found)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.goto(head)
    asm.place(found)
    _throw_logged_fault(w, position)


def _throw_logged_fault(w: Writer, position: int) -> None:
    """Log the address that a field holds as a fault, if there is room, and raise it."""
    asm, size, full = w.asm, w.work(14), w.asm.label()
    w.close_loop()
    if w.point.logmax >= ITEM_PREFIX_SIZE + w.word_size:
        asm.load(_R.R1, SCRATCH, Field.LP)
        asm.jump_if(Jump.JGT, _R.R1, w.point.logmax - ITEM_PREFIX_SIZE - w.word_size, full)
        asm.store(SCRATCH, size, w.word_size)
        write_prefix(w, Token.ADDRESS_FAULT, size)
        asm.load(_R.R2, SCRATCH, position)
        append(w, _R.R2, w.word_size)
        asm.place(full)
    asm.load(_R.R1, SCRATCH, position)
    w.throw(ExceptionCode.INVALID_ADDR, _R.R1)


def _string(w: Writer, i: EncodedInstruction) -> None:
    """
    Write ``log str``: a helper reads the string at once.

    The helper neither pages in nor looks at less bytes than it may write, so where it fails the string is read page by
    page.
    """
    asm, address, maximum, limit, length = w.asm, w.work(0), w.work(1), w.work(2), w.work(3)
    done, fits, known, slow = asm.label(), asm.label(), asm.label(), asm.label()
    _pop_range(w)
    check_prefix(w, done)
    # One byte more than fits tells whether the string ends there.
    asm.load(_R.R1, SCRATCH, maximum)
    asm.store(SCRATCH, limit, _R.R1)
    room(w, _R.R2, 1, ITEM_PREFIX_SIZE - 1)
    asm.jump_if(Jump.JGE, _R.R2, _R.R1, fits)
    asm.store(SCRATCH, limit, _R.R2)
    asm.place(fits)
    asm.store(SCRATCH, length, 0)
    _log_address(w, _R.R1)
    asm.load(_R.R2, SCRATCH, limit)
    asm.alu(Alu.AND, _R.R2, w.state.log_mask)
    asm.jump_if(Jump.JEQ, _R.R2, 0, known)
    asm.alu(Alu.ADD, _R.R2, 1)
    asm.load(_R.R3, SCRATCH, address)
    w.host.read_string()
    asm.jump_if(Jump.JSLT, _R.R0, 1, slow)
    asm.alu(Alu.SUB, _R.R0, 1)
    asm.store(SCRATCH, length, _R.R0)
    asm.place(known)
    asm.load(_R.R1, SCRATCH, length)
    room(w, _R.R2, 1, ITEM_PREFIX_SIZE)
    overflow_if(w, Jump.JGT, _R.R1, _R.R2, done)
    write_prefix(w, Token.STRING, length)
    advance(w, length)
    end(w)
    asm.place(done)

    def by_pages() -> None:
        asm.place(slow)
        _string_by_pages(w, known)

    w.defer(by_pages)


def _string_by_pages(w: Writer, known: Label) -> None:
    """Read a string page by page, so that nothing behind its end is touched, and look for the end byte by byte."""
    asm, address, limit, length = w.asm, w.work(0), w.work(2), w.work(3)
    chunk, seen, position = w.work(4), w.work(5), w.work(6)
    pages, fits, fault, scan, complete, ended = (asm.label() for _ in range(6))
    w.open_loop()
    w.loops.head(pages)
    asm.load(_R.R1, SCRATCH, address)
    asm.load(_R.R2, SCRATCH, length)
    asm.alu(Alu.ADD, _R.R1, _R.R2, wide=w.wide)
    asm.store(SCRATCH, position, _R.R1)
    asm.alu(Alu.AND, _R.R1, PAGE - 1)
    asm.mov(_R.R3, PAGE)
    asm.alu(Alu.SUB, _R.R3, _R.R1)
    asm.store(SCRATCH, chunk, _R.R3)
    asm.load(_R.R1, SCRATCH, limit)
    asm.alu(Alu.SUB, _R.R1, _R.R2)
    asm.jump_if(Jump.JEQ, _R.R1, 0, complete)
    asm.jump_if(Jump.JLE, _R.R3, _R.R1, fits)
    asm.store(SCRATCH, chunk, _R.R1)
    asm.place(fits)

    def arguments() -> None:
        _string_address(w, _R.R1, length)
        asm.load(_R.R2, SCRATCH, chunk)
        asm.alu(Alu.AND, _R.R2, w.state.log_mask)
        asm.load(_R.R3, SCRATCH, position)

    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    asm.store(SCRATCH, seen, 0)
    w.loops.head(scan)
    next_page = asm.label()
    asm.load(_R.R1, SCRATCH, seen)
    asm.load(_R.R2, SCRATCH, chunk)
    asm.jump_if(Jump.JEQ, _R.R1, _R.R2, next_page)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, seen, _R.R1)
    _string_address(w, _R.R1, length)
    asm.load(_R.R1, _R.R1, 0, Size.B)
    asm.jump_if(Jump.JEQ, _R.R1, 0, ended)
    asm.load(_R.R1, SCRATCH, length)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, length, _R.R1)
    w.loops.goto(scan)
    asm.place(next_page)
    w.loops.goto(pages)
    asm.place(fault)
    _throw_logged_fault(w, position)
    asm.place(complete)
    asm.place(ended)
    w.close_loop()
    w.loops.goto(known)


def _string_address(w: Writer, register: Register, length: int) -> None:
    """Let a register point to the byte of the string at the position that a field holds; takes R9."""
    w.asm.load(register, SCRATCH, Field.LP)
    w.asm.load(_R.R9, SCRATCH, length)
    w.asm.alu(Alu.ADD, register, _R.R9)
    w.pointer(register, LOG + ITEM_PREFIX_SIZE, w.state.log_mask)


TEMPLATES: dict[str, Template] = {
    "log kstack, <frames>": _kernel_stack,
    "log kstack": _kernel_stack,
    "log ustack, <frames>": _user_stack,
    "log ustack": _user_stack,
    "log str": _string,
    "log mrf": _memory,
}
