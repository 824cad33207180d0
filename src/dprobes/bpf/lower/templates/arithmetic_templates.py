"""Templates of arithmetic, logic and the RPN stack. Operations on constants are evaluated at compile time."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Jump, Register
from dprobes.bpf.lower.state.handler_state import ADDRESS, SCRATCH, TSP, Field
from dprobes.rpn.instruction_set import RPN_STACK_CELLS, ExceptionCode
from dprobes.rpn.word_arithmetic import BINARY, COMPARISONS, FILLS, complement

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.lower.state.handler_state import Operand
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction
    from dprobes.rpn.word_arithmetic import Binary

__all__ = ["ARITHMETIC_TEMPLATES", "STACK_TEMPLATES"]


def _fits(value: Operand) -> bool:
    """Return whether an operand fits an arithmetic instruction on 64 bits."""
    return isinstance(value, Register) or value < 1 << 31


def _binary(operation: Alu, meaning: Binary) -> Template:
    """Return the template of ``top <operation> second``."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        top, second = w.stack.pop(), w.stack.pop()
        if isinstance(top, int) and isinstance(second, int):
            w.stack.push(meaning.function(top, second))
            return
        if meaning.commutes and isinstance(top, int):
            top, second = second, top
        result = w.stack.in_register(top)
        if not _fits(second):
            second = w.stack.in_register(second)
        w.asm.alu(operation, result, second, wide=w.wide)
        w.stack.push(result)

    return template


def _comparison(name: str) -> Template:
    """Return the template of a comparison, without branches: they would be two paths for the verifier."""
    comparison = COMPARISONS[name]
    compare = _COMPARED[comparison.symbol]

    def template(w: Writer, i: EncodedInstruction) -> None:
        top, second = w.stack.pop(), w.stack.pop()
        if isinstance(top, int) and isinstance(second, int):
            w.stack.push(comparison.of_words(top, second, w.bits))
            return
        w.stack.push(compare(w, top, second, is_signed=comparison.is_signed))

    return template


def _equal(w: Writer, top: Operand, second: Operand, *, is_signed: bool) -> Register:
    if isinstance(top, int):
        top, second = second, top
    differs = w.stack.in_register(top)
    w.asm.alu(Alu.XOR, differs, second if _fits(second) else w.stack.in_register(second), wide=w.wide)
    # For a number other than 0, either it or its negative has the sign bit set.
    w.asm.mov(ADDRESS, differs, wide=w.wide)
    w.asm.neg(ADDRESS, wide=w.wide)
    w.asm.alu(Alu.OR, differs, ADDRESS, wide=w.wide)
    w.asm.alu(Alu.RSH, differs, w.bits - 1, wide=w.wide)
    w.asm.alu(Alu.XOR, differs, 1, wide=w.wide)
    return differs


def _less(w: Writer, top: Operand, second: Operand, *, is_signed: bool) -> Register:
    """Compute the sign of the difference. If the operands have different signs, the result is one of them."""
    asm, wide = w.asm, w.wide
    left, right = w.stack.in_register(top), w.stack.in_register(second)
    less = w.stack.copy(left)
    asm.alu(Alu.SUB, less, right, wide=wide)
    telling, other = (left, right) if is_signed else (right, left)
    asm.alu(Alu.XOR, other, telling, wide=wide)
    asm.alu(Alu.XOR, telling, less, wide=wide)
    asm.alu(Alu.AND, other, telling, wide=wide)
    asm.alu(Alu.XOR, less, other, wide=wide)
    asm.alu(Alu.RSH, less, w.bits - 1, wide=wide)
    return less


_COMPARED = {"==": _equal, "<": _less}
"""Code for each symbol of ``COMPARISONS``: 1 if the top cell compares so with the second one, else 0."""


def _neg(w: Writer, i: EncodedInstruction) -> None:
    value = w.stack.pop()
    if isinstance(value, Register):
        w.asm.alu(Alu.XOR, value, -1, wide=w.wide)
        w.stack.push(value)
    else:
        w.stack.push(complement(value))


def _div(w: Writer, i: EncodedInstruction) -> None:
    quotient, divisor = _division(w)
    remainder = w.stack.copy(quotient)
    w.asm.alu(Alu.MOD, remainder, divisor, wide=w.wide)
    w.asm.alu(Alu.DIV, quotient, divisor, wide=w.wide)
    w.stack.push(remainder)
    w.stack.push(quotient)


