"""Whether the engine is of use to a program: one handler at least can run in the process, as far as its file shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower import is_supported
from dprobes.engines.inline.eligibility import Eligibility, obstacle_to_module, obstacle_to_program
from dprobes.engines.inline.pieces import ABILITIES
from dprobes.rpn.needs import executed_instructions

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.resolve.localmodule import Compiled
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["obstacle_to_all"]


def obstacle_to_all(compiled: Compiled) -> str | None:
    """Return why all handlers of a program stay with breakpoints, None if one does not."""
    program, resolved = compiled.program, compiled.resolved
    if resolved is None:
        return "nothing is known of its module"
    architecture = resolved.architecture
    whole = obstacle_to_program(program) or obstacle_to_module(architecture)
    if whole is not None:
        return whole
    eligibility = Eligibility(program)
    reason = "it has no probepoint"
    for probe in resolved.probepoints:
        found = eligibility.obstacle_to(probe) or _what_is_missing(program, probe.definition, architecture)
        if found is None:
            return None
        reason = found
    return reason


def _what_is_missing(program: Program, definition: ProbeDefinition, architecture: Architecture) -> str | None:
    for instruction in executed_instructions(program, definition):
        operand = instruction.operand
        register = architecture.register(operand) if isinstance(operand, str) else None
        if not is_supported(instruction.row, register, ABILITIES):
            return f"handlers in the process have no '{instruction.row.syntax}'"
    return None
