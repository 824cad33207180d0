"""
Templates of instructions: functions that write the Python source of an instruction.

``TEMPLATES`` has the templates of frequent instructions. For any other instruction that uses only the stack and the
context, the function calls the interpreter's rule (``apply``). For all others, the function leaves. Cells are words
already; values from the context are truncated to words, as by ``Machine.push``.
"""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dprobes.rpn.control_flow import stack_effect
from dprobes.rpn.instruction_set import (
    CALL_DEPTH_MAX,
    KERNEL_FRAMES_MAX,
    RPN_STACK_CELLS,
    USER_FRAMES_MAX,
    Group,
    OperandKind,
    Token,
)
from dprobes.rpn.rpn_program import Instruction
from dprobes.rpn.word_arithmetic import BINARY, COMPARISONS
from dprobes.vm.translate.function_writer import Atom, Call, NotKnownError, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Register
    from dprobes.rpn.instruction_set import Row
    from dprobes.rpn.word_arithmetic import Binary, Comparison
    from dprobes.vm.interpreter import Step
    from dprobes.vm.translate.function_writer import Writer

__all__ = ["TEMPLATES", "write_instruction"]

# The templates of instructions of the RPN stack and of variables.


if TYPE_CHECKING:
    Template = Callable[[Writer, Any], None]

# The RPN stack


def push_symbol(w: Writer, operand: tuple[str, int]) -> None:
    """Write the push of a symbol's run-time address plus an addend; ``operand`` is the symbol's name and the addend."""
    symbol, addend = operand
    w.state.push(w.variable(f"context.symbol_address({symbol!r}) + {addend} & {w.mask}"))


def _xchg(w: Writer, operand: int) -> None:
    top, below = w.state.pop(), w.state.pop()
    w.state.push(top)
    w.state.push(below)


def _dup(w: Writer, times: int) -> None:
    value = w.state.peek()
    for _ in range(times):
        w.state.push(value)


def _dup_popped(w: Writer, operand: int) -> None:
    value, count = w.state.pop(), w.state.pop_number()
    if count >= RPN_STACK_CELLS:
        raise NotKnownError
    for _ in range(count + 1):
        w.state.push(value)


def _pointer_templates(name: str) -> dict[str, Template]:
    """Return the templates of the stack pointer ``name``, tsp or sbp, and of the cells at a distance from it."""
    pointer = attrgetter(name)

    def push(w: Writer, n: int) -> None:
        w.state.push(w.state.cell(pointer(w.state) + n))

    def pop(w: Writer, n: int) -> None:
        position = pointer(w.state) + n  # before the pop
        w.state.set_cell(position, w.state.pop())

    def pop_popped(w: Writer, operand: int) -> None:
        value, n = w.state.pop(), w.state.pop_number()
        w.state.set_cell(pointer(w.state) + n, value)

    def copy(w: Writer, n: int) -> None:
        w.state.set_cell(pointer(w.state) + n, w.state.peek())

    return {
        f"push {name}, <n>": push,
        f"push {name}": lambda w, _: push(w, w.state.pop_number()),
        f"pop {name}, <n>": pop,
        f"pop {name}": pop_popped,
        f"copy {name}, <n>": copy,
        f"copy {name}": lambda w, _: copy(w, w.state.pop_number()),
        f"save {name}": lambda w, _: w.state.push(Pointer(pointer(w.state) & w.architecture.word_mask)),
        f"restore {name}": lambda w, _: setattr(w.state, name, w.state.pop_number()),
    }


# Variables