def _division(w: Writer) -> tuple[Register, Register]:
    """Pop divisor and dividend, and return (dividend, divisor). A divisor of 0 raises an exception."""
    divisor, dividend = w.stack.pop_register(), w.stack.pop_register()
    w.stack.flush()
    w.throw_if(Jump.JEQ, divisor, 0, ExceptionCode.DIVIDE_BY_ZERO)
    return dividend, divisor


def _idiv(w: Writer, i: EncodedInstruction) -> None:
    """Divide the absolute values: not every kernel has signed division (instruction set version 4)."""
    asm, wide = w.asm, w.wide
    dividend, divisor = _division(w)
    sign, other = w.stack.copy(dividend), w.stack.copy(divisor)
    for value, signs in ((dividend, sign), (divisor, other)):
        asm.alu(Alu.ARSH, signs, w.bits - 1, wide=wide)
        asm.alu(Alu.XOR, value, signs, wide=wide)
        asm.alu(Alu.SUB, value, signs, wide=wide)
    asm.alu(Alu.XOR, other, sign, wide=wide)  # the quotient's sign; the remainder has the dividend's
    remainder = w.stack.copy(dividend)
    asm.alu(Alu.MOD, remainder, divisor, wide=wide)
    asm.alu(Alu.DIV, dividend, divisor, wide=wide)
    for value, signs in ((dividend, other), (remainder, sign)):
        asm.alu(Alu.XOR, value, signs, wide=wide)
        asm.alu(Alu.SUB, value, signs, wide=wide)
    w.stack.push(remainder)
    w.stack.push(dividend)


def _counted(
    name: str, write: Callable[[Writer, Operand, Operand], None], *, is_top: bool = False
) -> dict[str, Template]:
    """
    Return two templates of an operation: the count is in the instruction, or popped.

    A popped count is the second cell, with ``is_top`` the top one.
    """

    def popped(w: Writer, i: EncodedInstruction) -> None:
        top, second = w.stack.pop(), w.stack.pop()
        value, count = (second, top) if is_top else (top, second)
        write(w, value, count)

    return {f"{name} <bits>": lambda w, i: write(w, w.stack.pop(), int(i.operand)), name: popped}


def _shift(w: Writer, operand: Operand, count: Operand, operation: Alu) -> None:
    if isinstance(count, int) and count >= w.bits:
        w.stack.push(0)
        return
    value = w.stack.in_register(operand)
    if isinstance(count, int):
        w.asm.alu(operation, value, count, wide=w.wide)
        w.stack.push(value)
        return
    # All ones if the count is below the width, else 0: a branch would be two paths for the verifier.
    asm, wide, below = w.asm, w.wide, w.stack.copy(count)
    asm.alu(Alu.RSH, below, w.bits.bit_length() - 1, wide=wide)
    asm.mov(ADDRESS, below, wide=wide)
    asm.neg(ADDRESS, wide=wide)
    asm.alu(Alu.OR, below, ADDRESS, wide=wide)
    asm.alu(Alu.ARSH, below, w.bits - 1, wide=wide)
    asm.alu(Alu.XOR, below, -1, wide=wide)
    asm.alu(Alu.AND, count, w.bits - 1, wide=wide)
    asm.alu(operation, value, count, wide=wide)
    asm.alu(Alu.AND, value, below, wide=wide)
    w.stack.push(value)


def _rotate(w: Writer, operand: Operand, count: Operand, *, left: bool) -> None:
    asm, wide = w.asm, w.wide
    if isinstance(count, int):
        count %= w.bits
    value = w.stack.in_register(operand)
    one, other = (Alu.LSH, Alu.RSH) if left else (Alu.RSH, Alu.LSH)
    if count == 0 and not isinstance(count, Register):
        w.stack.push(value)
        return
    rest = w.stack.copy(value)
    if isinstance(count, Register):
        asm.alu(Alu.AND, count, w.bits - 1, wide=wide)
        asm.alu(one, value, count, wide=wide)
        asm.neg(count, wide=wide)
        asm.alu(Alu.AND, count, w.bits - 1, wide=wide)
        asm.alu(other, rest, count, wide=wide)
    else:
        asm.alu(one, value, count, wide=wide)
        asm.alu(other, rest, w.bits - count, wide=wide)
    asm.alu(Alu.OR, value, rest, wide=wide)
    w.stack.push(value)


