"""Templates of control flow, exceptions and stack traces, and of the instructions that end a handler."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import (
    ABORT,
    EXIT,
    EXIT_WITH,
    FRAMES,
    RANGES,
    REMOVE_PROBE,
    SCRATCH,
    SKIP,
    Field,
    Frame,
    store_number,
)
from dprobes.bpf.lower.template_writer import frame_address, ranges_address
from dprobes.bpf.lower.templates.log_templates import move_back, move_to
from dprobes.bpf.map_layouts import MapName, power_of_two
from dprobes.rpn.instruction_set import CALL_DEPTH_MAX, ITEM_PREFIX_SIZE, RPN_STACK_CELLS, ExceptionCode, Token

if TYPE_CHECKING:
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction

__all__ = ["FLOW_TEMPLATES", "invalid_opcode", "write_trace_routine"]

_R = Register
_RANGE_WORDS = 6


def _nop(w: Writer, i: EncodedInstruction) -> None:
    pass


def _jmp(w: Writer, i: EncodedInstruction) -> None:
    target = int(i.operand)
    w.stack.flush()
    w.charge_jump()
    w.settle_for(target)
    w.goto_block(target)
    w.is_open = False


def _branch(condition: Jump) -> Template:
    """Return the template of a conditional jump, which is charged only if it is taken."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        value = w.stack.peek()
        target = int(i.operand)
        if isinstance(value, int):
            value = w.stack.copy(value)
        w.settle_for(target, i.end)
        taken = w.asm.label()

        def take() -> None:
            w.charge_jump()
            w.goto_block(target)

        w.asm.jump_if(condition, value, 0, taken, wide=w.wide)
        w.defer(take, taken)

    return template


def _loop(w: Writer, i: EncodedInstruction) -> None:
    target = int(i.operand)
    w.stack.flush()
    w.charge_jump()
    value = w.stack.pop_register()
    w.asm.alu(Alu.SUB, value, 1, wide=w.wide)
    w.stack.push(value)
    w.settle_for(target, i.end)
    taken = w.asm.label()
    w.asm.jump_if(Jump.JNE, value, 0, taken, wide=w.wide)
    w.defer(lambda: w.goto_block(target), taken)


def _call(w: Writer, i: EncodedInstruction) -> None:
    asm, target = w.asm, int(i.operand)
    w.stack.flush()
    w.charge_jump()
    depth = w.field(Field.DEPTH)
    w.throw_if(Jump.JGE, depth, CALL_DEPTH_MAX, ExceptionCode.CALL_MAX, CALL_DEPTH_MAX, wide=True)
    asm.alu(Alu.ADD, depth, 1)
    asm.store(SCRATCH, Field.DEPTH, depth)
    w.settle_for(target)
    sbp = w.field(Field.SBP)
    depth = w.field(Field.DEPTH)
    frame = w.stack.take()
    frame_address(w, frame, depth)
    asm.store(frame, FRAMES + Frame.CALLED, target)
    asm.store(frame, FRAMES + Frame.RETURN, i.end)
    asm.store(frame, FRAMES + Frame.SBP, sbp)
    asm.store(frame, FRAMES + Frame.HANDLER, 0)
    if w.flow.uses("trace pv", "trace lv", "trace gv"):
        ranges_address(w, depth)
        for word in range(_RANGE_WORDS):
            asm.store(depth, RANGES + 8 * word, 0)
    w.goto_block(target)
    w.is_open = False


def _ret(w: Writer, i: EncodedInstruction) -> None:
    asm = w.asm
    w.stack.flush()
    depth = w.field(Field.DEPTH)
    w.throw_if(Jump.JEQ, depth, 0, ExceptionCode.CALL_MAX, wide=True)
    if w.flow.returns:
        frame = w.stack.take()
        frame_address(w, frame, depth)
        value = w.stack.take()
        asm.copy_from(frame, FRAMES + Frame.RETURN, SCRATCH, Field.CODE, by=value)
        asm.copy_from(frame, FRAMES + Frame.SBP, SCRATCH, Field.SBP, by=value)
        asm.alu(Alu.SUB, depth, 1)
        asm.store(SCRATCH, Field.DEPTH, depth)
        w.stack.settle()
        w.stack.store_tsp()
        asm.jump(w.return_label)
    else:
        w.end(EXIT)  # without calls the depth is 0
    w.is_open = False