def _variable_templates(name: str, values: str, *, shared: bool = False) -> dict[str, Template]:
    """Return the templates of a kind of variables; ``values`` is the Python expression for their sequence."""

    def checked(w: Writer, index: Atom) -> str:
        found = w.variable(values)
        w.leave_if(f"{index} >= len({found})")
        return found

    def load(w: Writer, index: Atom) -> None:
        w.state.push(w.variable(f"{checked(w, index)}[{index}] & {w.mask}"))

    def store(w: Writer, index: Atom, value: Atom) -> None:
        found = checked(w, index)
        place = f"{found}[{index}]"
        if shared:
            w.line(f"store_variable({found}, {index}, {value}, {w.architecture.word_size})")
        else:
            w.line(f"{place} = {place} & ~{w.mask} | {value}")

    def add(amount: int) -> Template:
        def write(w: Writer, index: Atom) -> None:
            found = checked(w, index)
            place = f"{found}[{index}]"
            if shared:
                w.line(f"add_to_variable({found}, {index}, {amount}, {w.architecture.word_size})")
            else:
                w.line(f"{place} = {place} & ~{w.mask} | {place} + {amount} & {w.mask}")

        return write

    def pop(w: Writer, index: Atom) -> None:
        store(w, index, w.state.pop())

    def pop_popped(w: Writer, operand: int) -> None:
        value, index = w.state.pop(), w.state.pop()
        store(w, index, value)

    def move(w: Writer, index: Atom) -> None:
        store(w, index, w.state.peek())

    def popped(write: Template) -> Template:
        return lambda w, _: write(w, w.state.pop())

    inc, dec = add(1), add(-1)
    return {
        f"push {name}, <{name}>": load,
        f"push {name}": popped(load),
        f"pop {name}, <{name}>": pop,
        f"pop {name}": pop_popped,
        f"move {name}, <{name}>": move,
        f"move {name}": popped(move),
        f"inc {name}, <{name}>": inc,
        f"inc {name}": popped(inc),
        f"dec {name}, <{name}>": dec,
        f"dec {name}": popped(dec),
    }


STACK_TEMPLATES: dict[str, Template] = {
    "push <value>": lambda w, value: w.state.push(value),
    "xchg": _xchg,
    "dup <times>": _dup,
    "dup": _dup_popped,
    "ros <cells>": lambda w, cells: w.state.drop(cells),
    **_pointer_templates("sbp"),
    **_pointer_templates("tsp"),
    **_variable_templates("lv", "context.local_variables", shared=True),
    **_variable_templates("gv", "context.global_variables", shared=True),
    **_variable_templates("cv", "context.cpu_variables()", shared=True),
    **_variable_templates("tv", "context.thread_variables()"),
}


_APPLIED = frozenset(
    {Group.TABLE, Group.ARITHMETIC, Group.REGISTER, Group.DATA, Group.SYSTEM, Group.IO, Group.VERIFY, Group.SEGMENT}
    | {Group.PHYSICAL}
)
"""The groups of instructions whose rules use only the stack and the context, except rules that log."""


def write_instruction(w: Writer, row: Row, step: Step) -> None:
    """Write an instruction; raise ``NotKnownError`` if the interpreter must execute it."""
    template = TEMPLATES.get(row.syntax)
    operand = step[1]
    if isinstance(operand, tuple):
        if row.group is Group.TABLE:  # the table does not exist
            raise NotKnownError
        template = push_symbol
    elif row.operand_kind is OperandKind.REGISTER and not _is_plain(operand):
        template = None
    if template is not None:
        template(w, operand)
    elif row.group in _APPLIED and row.operator != "log":
        _apply(w, row, step)
    else:
        raise NotKnownError


def _is_plain(register: Register | None) -> bool:
    return register is not None and not register.parts and not register.selector_cells


def _apply(w: Writer, row: Row, step: Step) -> None:
    operand = step[1]
    if row.operand_kind is OperandKind.REGISTER:
        if operand is None:
            raise NotKnownError
        operand = operand.index
    effect = stack_effect(Instruction(row, operand), w.architecture, w.tables)
    cells = [w.state.pop() for _ in range(effect.popped)]
    pushed = [w.new_variable() for _ in range(effect.pushed)]
    arguments = ", ".join([w.name_of(step), "context", *(f"{atom}" for atom in cells)])
    w.attempt("".join(f"{name}, " for name in pushed) + ("= " if pushed else "") + f"apply({arguments})")
    for name in reversed(pushed):
        w.state.push(name)


