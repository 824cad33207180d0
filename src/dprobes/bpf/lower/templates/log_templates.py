"""Templates that log cells, memory and strings, and those that set codes and positions."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import LOG, SCRATCH, Field, store_number
from dprobes.bpf.lower.templates.world_templates import PAGE, next_page, read_byte
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, KERNEL_FRAMES_MAX, ExceptionCode, Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.state.handler_state import Operand
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction

__all__ = [
    "LOG_MEMORY_TEMPLATES",
    "LOG_TEMPLATES",
    "append",
    "begin",
    "check_prefix",
    "end",
    "move_back",
    "move_to",
    "overflow_if",
    "room",
    "write_prefix",
]

# The code that the logging templates share: LP and PLP, overflow, prefixes.
#
# The rules are those of ``vm.log_rules``. A template calls ``begin`` before it logs, and ``end`` when it has succeeded.


_R = Register


def begin(w: Writer) -> None:
    """If the handler reads PLP, set it to LP, the present end of the log. Clobbers R1."""
    if w.flow.uses("push plp"):
        w.asm.copy(SCRATCH, Field.PLP, Field.LP)


end = begin
"""Set PLP to the new LP at the end of an instruction that succeeded."""


def overflow_if(w: Writer, condition: Jump, register: Register, operand: Operand, ignored: Label) -> None:
    """Raise LOG_OVERFLOW if a condition is true. If the program ignores it, close the log and go to ``ignored``."""
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        full = w.asm.label()

        def close() -> None:
            _close(w)
            w.asm.jump(ignored)

        w.asm.jump_if(condition, register, operand, full)
        w.defer(close, full)
    else:
        w.throw_if(condition, register, operand, ExceptionCode.LOG_OVERFLOW, w.point.logmax, wide=True)


def overflow(w: Writer) -> None:
    """Raise LOG_OVERFLOW. If the program ignores that exception, close the log."""
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        _close(w)
    else:
        w.throw(ExceptionCode.LOG_OVERFLOW, w.point.logmax)


def _close(w: Writer) -> None:
    """Close the log, so that nothing more is logged (``Machine.close_log``). Clobbers R1."""
    closed = w.asm.label()
    w.asm.jump_if_word(Jump.JNE, SCRATCH, Field.CUT_AT, 0, closed)
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    w.asm.alu(Alu.ADD, _R.R1, 1)
    w.asm.store(SCRATCH, Field.CUT_AT, _R.R1)
    w.asm.store(SCRATCH, Field.LP, w.point.logmax)
    w.asm.place(closed)


def open_again(w: Writer) -> None:
    """If the log is closed, set LP to its end. Clobbers R1."""
    if not w.may_cut:
        return
    is_open = w.asm.label()
    w.asm.jump_if_word(Jump.JEQ, SCRATCH, Field.CUT_AT, 0, is_open)
    w.asm.alu(Alu.SUB, _R.R1, 1)
    w.asm.store(SCRATCH, Field.LP, _R.R1)
    w.asm.store(SCRATCH, Field.CUT_AT, 0)
    w.asm.place(is_open)


def room(w: Writer, register: Register, size: int, prefix: int = 0) -> None:
    """Load the number of items of ``size`` bytes that still fit in the log after ``prefix`` bytes. Clobbers R9."""
    w.asm.load(_R.R9, SCRATCH, Field.LP)
    w.asm.mov(register, w.point.logmax - prefix)
    w.asm.alu(Alu.SUB, register, _R.R9)
    if size > 1:
        w.asm.alu(Alu.RSH, register, size.bit_length() - 1)


def cut_to_room(w: Writer, kept: int, wanted: int, size: int, prefix: int = ITEM_PREFIX_SIZE) -> None:
    """
    Set ``kept`` to ``wanted``, or to the number of items that fit after a prefix, if less. Clobbers R1, R2 and R9.

    ``kept`` and ``wanted`` are fields.
    """
    fits = w.asm.label()
    w.asm.copy(SCRATCH, kept, wanted)
    room(w, _R.R2, size, prefix)
    w.asm.jump_if(Jump.JGE, _R.R2, _R.R1, fits)
    w.asm.store(SCRATCH, kept, _R.R2)
    w.asm.place(fits)


def finish(w: Writer, kept: int, wanted: int, done: Label) -> None:
    """
    Raise an overflow if the field ``kept`` is less than ``wanted``, in items. Otherwise complete the instruction.

    If the program ignores the exception, go to ``done``.
    """
    w.asm.load(_R.R1, SCRATCH, kept)
    w.asm.load(_R.R2, SCRATCH, wanted)
    overflow_if(w, Jump.JNE, _R.R1, _R.R2, done)
    end(w)
    w.asm.place(done)


def append(w: Writer, value: Register, size: int) -> None:
    """Write a value at LP and advance LP. Clobbers R1."""
    asm = w.asm
    asm.load(_R.R1, SCRATCH, Field.LP)
    w.pointer(_R.R1, 0, w.state.log_mask)
    asm.store(_R.R1, LOG, value, Size.of(size))
    asm.increase(SCRATCH, Field.LP, size)


def write_prefix(w: Writer, token: Token, length: int) -> None:
    """Write a token and the 16-bit length in a field at LP, and advance LP. Clobbers R1 and R2."""
    asm = w.asm
    asm.load(_R.R2, SCRATCH, length)
    asm.load(_R.R1, SCRATCH, Field.LP)
    w.pointer(_R.R1, 0, w.state.log_mask)
    asm.store(_R.R1, LOG, int(token), Size.B)
    asm.store(_R.R1, LOG + 1, _R.R2, Size.H)
    asm.increase(SCRATCH, Field.LP, ITEM_PREFIX_SIZE)


def check_prefix(w: Writer, ignored: Label) -> None:
    """Raise an overflow if not even a prefix fits. Clobbers R1."""
    if w.point.logmax < ITEM_PREFIX_SIZE:
        if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
            _close(w)
            w.asm.jump(ignored)
            return
        w.asm.mov(_R.R1, 1)
        w.throw_if(Jump.JNE, _R.R1, 0, ExceptionCode.LOG_OVERFLOW, w.point.logmax, wide=True)
        return
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    overflow_if(w, Jump.JGT, _R.R1, w.point.logmax - ITEM_PREFIX_SIZE, ignored)


def advance(w: Writer, field: int) -> None:
    """Add the number in a field of the state to LP; clobbers R1 and R2."""
    w.asm.load(_R.R1, SCRATCH, Field.LP)
    w.asm.load(_R.R2, SCRATCH, field)
    w.asm.alu(Alu.ADD, _R.R1, _R.R2)
    w.asm.store(SCRATCH, Field.LP, _R.R1)


# A position that a handler moves: ``highest`` is a field with the end of this hit's data in the buffer.


def move_back(w: Writer, position: Field, highest: Field) -> None:
    """Raise ``highest`` to ``position`` if that is greater, before it is moved. Clobbers R1 and R2."""
    asm, known = w.asm, w.asm.label()
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, highest)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, known)
    asm.store(SCRATCH, highest, _R.R1)
    asm.place(known)


def move_to(w: Writer, target: int, position: Field, highest: Field, area: int, mask: int) -> None:
    """
    Move a position of the buffer at ``area`` to the value of the field ``target``.

    Clear the bytes before it that this hit has not written. Clobbers R0-R5. No cell of the stack may be in a register.
    """
    asm, length, done = w.asm, w.work(1), w.asm.label()
    move_back(w, position, highest)
    asm.copy(SCRATCH, position, target)
    asm.load(_R.R2, SCRATCH, highest)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, done)
    asm.alu(Alu.SUB, _R.R1, _R.R2)
    asm.store(SCRATCH, length, _R.R1)
    asm.load(_R.R1, SCRATCH, highest)
    w.pointer(_R.R1, area, mask)
    asm.load(_R.R2, SCRATCH, length)
    asm.alu(Alu.AND, _R.R2, mask)
    w.host.clear_memory()
    asm.copy(SCRATCH, highest, target)
    asm.place(done)


# Templates that log cells, and those that change codes and LP.


_UNROLLED = 16
_REACH = (1 << 15) - 64
"""Maximum offset in the state that fits the offset of an instruction."""


# Cells


def _cells(width: int) -> Template:
    """Return the template of ``log <count>`` (width 0: the word) and of ``log b|w|d, <count>``."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        count, size = int(i.operand), width or w.word_size
        if w.lp is not None and count <= _UNROLLED:
            behind = w.lp + count * size
            if behind <= w.point.logmax and LOG + behind < _REACH:
                _to_known_place(w, w.lp, count, size)
                return
        w.lp = None
        w.open_loop()
        begin(w)
        if count <= _UNROLLED and count * size <= w.point.logmax:
            _in_a_row(w, count, size)
        else:
            _in_a_loop(w, count, size)

    return template