def _propagate(w: Writer, operand: Operand, n: Operand, name: str) -> None:
    code = ExceptionCode.INVALID_OPERAND
    asm, wide = w.asm, w.wide
    if not isinstance(n, Register) and not 1 <= n <= w.bits:
        w.stack.flush()
        w.throw(code, 3, n)
        w.is_open = False
        return
    value = w.stack.in_register(operand)
    if isinstance(n, Register):
        w.stack.flush()
        w.throw_if(Jump.JEQ, n, 0, code, 3, n)
        w.throw_if(Jump.JGT, n, w.bits, code, 3, n)
    upper = name in ("pbl", "pzl")
    # The distance from bit n-1 to the end that is filled.
    distance: Operand
    if isinstance(n, Register):
        distance = w.stack.copy(n)
        if upper:
            asm.neg(distance, wide=wide)
            asm.alu(Alu.ADD, distance, w.bits, wide=wide)
        else:
            asm.alu(Alu.SUB, distance, 1, wide=wide)
        asm.alu(Alu.AND, distance, w.bits - 1, wide=wide)  # known to be less, but the verifier requires it
    else:
        distance = w.bits - n if upper else n - 1
    if upper:
        asm.alu(Alu.LSH, value, distance, wide=wide)
        asm.alu(Alu.ARSH if name == "pbl" else Alu.RSH, value, distance, wide=wide)
    elif name == "pzr":
        asm.alu(Alu.RSH, value, distance, wide=wide)
        asm.alu(Alu.LSH, value, distance, wide=wide)
    else:
        # -bit & ones, with the ones in the bits below n-1, which are replaced.
        ones, bit = w.stack.copy(w.mask), w.stack.copy(value)
        asm.alu(Alu.LSH, ones, distance, wide=wide)
        asm.alu(Alu.AND, value, ones, wide=wide)
        asm.alu(Alu.XOR, ones, -1, wide=wide)
        asm.alu(Alu.RSH, bit, distance, wide=wide)
        asm.alu(Alu.AND, bit, 1, wide=wide)
        asm.neg(bit, wide=wide)
        asm.alu(Alu.AND, bit, ones, wide=wide)
        asm.alu(Alu.OR, value, bit, wide=wide)
    w.stack.push(value)


_ALU = {"add": Alu.ADD, "sub": Alu.SUB, "mul": Alu.MUL, "and": Alu.AND, "or": Alu.OR, "xor": Alu.XOR}

ARITHMETIC_TEMPLATES: dict[str, Template] = {
    **{name: _binary(_ALU[name], meaning) for name, meaning in BINARY.items()},
    **{name: _comparison(name) for name in COMPARISONS},
    "neg": _neg,
    "div": _div,
    "idiv": _idiv,
    **_counted("rol", partial(_rotate, left=True)),
    **_counted("ror", partial(_rotate, left=False)),
    **_counted("shl", partial(_shift, operation=Alu.LSH)),
    **_counted("shr", partial(_shift, operation=Alu.RSH)),
    **{
        syntax: template
        for name in FILLS
        for syntax, template in _counted(name, partial(_propagate, name=name), is_top=True).items()
    },
}


# The RPN stack.


_UNROLLED = 16
"""Maximum number of repetitions that are unrolled. More become a loop."""


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
    """Write a loop: pop the top cell, a count, and push as many copies of the cell below it."""
    asm, count = w.asm, w.work(0)
    value = w.stack.pop_register()
    asm.store(SCRATCH, count, value)
    w.stack.settle()
    w.stack.store_tsp()
    with w.repeat(count):
        asm.load(TSP, SCRATCH, Field.TSP)
        asm.mov(Register.R1, TSP)
        w.cell(Register.R1)
        asm.load(Register.R2, Register.R1, 0)
        asm.alu(Alu.SUB, TSP, 1)
        asm.store(SCRATCH, Field.TSP, TSP)
        asm.mov(Register.R1, TSP)
        w.cell(Register.R1)
        asm.store(Register.R1, 0, Register.R2)
    w.stack.drop(-times)
    w.close_loop()


