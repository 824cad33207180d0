"""
The overhead that a run may have, as a share of a CPU: what users say, and what holds if they say nothing.

How it is kept is the business of ``overload``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import ScopeKind
from dprobes.errors import EngineError
from dprobes.resolve.probed_space import Space, space_of

if TYPE_CHECKING:
    from dprobes.engines.engine_interface import Scope
    from dprobes.rpn.rpn_program import Program

__all__ = ["DEFAULT_OVERHEAD", "UNLIMITED", "budget_of", "check_overhead", "overhead_of"]

DEFAULT_OVERHEAD = 25.0
"""
Percent of a CPU that hits may take where nobody has chosen who is hit.

At half a microsecond a hit that are half a million hits a second on each CPU, at twelve (single-stepped instructions)
20 000.
"""

UNLIMITED = 0.0
"""What stands for an overhead without a limit."""

_WORDS = ("off", "none")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


def overhead_of(text: str) -> float:
    """Return the percentage that a user writes, as in "10%"; raise ``EngineError`` if it is none."""
    if text in _WORDS:
        return UNLIMITED
    found = _PERCENT.fullmatch(text.strip())
    return check_overhead(float(found[1]) if found else -1.0, text)


def check_overhead(percent: float, shown: object = None) -> float:
    """Return a percentage; raise ``EngineError`` if hits cannot take so much of a CPU."""
    if percent != UNLIMITED and not 0 < percent <= 100:
        raise EngineError(
            f"an overhead is more than 0 and at most 100 percent of a CPU, not '{percent if shown is None else shown}'",
            hint="write it as 10% or 10; 'off' is for no limit",
        )
    return percent


def budget_of(overhead: float | None, scope: Scope, program: Program) -> float | None:
    """Return the share of a CPU (1: all of it) that hits of a program may take; None if there is no limit."""
    if overhead is None:
        is_guarded = scope.kind is ScopeKind.EVERYWHERE or space_of(program) is Space.KERNEL
        overhead = DEFAULT_OVERHEAD if is_guarded else UNLIMITED
    return overhead / 100 if overhead != UNLIMITED else None