def _to_known_place(w: Writer, lp: int, count: int, size: int) -> None:
    asm = w.asm
    if w.flow.uses("push plp"):
        asm.store(SCRATCH, Field.PLP, lp + count * size)
    for n in range(count):
        value, place = w.stack.peek(n), LOG + lp + n * size
        if isinstance(value, Register):
            asm.store(SCRATCH, place, value, Size.of(size))
        elif size == 8:
            store_number(asm, SCRATCH, place, value)
        else:
            low = value & ((1 << 8 * size) - 1)
            asm.store(SCRATCH, place, low - (1 << 32) if low >> 31 else low, Size.of(size))
        w.stack.release()
    w.stack.drop(count)
    w.lp = lp + count * size
    asm.store(SCRATCH, Field.LP, w.lp)


def _in_a_row(w: Writer, count: int, size: int) -> None:
    asm, over, done = w.asm, w.asm.label(), w.asm.label()
    asm.jump_if_word(Jump.JGT, SCRATCH, Field.LP, w.point.logmax - count * size, over)

    def what_fits() -> None:
        _in_a_loop(w, count, size, is_over=True)
        asm.jump(done)

    w.defer(what_fits, over)
    w.pointer(_R.R1, 0, w.state.log_mask)
    for n in range(count):
        offset = w.stack.address(_R.R0, w.stack.top + n)
        asm.load(_R.R2, w.stack.base(_R.R0), offset)
        asm.store(_R.R1, LOG + n * size, _R.R2, Size.of(size))
    asm.increase(SCRATCH, Field.LP, count * size)
    w.stack.drop(count)
    end(w)
    asm.place(done)


