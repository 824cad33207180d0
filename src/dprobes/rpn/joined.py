"""Programs for several modules that were written as one, as one program for people."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.program import Program

__all__ = ["joined_program"]


def joined_program(programs: Sequence[Program]) -> Program:
    """Return a program with the definitions of all: its probepoints are in several modules."""
    first, *others = programs
    if not others:
        return first
    return replace(first, definitions=tuple(each for program in programs for each in program.definitions))
