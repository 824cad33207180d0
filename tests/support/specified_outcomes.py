"""
The specified part of a program's behaviour.

Not specified are the value of a popped cell, and the bytes after LP in the log buffer after a string or a failed log
instruction. A run with such cells and bytes replaced detects programs that depend on them. Cells that were never
written are 0.
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
    """Run hits one after the other; return the outcome of each, and the state of the context after it."""
    found = []
    for start, point in hits:
        outcome = runner.run(start, point, context)
        world = {name: repr(value) for name, value in vars(context).items() if name != "architecture"}
        found.append((outcome, world))
    return found


class Unspecified:
    """The value of a popped cell: any use of it raises TypeError."""

    def __bool__(self) -> bool:
        raise TypeError

    def __getattr__(self, name: str) -> object:
        raise TypeError

    def __eq__(self, other: object) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]


UNSPECIFIED = cast("int", Unspecified())


def _spoils(rule: Rule, *, always: bool) -> Callable[[Machine], None]:
    """Return a log instruction's rule that also overwrites the bytes after LP: ``always``, or if the rule fails."""

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
    """Execute ``log``, and mark all cells as popped if the stack pointer has wrapped around."""
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
"""Replacements of rules that leave something unspecified: they write other bytes than the interpreter."""


class Forgetting(Steps):
    """Steps of the interpreter that mark popped cells, and overwrite log bytes that are not specified."""

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
    """Return the specified results of hits; None if one of them depends on a cell that it has popped."""
    interpreter = Interpreter(image, target)
    interpreter.steps = Forgetting(image, target)
    found: Result = []
    for hit in hits:
        try:
            found += results(interpreter, [hit], context)
        except TypeError:
            return None
    return found
