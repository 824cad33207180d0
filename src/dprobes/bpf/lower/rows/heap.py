"""
Templates of the heap.

Its blocks lie one behind the other, as in ``vm.heap``; the header word of each says its size::

    | size + used | data ... | size + used | data ...

``used`` is 1 or 0: sizes are multiples of the word. What follows the last block is ``Field.HEAP_END``, which is 0
before the first allocation of a hit.
"""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.state.handlerstate import CELLS, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ExceptionCode

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_R = Register


def _usable(w: Writer) -> int:
    """Return the size of the one block of an empty heap."""
    return (w.point.heap - w.word_size) // w.word_size * w.word_size


def _header(w: Writer, register: Register, position: int) -> None:
    """Let a register point to the header at the position that a field holds."""
    w.asm.load(register, SCRATCH, position)
    w.pointer(register, w.state.heap_start, w.state.heap_mask)


def _next(w: Writer, register: Register, position: int, size: Register) -> None:
    """Load the position behind a block of a size, whose header is at the position that a field holds."""
    w.asm.load(register, SCRATCH, position)
    w.asm.alu(Alu.ADD, register, size)
    w.asm.alu(Alu.ADD, register, w.word_size)


def _malloc(w: Writer, i: EncodedInstruction) -> None:
    asm, word = w.asm, w.word_size
    asked, size, position = w.work(0), w.work(1), w.work(2)
    ready, enough, head, follow, fits, whole, none, done = (asm.label() for _ in range(8))
    asm.store(SCRATCH, asked, w.stack.pop_register())
    w.open_loop()
    asm.load(_R.R1, SCRATCH, asked)
    w.defer(lambda: _throw_no_memory(w, none, asked))
    asm.jump_if(Jump.JGT, _R.R1, max(0, _usable(w)), none)
    asm.alu(Alu.ADD, _R.R1, word - 1)
    asm.alu(Alu.AND, _R.R1, -word)
    asm.store(SCRATCH, size, _R.R1)
    asm.jump_if(Jump.JNE, _R.R1, 0, enough)
    asm.store(SCRATCH, size, word)
    asm.place(enough)
    asm.store(SCRATCH, position, 0)
    asm.load(_R.R1, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JNE, _R.R1, 0, ready)
    if _usable(w) <= 0:
        asm.jump(none)
    else:
        _header(w, _R.R1, position)
        asm.store(_R.R1, 0, _usable(w), w.size)
        asm.store(SCRATCH, Field.HEAP_END, word + _usable(w))
    asm.place(ready)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, none)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.load(_R.R3, SCRATCH, size)
    asm.mov(_R.R4, _R.R2)
    asm.alu(Alu.AND, _R.R4, 1)
    asm.jump_if(Jump.JNE, _R.R4, 0, follow)
    asm.jump_if(Jump.JGE, _R.R2, _R.R3, fits)
    asm.place(follow)
    asm.alu(Alu.AND, _R.R2, -2)
    _next(w, _R.R1, position, _R.R2)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.goto(head)
    asm.place(fits)
    # What is left of the block becomes one of its own, if there is room for a header and a word.
    asm.mov(_R.R4, _R.R2)
    asm.alu(Alu.SUB, _R.R4, _R.R3)
    asm.store(SCRATCH, w.work(3), _R.R4)
    asm.jump_if(Jump.JLT, _R.R4, 2 * word, whole)
    asm.mov(_R.R5, _R.R3)
    asm.alu(Alu.OR, _R.R5, 1)
    asm.store(_R.R1, 0, _R.R5, w.size)
    _next(w, _R.R5, position, _R.R3)
    asm.store(SCRATCH, w.work(4), _R.R5)
    _header(w, _R.R5, w.work(4))
    asm.load(_R.R4, SCRATCH, w.work(3))
    asm.alu(Alu.SUB, _R.R4, word)
    asm.store(_R.R5, 0, _R.R4, w.size)
    asm.jump(done)
    asm.place(whole)
    asm.store(SCRATCH, size, _R.R2)
    asm.alu(Alu.OR, _R.R2, 1)
    asm.store(_R.R1, 0, _R.R2, w.size)
    asm.place(done)
    asm.load(_R.R1, SCRATCH, position)
    w.pointer(_R.R1, w.state.heap_start + word, w.state.heap_mask)
    asm.load(_R.R2, SCRATCH, size)
    asm.alu(Alu.AND, _R.R2, w.state.heap_mask)
    w.host.clear_memory()
    w.close_loop()
    handle = w.field(position)
    asm.alu(Alu.ADD, handle, word)
    w.stack.push(handle)


