"""Templates of arithmetic, the RPN stack and variables."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH, TSP
from dprobes.rpn.isa import RPN_STACK_CELLS

if TYPE_CHECKING:
    from dprobes.bpf.lower.state.stack import Operand
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_UNROLLED = 16
"""How many repetitions are written one behind the other; more become a loop."""


def _push_value(w: Writer, i: EncodedInstruction) -> None:
    address = w.relocated.get(i.offset + 1)
    if address is None:
        w.stack.push(int(i.operand))
        return
    w.stack.settle()
    value = w.stack.take()
    if address in w.request.per_cpu[1]:
        w.host.load_copy_bias(value)
    else:
        w.host.load_bias(value)
    w.asm.mov(Register.R9, address)
    w.asm.alu(Alu.ADD, value, Register.R9, wide=w.wide)
    w.stack.push(value)


def _xchg(w: Writer, i: EncodedInstruction) -> None:
    top, second = w.stack.pop(), w.stack.pop()
    w.stack.push(top)
    w.stack.push(second)


def _dup(w: Writer, i: EncodedInstruction) -> None:
    times = int(i.operand)
    if times > _UNROLLED:
        w.stack.push(times)
        _dup_loop(w, times)
        return
    for _ in range(times):
        value = w.stack.peek()
        w.stack.push(w.stack.copy(value) if isinstance(value, Register) else value)
        w.stack.release()


def _dup_loop(w: Writer, times: int) -> None:
    """Write a loop: the top cell is a count, to be popped; so many copies of the cell below it are pushed."""
    asm, count, done = w.asm, w.work(0), w.asm.label()
    value = w.stack.pop_register()
    asm.store(SCRATCH, count, value)
    w.stack.settle()
    w.stack.store_tsp()
    head = asm.label()
    w.loops.head(head)
    asm.load(Register.R1, SCRATCH, count)
    asm.jump_if(Jump.JEQ, Register.R1, 0, done)
    asm.alu(Alu.SUB, Register.R1, 1)
    asm.store(SCRATCH, count, Register.R1)
    asm.load(TSP, SCRATCH, Field.TSP)
    asm.mov(Register.R1, TSP)
    w.cell(Register.R1)
    asm.load(Register.R2, Register.R1, 0)
    asm.alu(Alu.SUB, TSP, 1)
    asm.store(SCRATCH, Field.TSP, TSP)
    asm.mov(Register.R1, TSP)
    w.cell(Register.R1)
    asm.store(Register.R1, 0, Register.R2)
    w.loops.goto(head)
    asm.place(done)
    w.stack.drop(-times)
    w.close_loop()


def _ros(w: Writer, i: EncodedInstruction) -> None:
    w.stack.drop(int(i.operand))


def _displaced(w: Writer, base: Operand, n: Operand) -> Register:
    """Return a register that points to the cell at ``base + n``; all cells are in memory, none is known any more."""
    asm = w.asm
    if isinstance(base, int) and isinstance(n, int):
        position = w.stack.copy((base + n) % RPN_STACK_CELLS)
    else:
        position = w.stack.copy(base)
        if isinstance(n, Register):
            asm.alu(Alu.ADD, position, n)
        else:
            asm.alu(Alu.ADD, position, n % RPN_STACK_CELLS)
    w.cell(position)
    return position


def _base(w: Writer, name: str) -> Operand:
    if name == "tsp":
        return w.stack.tsp_value()
    return RPN_STACK_CELLS if w.flow.keeps_base else w.field(Field.SBP)


def _position(w: Writer, name: str, n: Operand) -> int | None:
    """Return the position, in the block's stack, of the cell at SBP or TSP + ``n``; None where that is not known."""
    if isinstance(n, Register):
        return None
    if name == "tsp":
        return w.stack.top + n
    if w.flow.keeps_base and w.stack.tsp is not None:
        return RPN_STACK_CELLS + n - w.stack.tsp
    return None


def _load_cell(w: Writer, name: str, n: Operand) -> None:
    position = _position(w, name, n)
    if position is not None:
        value = w.stack.peek(position - w.stack.top)
        w.stack.push(w.stack.copy(value) if isinstance(value, Register) else value)
        return
    base = _base(w, name)
    w.stack.flush()
    address = _displaced(w, base, n)
    w.asm.load(address, address, 0)
    w.stack.push(address)


def _store_cell(w: Writer, value: Operand, base: Operand, n: Operand) -> None:
    """Write a cell that may be any: what is known of the stack is in memory before, and forgotten."""
    register = w.stack.in_register(value)
    address = _displaced(w, base, n)
    w.stack.flush()
    w.asm.store(address, 0, register)
    w.stack.settle()


