"""
What a program does as far as it is specified.

The value of a cell that a hit has popped is not, nor what a string, or a log instruction that failed, leaves in the
log buffer behind LP: programs whose outcome depends on it are found by running them with such cells forgotten and such
bytes changed. What a hit has never written is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dprobes.rpn.instruction_set import RPN_STACK_CELLS
from dprobes.rpn.word_arithmetic import signed
from dprobes.vm import Interpreter, Outcome, Point
from dprobes.vm.interpreter import RULES, Steps
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.testing import FakeContext
    from dprobes.vm.interpreter import Rule, Step
    from dprobes.vm.rpn_machine import Machine

__all__ = ["Hit", "Result", "results", "specified_results"]

Runner = Interpreter | Translator
Hit = tuple[int, Point]
Result = list[tuple[Outcome, dict[str, Any]]]


def results(runner: Runner, hits: list[Hit], context: FakeContext) -> Result:
    """Return what comes of each hit, and what the world is like after it."""
    found = []
    for start, point in hits:
        outcome = runner.run(start, point, context)
        world = {name: repr(value) for name, value in vars(context).items() if name != "architecture"}
        found.append((outcome, world))
    return found


class Unspecified:
    """Be the value of a cell that nothing may depend on: whatever is done with it is a TypeError."""

    def __bool__(self) -> bool:
        raise TypeError

    def __getattr__(self, name: str) -> object:
        raise TypeError

    def __eq__(self, other: object) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]


UNSPECIFIED = cast("int", Unspecified())


def _spoils(rule: Rule, *, always: bool) -> Callable[[Machine], None]:
    """Return a rule of logging that spoils what is behind LP: if it fails, or always."""

    def spoiling(machine: Machine) -> None:
        failed = True
        try:
            rule(machine, 0)
            failed = False
        finally:
            if failed or always:
                machine.log[machine.lp :] = _SPOILED * max(0, len(machine.log) - machine.lp)

    return spoiling


def _push_relative(name: str) -> Callable[[Machine], None]:
    def rule(machine: Machine) -> None:
        # The cell with the distance is popped before the other one is read; it may be that one.
        distance, position = machine.peek(), machine.tsp % RPN_STACK_CELLS
        base = machine.sbp if name == "sbp" else machine.tsp + 1
        if (base + distance) % RPN_STACK_CELLS == position:
            raise TypeError
        RULES[f"push {name}"](machine, 0)

    return rule


def _restore_tsp(machine: Machine) -> None:
    position = machine.tsp % RPN_STACK_CELLS
    RULES["restore tsp"](machine, 0)
    machine.cells[position] = UNSPECIFIED  # popped, also where TSP goes down


def _log(machine: Machine) -> None:
    """Log, and forget all cells where so many were popped that the stack pointer came around again."""
    count = machine.peek()
    try:
        RULES["log"](machine, 0)
    finally:
        if count >= RPN_STACK_CELLS:
            machine.cells[:] = [UNSPECIFIED] * RPN_STACK_CELLS


_SPOILED = b"\xa5"
_STRICT: dict[Rule, Callable[[Machine], None]] = {
    RULES["log"]: _log,
    RULES["log mrf"]: _spoils(RULES["log mrf"], always=False),
    RULES["log str"]: _spoils(RULES["log str"], always=True),
    RULES["restore tsp"]: _restore_tsp,
    RULES["push sbp"]: _push_relative("sbp"),
    RULES["push tsp"]: _push_relative("tsp"),
}
"""What takes the place of rules behind which something is not specified: bytes are others than the usual ones."""


class Forgetting(Steps):
    """Let every instruction forget the cells that it popped, and spoil bytes that may be any."""

    def __missing__(self, offset: int) -> Step:
        rule, operand, end = super().__missing__(offset)

        def forgetting(machine: Machine, operand: object) -> None:
            before = machine.tsp
            try:
                strict = _STRICT.get(rule)
                if strict is not None:
                    strict(machine)
                else:
                    rule(machine, operand)
            finally:
                popped = max(0, signed((machine.tsp - before) & machine.mask, machine.bits))
                for position in range(before, before + min(popped, RPN_STACK_CELLS)):
                    machine.cells[position % RPN_STACK_CELLS] = UNSPECIFIED

        self[offset] = forgetting, operand, end
        return self[offset]


def specified_results(image: CodeImage, target: Architecture, hits: list[Hit], context: FakeContext) -> Result | None:
    """Return what must come of some hits; None if one reads a cell that it has popped."""
    interpreter = Interpreter(image, target)
    interpreter.steps = Forgetting(image, target)
    found: Result = []
    for hit in hits:
        try:
            found += results(interpreter, [hit], context)
        except TypeError:
            return None
    return found
