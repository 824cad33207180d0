"""The loop that runs a handler, and the dispatch of exceptions (man page, "RPN Exception Handling"; recovered 1.7)."""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.rpn.decoder import EncodedInstruction, decode_one
from dprobes.rpn.isa import HANDLER_DISPATCH_MAX, NON_MASKABLE, ExceptionCode, OperandKind
from dprobes.vm import rules_flow, rules_log, rules_stack, rules_tables, rules_world
from dprobes.vm.context import AddressFault, SelectorFault
from dprobes.vm.machine import Ending, LogFull, Machine, Raised
from dprobes.vm.rules_flow import Reraised
from dprobes.vm.stacktraces import take_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.rpn.encoder import CodeImage
    from dprobes.vm.context import Context
    from dprobes.vm.machine import Outcome, Point

    Rule = Callable[[Machine, Any], None]
    Step = tuple[Rule, Any, int]
    """What an instruction does, its operand, and where the next one starts."""

__all__ = ["Interpreter", "Steps"]

RULES: dict[str, Rule] = {
    **rules_flow.RULES,
    **rules_log.RULES,
    **rules_stack.RULES,
    **rules_tables.RULES,
    **rules_world.RULES,
}
"""What each row of the instruction table does, keyed by its syntax."""


class Interpreter:
    """Run the handlers of one program. No hit sees what another one left."""

    def __init__(self, image: CodeImage, architecture: Architecture) -> None:
        self._architecture = architecture
        self.steps = Steps(image, architecture)

    def run(self, start: int, point: Point, context: Context) -> Outcome:
        """Run the handler whose code starts at byte ``start`` of the image, and return what came of it."""
        return self.final_state(start, point, context).outcome()

    def final_state(self, start: int, point: Point, context: Context) -> Machine:
        """Run a handler and return the machine as it ended, for those who want to see more than what came of it."""
        return self.finish(self.machine(start, point, context))

    def machine(self, start: int, point: Point, context: Context) -> Machine:
        """Return a machine that is about to run a handler."""
        return Machine(self._architecture, point, context, start)

    def finish(self, machine: Machine) -> Machine:
        """Run a machine on from the state that it is in until it has ended, and return it."""
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
    """Pass an exception to the innermost handler; end the run if there is none, or if the exception is masked."""
    point = machine.point
    forced = isinstance(raised, Reraised)
    if not forced and not raised.code & point.exception_mask:
        if raised.code & NON_MASKABLE:
            if point.autostacktrace:
                take_trace(machine)
            _end(machine, raised)
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
            _end(machine, raised)
            return
        machine.leave()
    if machine.dispatches == HANDLER_DISPATCH_MAX:
        _end(machine, raised)
        return
    machine.dispatches += 1
    frame = machine.frames[-1]
    assert frame.handler is not None
    machine.ip, frame.handler = frame.handler, None


def _end(machine: Machine, raised: Raised) -> None:
    machine.ending = Ending.EXIT
    if not isinstance(raised, Reraised):
        machine.unhandled = raised.code


class Steps(dict[int, "Step"]):
    """
    Map a byte offset of the image to (rule, operand, offset of the next instruction).

    Only what is executed is decoded. Offsets that hold no instruction, or lie outside the image, raise INVALID_OPCODE.
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
        if row.operand_kind is OperandKind.TABLE and int(operand) >= len(self._image.tables):
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