def _throw_no_memory(w: Writer, label: Label, asked: int) -> None:
    w.asm.place(label)
    w.close_loop()
    w.asm.load(_R.R1, SCRATCH, asked)
    w.throw(ExceptionCode.HEAP_NOMEM, _R.R1)


def _find(w: Writer, handle: int, position: int, missing: Label, previous: int | None = None) -> None:
    """
    Write the search for the allocated block with the handle in a field.

    Leave the position of its header in another field, and in ``previous`` that of the block before, plus 1, or 0. Go to
    ``missing`` if there is none.
    """
    asm, head, follow, found = w.asm, w.asm.label(), w.asm.label(), w.asm.label()
    asm.store(SCRATCH, position, 0)
    if previous is not None:
        asm.store(SCRATCH, previous, 0)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, missing)
    asm.load(_R.R3, SCRATCH, handle)
    asm.alu(Alu.ADD, _R.R1, w.word_size)
    asm.jump_if(Jump.JNE, _R.R1, _R.R3, follow)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, 1)
    asm.jump_if(Jump.JNE, _R.R2, 0, found)
    asm.jump(missing)
    asm.place(follow)
    if previous is not None:
        asm.load(_R.R1, SCRATCH, position)
        asm.alu(Alu.ADD, _R.R1, 1)
        asm.store(SCRATCH, previous, _R.R1)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    _next(w, _R.R1, position, _R.R2)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.goto(head)
    asm.place(found)


def _free(w: Writer, i: EncodedInstruction) -> None:
    asm, handle, position, previous = w.asm, w.work(0), w.work(1), w.work(2)
    missing, first = asm.label(), asm.label()
    asm.store(SCRATCH, handle, w.stack.pop_register())
    w.open_loop()
    w.defer(lambda: _throw_no_block(w, missing, handle, None))
    _find(w, handle, position, missing, previous)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    asm.store(_R.R1, 0, _R.R2, w.size)
    _join(w, position)
    asm.load(_R.R1, SCRATCH, previous)
    asm.jump_if(Jump.JEQ, _R.R1, 0, first)
    asm.alu(Alu.SUB, _R.R1, 1)
    asm.store(SCRATCH, previous, _R.R1)
    _join(w, previous)
    asm.place(first)
    w.close_loop()


def _join(w: Writer, position: int) -> None:
    """Join the block at the position that a field holds with the one behind it, if both are free."""
    asm, apart, following = w.asm, w.asm.label(), w.work(3)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.mov(_R.R3, _R.R2)
    asm.alu(Alu.AND, _R.R3, 1)
    asm.jump_if(Jump.JNE, _R.R3, 0, apart)
    _next(w, _R.R3, position, _R.R2)
    asm.load(_R.R4, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R3, _R.R4, apart)
    asm.store(SCRATCH, following, _R.R3)
    _header(w, _R.R3, following)
    asm.load(_R.R4, _R.R3, 0, w.size)
    asm.mov(_R.R5, _R.R4)
    asm.alu(Alu.AND, _R.R5, 1)
    asm.jump_if(Jump.JNE, _R.R5, 0, apart)
    asm.alu(Alu.ADD, _R.R2, _R.R4)
    asm.alu(Alu.ADD, _R.R2, w.word_size)
    asm.store(_R.R1, 0, _R.R2, w.size)
    asm.place(apart)


def _throw_no_block(w: Writer, label: Label, handle: int, offset: int | None) -> None:
    w.asm.place(label)
    w.close_loop()
    w.asm.load(_R.R1, SCRATCH, handle)
    if offset is None:
        w.throw(ExceptionCode.HEAP_INVALID_HANDLE, _R.R1)
        return
    w.asm.load(_R.R2, SCRATCH, offset)
    w.throw(ExceptionCode.HEAP_INVALID_HANDLE, _R.R1, _R.R2)