# Control flow


def _nop(w: Writer, operand: int) -> None:
    pass


def _branch(condition: str) -> Template:
    """Return the template of a conditional jump. ``condition`` formats x, the top cell, and sign, a mask."""
    return lambda w, target: w.branch(condition.format(x=w.state.peek(), sign=f"{1 << (w.bits - 1):#x}"), target)


def _loop(w: Writer, target: int) -> None:
    count = w.state.peek()
    following = w.state.ip
    w.jump(following)
    count = w.variable(f"{count} - 1 & {w.mask}")
    w.state.poke(count)
    w.branch(count, target, charged=True)


def _call(w: Writer, target: int) -> None:
    state = w.state
    if len(state.calls) > CALL_DEPTH_MAX:
        raise NotKnownError
    state.calls = (*state.calls, Call(target, state.ip, state.sbp))
    w.jump(target)


def _ret(w: Writer, operand: int) -> None:
    state = w.state
    if len(state.calls) == 1:
        raise NotKnownError
    *calls, call = state.calls
    state.calls = tuple(calls)
    state.ip, state.sbp = call.return_offset, call.saved_sbp


def _sx(w: Writer, target: int | None) -> None:
    *outer, call = w.state.calls
    w.state.calls = (*outer, call._replace(handler=target))


def _end(ending: str) -> Template:
    def write(w: Writer, code: int) -> None:
        if not w.ends:
            raise NotKnownError
        log = "b''" if ending == "ABORT" else "log"
        w.end(f"return new(Outcome, ({ending}, {log}, b'', major, minor, {code}, 0, 0, False))")

    return write


def _exit_code(w: Writer, code: int) -> None:
    if code not in (1, 2, 3):
        raise NotKnownError
    _end("EXIT")(w, code)


# The log


def _set(variable: str) -> Template:
    return lambda w, number: w.line(f"{variable} = {number}")


def _set_popped(variable: str) -> Template:
    return lambda w, _: w.line(f"{variable} = {w.state.pop()} & 0xffff")


def _log_cells(code: str) -> Template:
    """
    Return the template of ``log b|w|d, <count>``. ``code`` is the type of an item in the format of ``struct``.

    An empty ``code`` means ``log <count>``, which logs whole words.
    """

    def write(w: Writer, count: int) -> None:
        size = struct.calcsize(f"={code}") if code else w.architecture.word_size
        cut = "" if 8 * size == w.bits else f" & {(1 << 8 * size) - 1:#x}"
        _log_values(w, [f"{w.state.pop()}{cut}" for _ in range(count)], code or _word_code(w))

    return write


def _word_code(w: Writer) -> str:
    return "Q" if w.bits == 64 else "I"


def _log_values(w: Writer, values: list[str], code: str, prefix: str = "") -> None:
    """
    Write code that appends numbers to the log if they fit; otherwise the interpreter executes the instruction.

    ``values`` has Python expressions. ``code`` is the type of each in the format of ``struct``; the first ones have the
    types in ``prefix`` instead.
    """
    order = ">" if w.architecture.byte_order == "big" else "<"
    layout = struct.Struct(f"{order}{prefix}{len(values) - len(prefix)}{code}")
    if layout.size:
        w.leave_if(f"len(log) + {layout.size} > point.logmax")
        w.line(f"log += {w.name_of(layout.pack)}({', '.join(values)})")


def _log_popped_count(w: Writer, operand: int) -> None:
    count = w.state.pop_number()
    if count > RPN_STACK_CELLS:
        raise NotKnownError
    values = [f"{w.state.pop()}" for _ in range(count)]
    _log_values(w, [f"{int(Token.STACK_COUNT)}", f"{count}", *values], _word_code(w), "BH")