def _end(ending: int) -> Template:
    return lambda w, _: w.end(ending)


def _exit_code(w: Writer, i: EncodedInstruction) -> None:
    code = int(i.operand)
    if code in (1, 2, 3):
        w.end(EXIT_WITH + code)
        return
    w.stack.flush()
    w.throw(ExceptionCode.INVALID_OPERAND, 4, code)
    w.is_open = False


def _skip(w: Writer, i: EncodedInstruction) -> None:
    store_number(w.asm, SCRATCH, Field.VALUE, w.stack.pop())
    w.end(SKIP)


def invalid_opcode(w: Writer, i: EncodedInstruction) -> None:
    """Write code that raises the exception for bytes that are not an RPN instruction."""
    w.stack.flush()
    w.throw(ExceptionCode.INVALID_OPCODE, int(i.operand), i.offset)
    w.is_open = False


# Exceptions


def _set_handler(w: Writer, value: int) -> None:
    if not w.flow.returns:
        w.asm.store(SCRATCH, FRAMES + Frame.HANDLER, value)
        return
    depth = w.field(Field.DEPTH)
    frame_address(w, depth, depth)
    w.asm.store(depth, FRAMES + Frame.HANDLER, value)


def _rx(w: Writer, i: EncodedInstruction) -> None:
    for index, field in enumerate((Field.CODE, Field.PARM1, Field.PARM2)):
        store_number(w.asm, SCRATCH, field, w.stack.peek(index))
    w.asm.store(SCRATCH, Field.RAISED, 0)
    w.stack.settle()
    w.stack.store_tsp()
    w.raises = True
    w.asm.jump(w.reraise_label)
    w.is_open = False


def _push_x(w: Writer, i: EncodedInstruction) -> None:
    for field in (Field.LAST_PARM2, Field.LAST_PARM1, Field.LAST_CODE):
        w.stack.push(w.field(field))


# Stack traces, in the format of ``vm.rpn_machine``.


_CELLS, _LOCALS, _GLOBALS = 0, 16, 32
"""Offsets of the ranges of a frame: first and count."""


def write_trace_routine(w: Writer) -> None:
    """Write the routine that takes a stack trace, after all its callers."""
    w.trace.write(_TraceWriter(w).write, w)