def _throw_outside(w: Writer, label: Label, handle: int, offset: int) -> None:
    w.asm.place(label)
    w.close_loop()
    w.asm.load(_R.R1, SCRATCH, handle)
    w.asm.load(_R.R2, SCRATCH, offset)
    w.throw(ExceptionCode.HEAP_INVALID_OFFSET, _R.R1, _R.R2)


def _range(w: Writer, length: int) -> None:
    """Find the place of ``length`` bytes of a block: handle and offset are in work words 0 and 1, the place in 1."""
    asm, handle, offset, position = w.asm, w.work(0), w.work(1), w.work(2)
    missing, outside = asm.label(), asm.label()
    w.defer(lambda: _throw_no_block(w, missing, handle, offset))
    w.defer(lambda: _throw_outside(w, outside, handle, offset))
    _find(w, handle, position, missing)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    asm.load(_R.R3, SCRATCH, offset)
    asm.jump_if(Jump.JGT, _R.R3, _R.R2, outside)
    asm.alu(Alu.SUB, _R.R2, _R.R3)
    asm.mov(_R.R4, length)
    asm.jump_if(Jump.JLT, _R.R2, _R.R4, outside)
    asm.load(_R.R1, SCRATCH, handle)
    asm.alu(Alu.ADD, _R.R1, _R.R3)
    asm.store(SCRATCH, offset, _R.R1)


def _access(w: Writer, count: int, width: int, *, stores: bool) -> None:
    """Write a loop that copies values between the heap (the place is in word 1) and cells (the position in word 5)."""
    asm, rest, place, position, head, done = w.asm, w.work(6), w.work(1), w.work(5), w.asm.label(), w.asm.label()
    asm.store(SCRATCH, rest, count)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, rest)
    asm.jump_if(Jump.JEQ, _R.R1, 0, done)
    asm.alu(Alu.SUB, _R.R1, 1)
    asm.store(SCRATCH, rest, _R.R1)
    size = min(width, w.word_size)
    for part in range(-(-width // w.word_size)):
        _header(w, _R.R1, place)
        asm.load(_R.R2, SCRATCH, position)
        if part:
            asm.alu(Alu.ADD, _R.R2, part)
        w.cell(_R.R2)
        if stores:
            asm.load(_R.R3, _R.R2, CELLS)
            asm.store(_R.R1, part * size, _R.R3, Size.of(size))
        else:
            asm.load(_R.R3, _R.R1, part * size, Size.of(size))
            asm.store(_R.R2, CELLS, _R.R3)
    for field, step in ((place, width), (position, -(-width // w.word_size))):
        asm.load(_R.R1, SCRATCH, field)
        asm.alu(Alu.ADD, _R.R1, step)
        asm.store(SCRATCH, field, _R.R1)
    w.loops.goto(head)
    asm.place(done)


def _pop_operands(w: Writer) -> None:
    """Pop offset and handle into work words 1 and 0."""
    w.asm.store(SCRATCH, w.work(1), w.stack.pop_register())
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.open_loop()


def _store_position(w: Writer) -> None:
    """Put TSP into work word 5."""
    if w.stack.tsp is None:
        w.stack.store_tsp()
        w.asm.load(_R.R1, SCRATCH, Field.TSP)
        w.asm.store(SCRATCH, w.work(5), _R.R1)
        w.reload_tsp()
    else:
        w.asm.store(SCRATCH, w.work(5), w.stack.tsp + w.stack.top)


def _push_heap(width: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        count = int(i.operand)
        _pop_operands(w)
        _range(w, count * width)
        w.close_loop()
        w.stack.drop(-count * -(-width // w.word_size))
        _store_position(w)
        _access(w, count, width, stores=False)
        w.close_loop()

    return template


def _pop_heap(width: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        count = int(i.operand)
        _pop_operands(w)
        _store_position(w)
        w.stack.drop(count * -(-width // w.word_size))
        if w.stack.tsp is None:
            w.stack.store_tsp()
            w.reload_tsp()
        _range(w, count * width)
        _access(w, count, width, stores=True)
        w.close_loop()

    return template


TEMPLATES: dict[str, Template] = {
    "malloc": _malloc,
    "free": _free,
    **{f"push h, u{8 << n}, <values>": _push_heap(1 << n) for n in range(4)},
    **{f"pop h, u{8 << n}, <values>": _pop_heap(1 << n) for n in range(4)},
}