def _in_a_loop(w: Writer, count: int, size: int, *, is_over: bool = False) -> None:
    """Log as many of ``count`` cells as fit. If TSP is not known, it is in its field."""
    asm, kept, fits, done = w.asm, w.work(2), w.asm.label(), w.asm.label()
    asm.store(SCRATCH, kept, count)
    room(w, _R.R1, size)
    asm.jump_if(Jump.JGE, _R.R1, count, fits)
    asm.store(SCRATCH, kept, _R.R1)
    asm.place(fits)
    _store_position(w)
    _copy_cells(w, size, kept)
    w.close_loop()
    w.stack.drop(count)
    asm.load(_R.R1, SCRATCH, kept)
    if is_over:
        overflow(w)
    else:
        overflow_if(w, Jump.JNE, _R.R1, count, done)
        end(w)
        asm.place(done)


def _store_position(w: Writer) -> None:
    """Store TSP in work word 1."""
    if w.stack.tsp is not None:
        w.asm.store(SCRATCH, w.work(1), w.stack.tsp + w.stack.top)
    else:
        w.asm.copy(SCRATCH, w.work(1), Field.TSP)


def _copy_cells(w: Writer, size: int, kept: int) -> None:
    """
    Write a loop that logs cells. The field ``kept`` has their number, and work word 1 the first position.

    They fit.
    """
    asm, rest = w.asm, w.work(0)
    asm.copy(SCRATCH, rest, kept)
    with w.repeat(rest):
        asm.take_next(_R.R2, SCRATCH, w.work(1), by=_R.R3)
        w.cell(_R.R2)
        asm.load(_R.R2, _R.R2, 0)
        append(w, _R.R2, size)


