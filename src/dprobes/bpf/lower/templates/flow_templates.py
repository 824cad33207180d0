"""Templates of control flow, exceptions, and what ends a handler."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Jump
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
from dprobes.rpn.instruction_set import CALL_DEPTH_MAX, ExceptionCode

if TYPE_CHECKING:
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction

__all__ = ["FLOW_TEMPLATES", "invalid_opcode"]

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
    """Return the template of a conditional jump, which costs something only if it is taken."""

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
        w.end(EXIT)  # nothing calls: the depth is 0
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
    """Write the exception of bytes that are no instruction."""
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
}
