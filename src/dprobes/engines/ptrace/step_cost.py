"""Cost of a hit at an instruction, shown to users who choose a place."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import PlaceNote
from dprobes.platform.x86.instruction_emulation import Action, is_emulated, plan
from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.target.code.machine_code import is_x86

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = ["Execution", "execution_of"]


class Execution(enum.Enum):
    """Way in which a probed instruction is executed. The value completes "it is executed ..."."""

    EMULATED = "by the tracer (emulated)"
    RUN_ON = "out of line, mostly without a stop after it"
    STOPPED = "out of line, with a stop after it"
    IN_PLACE = "in place, with all other threads stopped"

    @property
    def is_cheap(self) -> bool:
        """True if a hit stops the thread only once."""
        return self in (Execution.EMULATED, Execution.RUN_ON)


def execution_of(raw: bytes, word_size: int) -> Execution:
    """Return how the instruction with the bytes ``raw`` is executed if memory for an out-of-line slot is available."""
    emulation = plan(raw, word_size)
    if is_emulated(emulation):
        return Execution.EMULATED
    copy = copy_of(raw, word_size)
    if copy is None:
        return Execution.IN_PLACE
    runs_on = (copy.cannot_fault or copy.leads_on) and emulation[0] == Action.STEP
    return Execution.RUN_ON if runs_on else Execution.STOPPED


def place_notes(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceNote]:
    """Iterate over notes on how instructions of a module are executed; there are none for processors other than x86."""
    if not is_x86(module):
        return
    for instruction in instructions:
        execution = execution_of(instruction.raw, module.word_size)
        advice = ": a hit stops the thread once."
        if not execution.is_cheap:
            advice = "; a hit at an instruction marked '+' near it costs less."
        yield PlaceNote(f"executed {execution.value}", advice, execution.is_cheap)
