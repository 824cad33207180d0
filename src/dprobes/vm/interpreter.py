"""Loop that runs a handler, and the dispatch of exceptions (man page, "RPN Exception Handling"; recovered 1.7)."""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.rpn.instruction_encoding import EncodedInstruction, decode_one
from dprobes.rpn.instruction_set import HANDLER_DISPATCH_MAX, NON_MASKABLE, RPN_STACK_CELLS, ExceptionCode, OperandKind
from dprobes.rpn.keyed_tables import operated_table
from dprobes.rpn.word_arithmetic import signed
from dprobes.vm import log_rules, stack_rules, world_rules
from dprobes.vm.rpn_machine import Ending, LogFull, Machine, Raised, take_trace
from dprobes.vm.world_context import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm.rpn_machine import Outcome, Point
    from dprobes.vm.world_context import Context

__all__ = ["FLOW_RULES", "Interpreter", "Steps"]

# The rules of control flow, exceptions, stack traces and the call of extensions.
#
# A rule is a function of the machine and the operand; ``RULES`` maps a row's syntax to its rule. When a rule runs,
# ``machine.ip`` is already that of the next instruction.


if TYPE_CHECKING:
    Rule = Callable[[Machine, Any], None]


def _nop(machine: Machine, operand: int) -> None:
    pass