def _displaced(w: Writer, base: Operand, n: Operand) -> Register:
    """Return a register with the address of the cell at ``base + n``, relative to ``CELLS``."""
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
    """Return the position, in the block's stack, of the cell at SBP or TSP + ``n``, or None if it is unknown."""
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
    """Write a cell at an unknown position: flush the stack before, and forget its cells afterwards."""
    register = w.stack.in_register(value)
    address = _displaced(w, base, n)
    w.stack.flush()
    w.asm.store(address, 0, register)
    w.stack.settle()


def _pop_to(w: Writer, name: str, n: int) -> None:
    position, base = _position(w, name, n), None
    if position is None:
        base = _base(w, name)  # before the pop
    value = w.stack.pop()
    if position is not None:
        w.stack.set(position - w.stack.top, value)
    elif base is not None:
        _store_cell(w, value, base, n)


def _pop_to_popped(w: Writer, name: str) -> None:
    value, n = w.stack.pop(), w.stack.pop()
    position = _position(w, name, n)
    if position is not None:
        w.stack.set(position - w.stack.top, value)
    else:
        _store_cell(w, value, _base(w, name), n)


def _copy_to(w: Writer, name: str, n: Operand) -> None:
    value = w.stack.peek()
    position = _position(w, name, n)
    if position is not None:
        w.stack.set(position - w.stack.top, w.stack.copy(value) if isinstance(value, Register) else value)
        return
    _store_cell(w, value, _base(w, name), n)


def _relative(name: str) -> dict[str, Template]:
    """Return the templates of instructions that access a cell at SBP or TSP plus a number."""
    return {
        f"push {name}": lambda w, _: _load_cell(w, name, w.stack.pop()),
        f"pop {name}": lambda w, _: _pop_to_popped(w, name),
        f"copy {name}": lambda w, _: _copy_to(w, name, w.stack.pop()),
        f"push {name}, <n>": lambda w, i: _load_cell(w, name, int(i.operand)),
        f"pop {name}, <n>": lambda w, i: _pop_to(w, name, int(i.operand)),
        f"copy {name}, <n>": lambda w, i: _copy_to(w, name, int(i.operand)),
    }


def _save_sbp(w: Writer, i: EncodedInstruction) -> None:
    value = w.field(Field.SBP)
    if not w.wide:
        w.asm.mov(value, value, wide=False)
    w.stack.push(value)


def _restore_tsp(w: Writer, i: EncodedInstruction) -> None:
    value = w.stack.pop_register()
    w.stack.flush()
    w.asm.store(SCRATCH, Field.TSP, value)
    w.reload_tsp()


def _dup_popped(w: Writer, i: EncodedInstruction) -> None:
    asm, count = w.asm, w.work(0)
    value, times = w.stack.pop_register(), w.stack.pop_register()
    asm.store(SCRATCH, w.work(1), value)
    w.stack.flush()
    # min(count + 1, 1024) cells are written; TSP moves by count + 1 in any case.
    asm.store(SCRATCH, count, times)
    asm.alu(Alu.ADD, times, 1)
    tsp = w.stack.tsp_value()
    position = w.stack.in_register(tsp)
    asm.alu(Alu.SUB, position, times)
    asm.store(SCRATCH, Field.TSP, position)
    w.stack.settle()
    small = asm.label()
    asm.jump_if_word(Jump.JLT, SCRATCH, count, RPN_STACK_CELLS, small)
    asm.mov(Register.R1, RPN_STACK_CELLS - 1)
    asm.place(small)
    asm.alu(Alu.ADD, Register.R1, 1)
    asm.store(SCRATCH, count, Register.R1)
    with w.repeat(count):
        asm.load(Register.R2, SCRATCH, Field.TSP)
        asm.alu(Alu.ADD, Register.R2, Register.R1)
        w.cell(Register.R2)
        asm.copy_from(SCRATCH, w.work(1), Register.R2, 0)
    w.reload_tsp()


STACK_TEMPLATES: dict[str, Template] = {
    "push <value>": _push_value,
    "xchg": _xchg,
    "dup <times>": _dup,
    "dup": _dup_popped,
    "ros <cells>": lambda w, i: w.stack.drop(int(i.operand)),
    **_relative("sbp"),
    **_relative("tsp"),
    "save sbp": _save_sbp,
    "restore sbp": lambda w, _: w.asm.store(SCRATCH, Field.SBP, w.stack.pop_register()),
    "save tsp": lambda w, _: w.stack.push(w.stack.tsp_value()),
    "restore tsp": _restore_tsp,
}