def _push_relative(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        _load_cell(w, name, int(i.operand))

    return template


def _push_relative_popped(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        n = w.stack.pop()
        _load_cell(w, name, n)

    return template


def _pop_relative(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        n = int(i.operand)
        position = _position(w, name, n)  # before the pop
        if position is not None:
            value = w.stack.pop()
            w.stack.set(position - w.stack.top, value)
            return
        base = _base(w, name)  # before the pop
        _store_cell(w, w.stack.pop(), base, n)

    return template


def _pop_relative_popped(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        value, n = w.stack.pop(), w.stack.pop()
        position = _position(w, name, n)
        if position is not None:
            w.stack.set(position - w.stack.top, value)
            return
        _store_cell(w, value, _base(w, name), n)

    return template


def _copy_to(w: Writer, name: str, n: Operand) -> None:
    value = w.stack.peek()
    position = _position(w, name, n)
    if position is not None:
        w.stack.set(position - w.stack.top, w.stack.copy(value) if isinstance(value, Register) else value)
        return
    _store_cell(w, value, _base(w, name), n)


def _copy_relative(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        _copy_to(w, name, int(i.operand))

    return template


def _copy_relative_popped(name: str) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        n = w.stack.pop()
        _copy_to(w, name, n)

    return template


def _save_sbp(w: Writer, i: EncodedInstruction) -> None:
    value = w.field(Field.SBP)
    if not w.wide:
        w.asm.mov(value, value, wide=False)
    w.stack.push(value)


def _restore_sbp(w: Writer, i: EncodedInstruction) -> None:
    w.asm.store(SCRATCH, Field.SBP, w.stack.pop_register())


def _save_tsp(w: Writer, i: EncodedInstruction) -> None:
    w.stack.push(w.stack.tsp_value())


def _restore_tsp(w: Writer, i: EncodedInstruction) -> None:
    value = w.stack.pop_register()
    w.stack.flush()
    w.asm.store(SCRATCH, Field.TSP, value)
    w.reload_tsp()


def _dup_popped(w: Writer, i: EncodedInstruction) -> None:
    asm, count, done = w.asm, w.work(0), w.asm.label()
    value, times = w.stack.pop_register(), w.stack.pop_register()
    asm.store(SCRATCH, w.work(1), value)
    w.stack.flush()
    # min(count + 1, 1024) cells are written; TSP moves on by count + 1 all the same.
    asm.store(SCRATCH, count, times)
    asm.alu(Alu.ADD, times, 1)
    tsp = w.stack.tsp_value()
    position = w.stack.in_register(tsp)
    asm.alu(Alu.SUB, position, times)
    asm.store(SCRATCH, Field.TSP, position)
    w.stack.settle()
    small = asm.label()
    asm.load(Register.R1, SCRATCH, count)
    asm.jump_if(Jump.JLT, Register.R1, RPN_STACK_CELLS, small)
    asm.mov(Register.R1, RPN_STACK_CELLS - 1)
    asm.place(small)
    asm.alu(Alu.ADD, Register.R1, 1)
    asm.store(SCRATCH, count, Register.R1)
    head = asm.label()
    w.loops.head(head)
    asm.load(Register.R1, SCRATCH, count)
    asm.jump_if(Jump.JEQ, Register.R1, 0, done)
    asm.alu(Alu.SUB, Register.R1, 1)
    asm.store(SCRATCH, count, Register.R1)
    asm.load(Register.R2, SCRATCH, Field.TSP)
    asm.alu(Alu.ADD, Register.R2, Register.R1)
    w.cell(Register.R2)
    asm.load(Register.R1, SCRATCH, w.work(1))
    asm.store(Register.R2, 0, Register.R1)
    w.loops.goto(head)
    asm.place(done)
    w.reload_tsp()


TEMPLATES: dict[str, Template] = {
    "push <value>": _push_value,
    "xchg": _xchg,
    "dup <times>": _dup,
    "dup": _dup_popped,
    "ros <cells>": _ros,
    **{f"push {name}": _push_relative_popped(name) for name in ("sbp", "tsp")},
    **{f"pop {name}": _pop_relative_popped(name) for name in ("sbp", "tsp")},
    **{f"copy {name}": _copy_relative_popped(name) for name in ("sbp", "tsp")},
    **{f"push {name}, <n>": _push_relative(name) for name in ("sbp", "tsp")},
    **{f"pop {name}, <n>": _pop_relative(name) for name in ("sbp", "tsp")},
    **{f"copy {name}, <n>": _copy_relative(name) for name in ("sbp", "tsp")},
    "save sbp": _save_sbp,
    "restore sbp": _restore_sbp,
    "save tsp": _save_tsp,
    "restore tsp": _restore_tsp,
}