def _jmp(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.ip = target


def _branch(condition: Callable[[int], bool]) -> Rule:
    """Return the rule of a conditional jump, which charges the jump budget only if the jump is taken."""

    def rule(machine: Machine, target: int) -> None:
        if condition(signed(machine.peek(), machine.bits)):
            machine.charge_jump()
            machine.ip = target

    return rule


def _loop(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.poke(machine.peek() - 1)
    if machine.peek():
        machine.ip = target


def _call(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.enter(target)


def _end(ending: Ending) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        machine.ending = ending

    return rule


def _exit_code(machine: Machine, code: int) -> None:
    if code not in (1, 2, 3):
        raise Raised(ExceptionCode.INVALID_OPERAND, 4, code)
    machine.exit_code = code
    machine.ending = Ending.EXIT


def _skip(machine: Machine, operand: int) -> None:
    machine.value = machine.pop()
    machine.ending = Ending.SKIP


# Exceptions


def _sx(machine: Machine, target: int) -> None:
    machine.frames[-1].handler = target


def _ux(machine: Machine, operand: int) -> None:
    machine.frames[-1].handler = None


def _rx(machine: Machine, operand: int) -> None:
    raise Reraised(machine.peek(0), machine.peek(1), machine.peek(2))


class Reraised(Raised):
    """
    An exception that ``rx`` raises again.

    The exception mask does not apply, and code, parm1 and parm2 are on the stack already.
    """


def _push_x(machine: Machine, operand: int) -> None:
    for value in reversed(machine.last_exception):
        machine.push(value)


# Stack traces


def _pop_stp(machine: Machine, operand: int) -> None:
    position = machine.pop()
    if position > machine.point.ex_logmax:
        raise Raised(ExceptionCode.LOG_OVERFLOW, machine.point.ex_logmax)
    machine.trace.move(position)


def _trace_pv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    machine.frames[-1].cells = (index, min(count, RPN_STACK_CELLS))


def _trace_lv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    _check_range(index, count, len(machine.context.local_variables), 1)
    machine.frames[-1].local_variables = (index, count)


def _trace_gv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    _check_range(index, count, len(machine.context.global_variables), 2)
    machine.frames[-1].global_variables = (index, count)


def _check_range(index: int, count: int, limit: int, kind: int) -> None:
    if count and index + count > limit:
        raise Raised(ExceptionCode.INVALID_OPERAND, kind, max(index, limit))


FLOW_RULES: dict[str, Rule] = {
    "nop": _nop,
    "jmp <label>": _jmp,
    "jlt <label>": _branch(lambda x: x < 0),
    "jle <label>": _branch(lambda x: x <= 0),
    "jgt <label>": _branch(lambda x: x > 0),
    "jge <label>": _branch(lambda x: x >= 0),
    "jz <label>": _branch(lambda x: x == 0),
    "jnz <label>": _branch(lambda x: x != 0),
    "loop <label>": _loop,
    "call <procname>": _call,
    "ret": lambda machine, _: machine.leave(),
    "abort": _end(Ending.ABORT),
    "remove": _end(Ending.REMOVE),
    "exit": _end(Ending.EXIT),
    "exit <code>": _exit_code,
    "skip": _skip,
    "callk": lambda machine, _: machine.context.call_extension(None, machine),
    "callk <name>": lambda machine, name: machine.context.call_extension(name, machine),
    "sx <label>": _sx,
    "ux": _ux,
    "rx": _rx,
    "push x": _push_x,
    "log st": lambda machine, _: take_trace(machine),
    "purge st": lambda machine, _: machine.trace.purge(),
    "push stp": lambda machine, _: machine.push(machine.trace.position),
    "pop stp": _pop_stp,
    "trace pv": _trace_pv,
    "trace lv": _trace_lv,
    "trace gv": _trace_gv,
}


if TYPE_CHECKING:
    Step = tuple[Rule, Any, int]
    """The rule of an instruction, its operand, and the offset of the next instruction."""

RULES: dict[str, Rule] = {
    **FLOW_RULES,
    **log_rules.LOG_RULES,
    **stack_rules.RULES,
    **log_rules.TABLE_RULES,
    **world_rules.RULES,
}
"""The rule of each row of the instruction table, keyed by its syntax."""


class Interpreter:
    """Interpreter of the handlers of one probe program; only ``Context`` keeps state between hits."""

    def __init__(self, image: CodeImage, architecture: Architecture) -> None:
        self._architecture = architecture
        self.steps = Steps(image, architecture)

    def run(self, start: int, point: Point, context: Context) -> Outcome:
        """
        Run the handler whose code starts at byte ``start`` of the image, and return its outcome.

        RPN exceptions do not leave the handler. Errors of the context do, except ``AddressFault`` and
        ``SelectorFault``.
        """
        return self.final_state(start, point, context).outcome()

    def final_state(self, start: int, point: Point, context: Context) -> Machine:
        """Run a handler as ``run`` does, and return the machine afterwards, with its stack, heap and logs."""
        return self.finish(self.machine(start, point, context))

    def machine(self, start: int, point: Point, context: Context) -> Machine:
        """Return a machine with empty stack and log, before the first instruction of the handler at byte ``start``."""
        return Machine(self._architecture, point, context, start)

    def finish(self, machine: Machine) -> Machine:
        """Run ``machine`` from its present state until the handler has ended, and return the same machine."""
        steps = self.steps
        ending = machine.ending
        while ending is None:
            try:
                while ending is None:
                    rule, operand, machine.ip = steps[machine.ip]
                    rule(machine, operand)
                    ending = machine.ending
            except Raised as raised:
                _dispatch(machine, raised)
            except AddressFault as fault:
                _dispatch(machine, Raised(ExceptionCode.INVALID_ADDR, fault.address))
            except SelectorFault as fault:
                _dispatch(machine, Raised(ExceptionCode.SEG_FAULT, fault.selector))
            ending = machine.ending
        return machine


def _dispatch(machine: Machine, raised: Raised) -> None:
    """
    Pass an exception to the innermost exception handler, or end the run if there is none.

    An exception that the mask excludes ends the run if it is non-maskable. Otherwise it has no effect, except that
    LOG_OVERFLOW closes the log.
    """
    point = machine.point
    forced = isinstance(raised, Reraised)
    if not forced and not raised.code & point.exception_mask:
        if raised.code & NON_MASKABLE:
            if point.autostacktrace:
                take_trace(machine)
            _end_run(machine, raised)
        elif isinstance(raised, LogFull):
            machine.close_log()
        return
    machine.last_exception = (raised.code, raised.parm1 & machine.mask, raised.parm2 & machine.mask)
    if not forced:
        for value in (raised.parm2, raised.parm1, raised.code):
            machine.push(value)
    if point.autostacktrace:
        take_trace(machine)
    while machine.frames[-1].handler is None:
        if len(machine.frames) == 1:
            _end_run(machine, raised)
            return
        machine.leave()
    if machine.dispatches == HANDLER_DISPATCH_MAX:
        _end_run(machine, raised)
        return
    machine.dispatches += 1
    frame = machine.frames[-1]
    assert frame.handler is not None
    machine.ip, frame.handler = frame.handler, None


def _end_run(machine: Machine, raised: Raised) -> None:
    machine.ending = Ending.EXIT
    if not isinstance(raised, Reraised):
        machine.unhandled = raised.code


class Steps(dict[int, "Step"]):
    """
    Map from byte offsets in the image to (rule, operand, offset of the next instruction).

    Instructions are decoded when they are first executed. Offsets without an instruction, or outside the image, raise
    INVALID_OPCODE.
    """

    def __init__(self, image: CodeImage, architecture: Architecture) -> None:
        super().__init__()
        self._image = image
        self._architecture = architecture
        self._symbols = {r.offset: (r.symbol, r.addend) for r in image.relocations}

    def __missing__(self, offset: int) -> Step:
        image = self._image
        step = self._step(decode_one(image.data, offset, image.word_size, image.byte_order))
        self[offset] = step
        return step

    def _step(self, instruction: EncodedInstruction) -> Step:
        row, operand = instruction.row, instruction.operand
        if row is None:
            return _invalid_opcode, (operand, instruction.offset), instruction.end
        relocation = self._symbols.get(instruction.offset + 1)
        if relocation is not None and row.operand_kind is OperandKind.VALUE:
            return _push_symbol, relocation, instruction.end
        if row.operand_kind is OperandKind.TABLE and operated_table(row, operand, self._image.tables) is None:
            return _invalid_opcode, (row.opcode, instruction.offset), instruction.end
        if row.operand_kind is OperandKind.REGISTER:
            register = self._architecture.register(operand)
            allowed = register is not None and register.may_be(row.syntax.partition(",")[0])
            return RULES[row.syntax], register if allowed else None, instruction.end
        return RULES[row.syntax], operand, instruction.end


def _invalid_opcode(machine: Machine, operand: tuple[int, int]) -> None:
    raise Raised(ExceptionCode.INVALID_OPCODE, *operand)


def _push_symbol(machine: Machine, operand: tuple[str, int]) -> None:
    symbol, addend = operand
    machine.push(machine.context.symbol_address(symbol) + addend)
