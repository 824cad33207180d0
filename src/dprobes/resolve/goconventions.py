"""
Whose arguments handlers see in a Go program: ``arg0`` and so on are registers of Go's there, and of C's in what is C.

Where a function takes its arguments in no register, a handler that asks for one is refused, or a match left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.isa import OperandKind
from dprobes.rpn.needs import executed_instructions
from dprobes.rpn.program import MANY_PLACES
from dprobes.target.gobinary import Convention, convention_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Instruction, ProbeDefinition, Program
    from dprobes.target.location import Module

__all__ = ["GoConventions"]

_ARGUMENT = lazy_pattern(r"arg\d+")

_STACK_HINT = "push what is on the stack: 'push r, sp', 'push 8', 'add', 'push mem, u64' is the first word there"


class GoConventions:
    """The conventions of the functions that a program probes; ``is_go`` says whether the module is one of Go."""

    def __init__(self, program: Program, *, is_go: bool) -> None:
        self._program = program
        self._is_go = is_go

    @property
    def moves_stacks(self) -> bool:
        """Whether a function may be on another stack when it returns than at its entry."""
        return self._is_go

    def reason_against(self, definition: ProbeDefinition, function: str) -> str | None:
        """Return why a match of a pattern is not for a handler that asks for arguments; None if it is."""
        if not self._is_go or not self._asked(definition):
            return None
        match convention_of(function):
            case Convention.GO:
                return None
            case Convention.ABI0:
                return "it has its arguments on the stack (Go's ABI0)"
            case Convention.C:
                return "it is a function of C, and the pattern's other arguments are in Go's registers"

    def definitions_of_c(
        self, module: Module, probes: Iterable[Probepoint], diagnostics: Diagnostics
    ) -> frozenset[int]:
        """Return the definitions whose handlers see the arguments of C; add errors for those on Go's stack."""
        found: set[int] = set()
        for probe in probes if self._is_go else ():
            definition = probe.definition
            if isinstance(definition.location, MANY_PLACES):
                continue
            symbol = module.symbol_at(probe.offset)
            asked = self._asked(definition)
            match convention_of(symbol[0] if symbol is not None else None):
                case Convention.C:
                    found.add(probe.number)
                    self._refuse_procedures(definition, asked, probe.where, diagnostics)
                case Convention.ABI0:
                    for instruction in asked[:1]:
                        diagnostics.error(
                            instruction.operand_place,
                            f"'{probe.where}' takes its arguments on the stack (Go's ABI0), not in registers",
                            hint=_STACK_HINT,
                        )
                case Convention.GO:
                    pass
        return frozenset(found)

    def _asked(self, definition: ProbeDefinition) -> list[Instruction]:
        """Return the instructions with arguments by their numbers that a handler executes."""
        return [
            each
            for each in executed_instructions(self._program, definition)
            if each.row.operand_kind is OperandKind.REGISTER and _ARGUMENT.fullmatch(str(each.operand))
        ]

    def _refuse_procedures(
        self, definition: ProbeDefinition, asked: list[Instruction], where: str, diagnostics: Diagnostics
    ) -> None:
        for instruction in asked:
            if not any(instruction is own for own in definition.handler.instructions):
                diagnostics.error(
                    instruction.operand_place,
                    f"'{instruction.operand}' in a procedure is an argument of Go, and '{where}' is a function of C",
                    hint="push the argument in the handler, and let the procedure take it from the stack",
                )
                return