def _popped_count(w: Writer, i: EncodedInstruction) -> None:
    asm, count, kept = w.asm, w.work(3), w.work(2)
    done = asm.label()
    w.lp = None
    asm.store(SCRATCH, count, w.stack.pop_register())
    w.stack.settle()
    # TSP moves by the count in any case; the cells are logged from its old value on.
    tsp = w.stack.tsp_value()
    position = w.stack.in_register(tsp)
    asm.store(SCRATCH, w.work(1), position)
    added = w.field(count)
    asm.alu(Alu.ADD, position, added)
    asm.store(SCRATCH, Field.TSP, position)
    w.reload_tsp()
    begin(w)
    check_prefix(w, done)
    cut_to_room(w, kept, count, w.word_size)
    write_prefix(w, Token.STACK_COUNT, kept)
    _copy_cells(w, w.word_size, kept)
    w.reload_tsp()
    finish(w, kept, count, done)
    w.reload_tsp()


# Codes and positions


def _set(field: Field) -> tuple[Template, Template]:
    def immediate(w: Writer, i: EncodedInstruction) -> None:
        w.asm.store(SCRATCH, field, int(i.operand))

    def popped(w: Writer, i: EncodedInstruction) -> None:
        value = w.stack.pop_register()
        w.asm.alu(Alu.AND, value, 0xFFFF)
        w.asm.store(SCRATCH, field, value)

    return immediate, popped


def _push_field(field: Field) -> Template:
    return lambda w, _: w.stack.push(w.field(field))


def _pop_lp(w: Writer, i: EncodedInstruction) -> None:
    w.lp = None
    target, done = w.work(0), w.asm.label()
    w.asm.store(SCRATCH, target, w.stack.pop_register())
    w.stack.settle()
    w.asm.load(_R.R1, SCRATCH, target)
    w.asm.mov(_R.R9, w.point.logmax)
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        w.asm.jump_if(Jump.JGT, _R.R1, _R.R9, done)
    else:
        overflow_if(w, Jump.JGT, _R.R1, _R.R9, done)
    open_again(w)
    move_to(w, target, Field.LP, Field.LOGGED, LOG, w.state.log_mask)
    w.asm.place(done)


_SETMAJ, _SETMIN = _set(Field.MAJOR), _set(Field.MINOR)

LOG_TEMPLATES: dict[str, Template] = {
    "setmin <minor>": _SETMIN[0],
    "setmin": _SETMIN[1],
    "setmaj <major>": _SETMAJ[0],
    "setmaj": _SETMAJ[1],
    "log b, <count>": _cells(1),
    "log w, <count>": _cells(2),
    "log d, <count>": _cells(4),
    "log <count>": _cells(0),
    "log": _popped_count,
    "push lp": _push_field(Field.LP),
    "push plp": _push_field(Field.PLP),
    "pop lp": _pop_lp,
}


def _pop_range(w: Writer) -> None:
    """Pop address and length into work words 0 and 1."""
    w.lp = None
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.asm.store(SCRATCH, w.work(1), w.stack.pop_register())
    w.open_loop()
    begin(w)