def _log_item(function: str) -> Template:
    """
    Return the template of an instruction that pops two numbers and logs an item of variable length.

    ``function`` is a Python expression for the item, with the fields ``first`` and ``second`` for the numbers.
    """

    def write(w: Writer, operand: int) -> None:
        first, second = w.state.pop(), w.state.pop()
        item = w.variable(function.format(first=first, second=second))
        w.leave_if(f"{item} is None")
        w.line(f"log += {item}")

    return write


def _log_variables(token: Token, values: str) -> Template:
    return _log_item(f"variables_item({int(token)}, {values}, {{second}}, {{first}}, point.logmax - len(log))")


def _log_stack(token: Token, stack_of: str, frames_max: int = 0) -> Template:
    """Return the template of ``log kstack|ustack``. Unless ``frames_max`` is 0, it replaces the operand."""

    def write(w: Writer, frames: int) -> None:
        item = f"stack_item({int(token)}, {stack_of}, {frames_max or frames}, point.logmax - len(log))"
        found = w.variable(item)
        w.leave_if(f"{found} is None")
        w.line(f"log += {found}")

    return write


_KERNEL_STACK = "lambda frames: context.kernel_stack()"
_USER_STACK = "context.user_stack"


def _push_lp(w: Writer, operand: int) -> None:
    w.state.push(w.variable("len(log)"))


# Arithmetic


def _binary(operation: Binary) -> Template:
    """Return the template of an operation on the two top cells, which its result replaces."""

    def write(w: Writer, operand: int) -> None:
        top, below = w.state.pop(), w.state.pop()
        cut = f" & {w.mask}" if operation.wraps else ""
        w.state.push(w.variable(f"{top} {operation.symbol} {below}{cut}"))

    return write


def _comparison(comparison: Comparison) -> Template:
    """Return the template of a comparison; signed words are compared as unsigned ones with the sign bit inverted."""

    def write(w: Writer, operand: int) -> None:
        top, below = w.state.pop(), w.state.pop()
        if comparison.is_signed:
            sign = 1 << (w.bits - 1)
            top, below = f"{top} ^ {sign}", f"{below} ^ {sign}"
        w.state.push(w.variable(f"int(({top}) {comparison.symbol} ({below}))"))

    return write


def _shift(operator: str) -> Template:
    def write(w: Writer, count: int) -> None:
        value = w.state.pop()
        w.state.push(w.variable(f"{value} {operator} {count} & {w.mask}") if count < w.bits else 0)

    return write


# Registers, memory and system variables


def _push_register(*, user: bool) -> Template:
    def write(w: Writer, register: Register) -> None:
        if register.memory_offset is None:
            bits = max(w.bits, register.bits)
            _push_from_context(w, f"register({register.index}, user={user})", bits)
            return
        stack_pointer = w.architecture.register("sp")
        assert stack_pointer is not None
        base = f"context.register({stack_pointer.index}, user={user})"
        _push_read(w, f"{base} + {register.memory_offset} & {w.mask}", w.architecture.word_size)

    return write


def _push_from_context(w: Writer, method: str, bits: int) -> None:
    w.push_wide(w.variable(f"context.{method}" + (f" & {w.mask}" if bits == w.bits else "")), bits)


def _push_read(w: Writer, address: str, size: int) -> None:
    name = w.new_variable()
    w.attempt(f"{name} = int.from_bytes(context.read({address}, {size}), {w.architecture.byte_order!r})")
    w.push_wide(name, max(8 * size, w.bits))


def _push_traced_field(w: Writer, field: str) -> None:
    name = w.new_variable()
    w.attempt(f"{name} = context.traced_field({field!r}) & {w.mask}")
    w.push_wide(name, w.bits)


def _push_argument(w: Writer, number: int) -> None:
    name = w.new_variable()
    w.attempt(f"{name} = argument(point.arguments, {number}, context)")
    w.push_wide(name, w.bits)