class _TraceWriter:
    """The writer of the routine that takes a stack trace."""

    def __init__(self, writer: Writer) -> None:
        self._w = writer
        self._asm = writer.asm
        self._out = writer.asm.label()

    def write(self) -> None:
        """Write the routine, which appends a stack trace to the trace buffer, and ends it early for lack of room."""
        self._header()
        self._trace()
        self._asm.place(self._out)

    # Writing to the buffer

    def _check_room(self, size: int) -> None:
        """End the trace here if ``size`` bytes do not fit."""
        room = self._w.state.ex_logmax - size
        if room < 0:
            self._asm.jump(self._out)
            return
        self._asm.jump_if_word(Jump.JGT, SCRATCH, Field.STP, room, self._out)

    def _pointer(self, register: Register, field: int) -> None:
        self._asm.load(register, SCRATCH, field)
        self._w.pointer(register, self._w.state.trace, self._w.state.trace_mask)

    def _advance(self, size: int) -> None:
        self._asm.increase(SCRATCH, Field.STP, size)

    def _bytes(self, data: bytes, at: int = 0) -> None:
        """Store constant bytes of the stack trace at R1 + ``at``."""
        for position in range(0, len(data), 4):
            part = data[position : position + 4]
            if len(part) == 4:
                self._asm.store(_R.R1, at + position, int.from_bytes(part, "little", signed=True), Size.W)
                continue
            for n, byte in enumerate(part):
                self._asm.store(_R.R1, at + position + n, byte, Size.B)

    # The parts

    def _header(self) -> None:
        w, asm, point = self._w, self._asm, self._w.point
        present = asm.label()
        asm.jump_if_word(Jump.JNE, SCRATCH, Field.TRACE_COUNT_AT, 0, present)
        name = point.module.encode("utf-8", "surrogateescape")[:0xFFFF]
        offset = (point.offset & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        start = bytes([Token.STRING]) + len(name).to_bytes(2, "little") + name
        tail = point.program_id.to_bytes(2, "little")
        size = len(start) + len(offset) + len(tail) + 4 + ITEM_PREFIX_SIZE
        self._check_room(size)
        if size <= w.state.ex_logmax:
            self._pointer(_R.R1, Field.STP)
            self._bytes(start)
            self._offset(len(start), offset)
            self._bytes(tail, len(start) + 8)
            codes = len(start) + 8 + len(tail)
            self._codes(codes)
            self._bytes(bytes([Token.STACK_TRACE, 0, 0]), codes + 4)
            self._advance(size)
            asm.alu(Alu.SUB, _R.R1, 1)  # the count is the last two bytes; the field is one more
            asm.store(SCRATCH, Field.TRACE_COUNT_AT, _R.R1)
            asm.store(SCRATCH, Field.TRACES, 0)
        asm.place(present)

    def _offset(self, at: int, offset: bytes) -> None:
        """Store the offset of the probepoint, which differs between the probepoints of one definition."""
        if self._w.request.probe is not None and self._w.request.module is None:
            self._bytes(offset, at)
            return
        self._w.host.probe_offset(_R.R3)
        self._asm.store(_R.R1, at, _R.R3)

    def _codes(self, at: int) -> None:
        asm, flow, point = self._asm, self._w.flow, self._w.point
        if flow.uses("setmaj", "setmaj <major>", "setmin", "setmin <minor>"):
            for n, field in enumerate((Field.MAJOR, Field.MINOR)):
                asm.load(_R.R2, SCRATCH, field)
                asm.store(_R.R1, at + 2 * n, _R.R2, Size.H)
            return
        self._bytes(point.major.to_bytes(2, "little") + point.minor.to_bytes(2, "little"), at)

    def _trace(self) -> None:
        w, asm, word = self._w, self._asm, self._w.word_size
        self._check_room(4 * word + ITEM_PREFIX_SIZE)
        if self._has_depth:
            asm.load(_R.R2, SCRATCH, Field.DEPTH)
            frame_address(w, _R.R2, _R.R2)
        else:
            asm.mov(_R.R2, SCRATCH)
        asm.load(_R.R3, _R.R2, FRAMES + Frame.HANDLER)
        asm.alu(Alu.SUB, _R.R3, 1)  # none is 0, and shown as -1
        self._pointer(_R.R1, Field.STP)
        for n, source in enumerate((Field.LAST_CODE, None, Field.LAST_PARM1, Field.LAST_PARM2)):
            if source is not None:
                asm.load(_R.R2, SCRATCH, source)
            asm.store(_R.R1, n * word, _R.R2 if source is not None else _R.R3, w.size)
        asm.store(_R.R1, 4 * word, int(Token.FRAMES), Size.B)
        if self._has_depth:
            asm.load(_R.R2, SCRATCH, Field.DEPTH)
            asm.store(_R.R1, 4 * word + 1, _R.R2, Size.H)
        else:
            asm.store(_R.R1, 4 * word + 1, 0, Size.H)
        self._advance(4 * word + ITEM_PREFIX_SIZE)
        asm.increase(SCRATCH, Field.TRACES, 1, by=_R.R2)
        asm.load(_R.R1, SCRATCH, Field.TRACE_COUNT_AT)
        asm.alu(Alu.SUB, _R.R1, 1)
        w.pointer(_R.R1, w.state.trace, w.state.trace_mask)
        asm.store(_R.R1, 0, _R.R2, Size.H)
        if self._has_depth:
            self._frames()

    @property
    def _has_depth(self) -> bool:
        return bool(self._w.flow.returns)

    def _frames(self) -> None:
        """Write a loop over the frames, innermost first. The outermost frame is left out."""
        w, asm, level, head = self._w, self._asm, self._w.work(16), self._asm.label()
        asm.copy(SCRATCH, level, Field.DEPTH)
        w.loops.head(head)
        asm.jump_if_word(Jump.JEQ, SCRATCH, level, 0, self._out)
        for field in (Frame.CALLED, Frame.RETURN):
            self._check_room(w.word_size)
            asm.load(_R.R2, SCRATCH, level)
            frame_address(w, _R.R2, _R.R2)
            asm.load(_R.R2, _R.R2, FRAMES + field)
            self._word(_R.R2)
        self._range(Token.STACK_ENTRIES, _CELLS, level)
        self._range(Token.LOCAL_VARIABLES, _LOCALS, level)
        self._range(Token.GLOBAL_VARIABLES, _GLOBALS, level)
        asm.load(_R.R1, SCRATCH, level)
        asm.alu(Alu.SUB, _R.R1, 1)
        asm.store(SCRATCH, level, _R.R1)
        w.loops.goto(head)

    def _word(self, value: Register) -> None:
        self._pointer(_R.R1, Field.STP)
        self._asm.store(_R.R1, 0, value, self._w.size)
        self._advance(self._w.word_size)

    def _range(self, token: Token, which: int, level: int) -> None:
        """Write a range of cells or variables after a prefix."""
        w, asm = self._w, self._asm
        index, rest, head, done = w.work(17), w.work(18), asm.label(), asm.label()
        self._check_room(ITEM_PREFIX_SIZE)
        if w.flow.uses("trace pv", "trace lv", "trace gv"):
            asm.load(_R.R2, SCRATCH, level)
            ranges_address(w, _R.R2)
            asm.copy_from(_R.R2, RANGES + which, SCRATCH, index, by=_R.R3)
            asm.load(_R.R3, _R.R2, RANGES + which + 8)
        else:
            asm.mov(_R.R3, 0)
        asm.store(SCRATCH, rest, _R.R3)
        fits = asm.label()
        # 65536 variables are one more than the prefix can express.
        asm.jump_if_word(Jump.JLE, SCRATCH, rest, 0xFFFF, fits, by=_R.R3)
        asm.mov(_R.R3, 0xFFFF)
        asm.place(fits)
        asm.store(SCRATCH, w.work(19), _R.R3)
        self._pointer(_R.R1, Field.STP)
        asm.load(_R.R3, SCRATCH, w.work(19))
        asm.store(_R.R1, 0, int(token), Size.B)
        asm.store(_R.R1, 1, _R.R3, Size.H)
        self._advance(ITEM_PREFIX_SIZE)
        source = self._source(token)
        if source is None or not w.flow.uses("trace pv", "trace lv", "trace gv"):
            return
        w.loops.head(head)
        asm.jump_if_word(Jump.JEQ, SCRATCH, rest, 0, done)
        asm.alu(Alu.SUB, _R.R1, 1)
        asm.store(SCRATCH, rest, _R.R1)
        self._check_room(w.word_size)
        asm.load(_R.R2, SCRATCH, index)
        asm.add(_R.R3, _R.R2, 1)
        asm.store(SCRATCH, index, _R.R3)
        map_name, count = source
        asm.alu(Alu.AND, _R.R2, count - 1)
        asm.alu(Alu.LSH, _R.R2, 3)
        if map_name is None:
            asm.alu(Alu.ADD, _R.R2, SCRATCH)
        else:
            asm.load_value(_R.R3, map_name)
            asm.alu(Alu.ADD, _R.R2, _R.R3)
        asm.load(_R.R2, _R.R2, 0)
        self._word(_R.R2)
        w.loops.goto(head)
        asm.place(done)

    def _source(self, token: Token) -> tuple[MapName | None, int] | None:
        """
        Return the map of the variables and the number of its values, a power of two, or None if there are none.

        For the cells of the stack, the map is None.
        """
        request = self._w.request
        match token:
            case Token.LOCAL_VARIABLES:
                return (MapName.LOCALS, power_of_two(request.vars)) if request.vars else None
            case Token.GLOBAL_VARIABLES:
                return (MapName.GLOBALS, power_of_two(request.gvars)) if request.gvars else None
        return None, RPN_STACK_CELLS


def _log_st(w: Writer, i: EncodedInstruction) -> None:
    w.open_loop()
    w.trace.call()
    w.close_loop()


def _purge_st(w: Writer, i: EncodedInstruction) -> None:
    if w.flow.uses("pop stp"):
        w.stack.settle()
        move_back(w, Field.STP, Field.TRACED)
    w.asm.store(SCRATCH, Field.STP, 0)
    w.asm.store(SCRATCH, Field.TRACE_COUNT_AT, 0)


def _pop_stp(w: Writer, i: EncodedInstruction) -> None:
    target, limit, ignored = w.work(0), w.point.ex_logmax, w.asm.label()
    w.asm.store(SCRATCH, target, w.stack.pop_register())
    w.stack.settle()
    w.asm.load(_R.R1, SCRATCH, target)
    w.asm.mov(_R.R9, limit)
    if w.is_ignored(ExceptionCode.LOG_OVERFLOW):
        w.asm.jump_if(Jump.JGT, _R.R1, _R.R9, ignored)
    else:
        w.throw_if(Jump.JGT, _R.R1, _R.R9, ExceptionCode.LOG_OVERFLOW, limit, wide=True)
    move_to(w, target, Field.STP, Field.TRACED, w.state.trace, w.state.trace_mask)
    w.asm.place(ignored)


def _trace(which: int) -> Template:
    """Return the template of ``trace pv``, ``trace lv`` or ``trace gv``, which select the contents of stack traces."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        asm = w.asm
        count, index = w.stack.pop_register(), w.stack.pop_register()
        asm.store(SCRATCH, w.work(0), count)
        asm.store(SCRATCH, w.work(1), index)
        w.open_loop()
        if which == _CELLS:
            small = asm.label()
            asm.jump_if_word(Jump.JLE, SCRATCH, w.work(0), RPN_STACK_CELLS, small)
            asm.store(SCRATCH, w.work(0), RPN_STACK_CELLS)
            asm.place(small)
        else:
            _check_range(w, which)
        if w.flow.returns:
            asm.load(_R.R1, SCRATCH, Field.DEPTH)
            ranges_address(w, _R.R1)
        else:
            asm.mov(_R.R1, SCRATCH)
        for word, offset in ((w.work(1), 0), (w.work(0), 8)):
            asm.copy_from(SCRATCH, word, _R.R1, RANGES + which + offset, by=_R.R2)

    return template


def _check_range(w: Writer, which: int) -> None:
    """Raise INVALID_OPERAND for a non-empty range that goes beyond the variables."""
    asm, fine = w.asm, w.asm.label()
    kind, limit = (1, w.request.vars) if which == _LOCALS else (2, w.request.gvars)
    asm.jump_if_word(Jump.JEQ, SCRATCH, w.work(0), 0, fine)
    asm.load(_R.R2, SCRATCH, w.work(1))
    asm.mov(_R.R3, limit)
    code = ExceptionCode.INVALID_OPERAND
    w.throw_if(Jump.JGT, _R.R2, _R.R3, code, kind, _R.R2, wide=True)
    asm.alu(Alu.SUB, _R.R3, _R.R2)  # the number of variables from the index on
    w.throw_if(Jump.JGT, _R.R1, _R.R3, code, kind, limit, wide=True)
    asm.place(fine)


FLOW_TEMPLATES: dict[str, Template] = {
    "nop": _nop,
    "jmp <label>": _jmp,
    "jlt <label>": _branch(Jump.JSLT),
    "jle <label>": _branch(Jump.JSLE),
    "jgt <label>": _branch(Jump.JSGT),
    "jge <label>": _branch(Jump.JSGE),
    "jz <label>": _branch(Jump.JEQ),
    "jnz <label>": _branch(Jump.JNE),
    "loop <label>": _loop,
    "call <procname>": _call,
    "ret": _ret,
    "abort": _end(ABORT),
    "remove": _end(REMOVE_PROBE),
    "exit": _end(EXIT),
    "exit <code>": _exit_code,
    "skip": _skip,
    "sx <label>": lambda w, i: _set_handler(w, int(i.operand) + 1),
    "ux": lambda w, _: _set_handler(w, 0),
    "rx": _rx,
    "push x": _push_x,
    "log st": _log_st,
    "purge st": _purge_st,
    "push stp": lambda w, _: w.stack.push(w.field(Field.STP)),
    "pop stp": _pop_stp,
    "trace pv": _trace(_CELLS),
    "trace lv": _trace(_LOCALS),
    "trace gv": _trace(_GLOBALS),
}