def _memory(w: Writer, i: EncodedInstruction) -> None:
    asm, address, length, kept = w.asm, w.work(0), w.work(1), w.work(2)
    done, empty, fault = asm.label(), asm.label(), asm.label()
    _pop_range(w)
    check_prefix(w, done)
    cut_to_room(w, kept, length, 1)

    def arguments() -> None:
        _log_address(w, _R.R1)
        asm.load(_R.R2, SCRATCH, kept)
        asm.alu(Alu.AND, _R.R2, w.state.log_mask)
        asm.load(_R.R3, SCRATCH, address)

    asm.jump_if_word(Jump.JEQ, SCRATCH, kept, 0, empty, by=_R.R2)
    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: _find_fault(w), fault)
    asm.place(empty)
    write_prefix(w, Token.MEMORY, kept)
    advance(w, kept)
    finish(w, kept, length, done)


def _kernel_stack(w: Writer, i: EncodedInstruction) -> None:
    _stack(w, i, Token.KERNEL_STACK, w.host.kernel_stack)


def _user_stack(w: Writer, i: EncodedInstruction) -> None:
    _stack(w, i, Token.USER_STACK, lambda: w.host.user_stack(w.state.snapshot, w.work(4), w.state.log_mask))


def _stack(w: Writer, i: EncodedInstruction, token: Token, write: Callable[[], None]) -> None:
    """Log the data that ``write`` writes to R1, up to R2 bytes. R0 is then their number, or negative."""
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
    """Set a register to the address after a prefix at LP."""
    w.asm.load(register, SCRATCH, Field.LP)
    w.pointer(register, LOG + ITEM_PREFIX_SIZE, w.state.log_mask)


def _find_fault(w: Writer) -> None:
    """
    Find the first unreadable byte, page by page; log its address and raise the exception.

    If the page has become readable meanwhile, the address is in the last page of the range.
    """
    asm, address, kept, position = w.asm, w.work(0), w.work(2), w.work(4)
    head, found = asm.label(), asm.label()
    w.open_loop()
    asm.copy(SCRATCH, position, address)
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
    """Log the address in a field as a fault, if there is room, and raise the exception."""
    asm, size, full = w.asm, w.work(14), w.asm.label()
    w.close_loop()
    if w.point.logmax >= ITEM_PREFIX_SIZE + w.word_size:
        asm.jump_if_word(Jump.JGT, SCRATCH, Field.LP, w.point.logmax - ITEM_PREFIX_SIZE - w.word_size, full)
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

    The helper reads no pages in, and it accesses all bytes that it may write. So where it fails, the string is read
    page by page.
    """
    asm, address, maximum, limit, length = w.asm, w.work(0), w.work(1), w.work(2), w.work(3)
    done, known, slow = asm.label(), asm.label(), asm.label()
    _pop_range(w)
    check_prefix(w, done)
    # One byte more than fits shows whether the string ends there.
    cut_to_room(w, limit, maximum, 1, ITEM_PREFIX_SIZE - 1)
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
    w.defer(lambda: _string_by_pages(w, known), slow)


def _string_by_pages(w: Writer, known: Label) -> None:
    """Read a string page by page, and search for its end byte by byte. No page after its end is accessed."""
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
    asm.jump_if_word(Jump.JEQ, _R.R1, 0, 0, ended, size=Size.B)
    asm.increase(SCRATCH, length, 1)
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
    """Set a register to the address of the byte of the string at the position in a field. Clobbers R9."""
    w.asm.load(register, SCRATCH, Field.LP)
    w.asm.load(_R.R9, SCRATCH, length)
    w.asm.alu(Alu.ADD, register, _R.R9)
    w.pointer(register, LOG + ITEM_PREFIX_SIZE, w.state.log_mask)


LOG_MEMORY_TEMPLATES: dict[str, Template] = {
    "log kstack, <frames>": _kernel_stack,
    "log kstack": _kernel_stack,
    "log ustack, <frames>": _user_stack,
    "log ustack": _user_stack,
    "log str": _string,
    "log mrf": _memory,
}