def _push_elapsed(w: Writer, _: object) -> None:
    w.keeps_elapsed = True
    w.attempt(f"elapsed = context.time() - context.entry_time() & {(1 << 64) - 1:#x} if elapsed is None else elapsed")
    w.push_wide(w.variable("elapsed"), 64)


def _push_memory(size: int) -> Template:
    return lambda w, _: _push_read(w, f"{w.state.pop()}", size)


TEMPLATES: dict[str, Template] = {
    "nop": _nop,
    "jmp <label>": lambda w, target: w.jump(target),
    "jlt <label>": _branch("{x} >= {sign}"),
    "jle <label>": _branch("not 0 < {x} < {sign}"),
    "jgt <label>": _branch("0 < {x} < {sign}"),
    "jge <label>": _branch("{x} < {sign}"),
    "jz <label>": _branch("not {x}"),
    "jnz <label>": _branch("{x}"),
    "loop <label>": _loop,
    "call <procname>": _call,
    "ret": _ret,
    "abort": _end("ABORT"),
    "remove": _end("REMOVE"),
    "exit": _end("EXIT"),
    "exit <code>": _exit_code,
    "sx <label>": _sx,
    "ux": lambda w, _: _sx(w, None),
    "setmin <minor>": _set("minor"),
    "setmin": _set_popped("minor"),
    "setmaj <major>": _set("major"),
    "setmaj": _set_popped("major"),
    "log str": _log_item("string_item(context, {first}, {second}, point.logmax - len(log))"),
    "log mrf": _log_item("memory_item(context, {first}, {second}, point.logmax - len(log))"),
    "log b, <count>": _log_cells("B"),
    "log w, <count>": _log_cells("H"),
    "log d, <count>": _log_cells("I"),
    "log <count>": _log_cells(""),
    "log": _log_popped_count,
    "log lv": _log_variables(Token.LOCAL_VARIABLES, "context.local_variables"),
    "log gv": _log_variables(Token.GLOBAL_VARIABLES, "context.global_variables"),
    "log cv": _log_variables(Token.CPU_VARIABLES, "context.cpu_variables()"),
    "log tv": _log_variables(Token.THREAD_VARIABLES, "context.thread_variables()"),
    "log kstack, <frames>": _log_stack(Token.KERNEL_STACK, _KERNEL_STACK),
    "log kstack": _log_stack(Token.KERNEL_STACK, _KERNEL_STACK, KERNEL_FRAMES_MAX),
    "log ustack, <frames>": _log_stack(Token.USER_STACK, _USER_STACK),
    "log ustack": _log_stack(Token.USER_STACK, _USER_STACK, USER_FRAMES_MAX),
    "push lp": _push_lp,
    "push plp": _push_lp,  # they differ only when a log instruction has failed
    **{name: _binary(operation) for name, operation in BINARY.items()},
    **{name: _comparison(comparison) for name, comparison in COMPARISONS.items()},
    "neg": lambda w, _: w.state.push(w.variable(f"{w.state.pop()} ^ {w.mask}")),
    "shl <bits>": _shift("<<"),
    "shr <bits>": _shift(">>"),
    **STACK_TEMPLATES,
    "push r, <register>": _push_register(user=False),
    "push u, <register>": _push_register(user=True),
    **{f"push mem, u{8 << n}": _push_memory(1 << n) for n in range(4)},
    "push tp, <field>": _push_traced_field,
    "push usdt, <argument>": _push_argument,
    "push pid": lambda w, _: _push_from_context(w, "pid()", w.bits),
    "push tid": lambda w, _: _push_from_context(w, "tid()", w.bits),
    "push uid": lambda w, _: _push_from_context(w, "uid()", w.bits),
    "push procid": lambda w, _: _push_from_context(w, "cpu()", w.bits),
    "push elapsed": _push_elapsed,
    "push time": lambda w, _: _push_from_context(w, "time()", 64),
}
"""The templates of frequent instructions by syntax; the second argument is the operand in the interpreter's step."""
