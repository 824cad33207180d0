"""The probepoints whose breakpoints may stand at a cheaper instruction beside the one that is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.resolve.probepoints import ProbeKind
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.program import Expression, Glob, Offset

if TYPE_CHECKING:
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule

__all__ = ["movable_probes"]


def movable_probes(resolved: ResolvedModule) -> list[Probepoint]:
    """Return the probepoints whose breakpoints may stand at a neighbouring instruction, if that is cheaper."""
    breakpoints = resolved.of(ProbeKind.BREAKPOINT)
    return [probe for probe in breakpoints if probe.state is ProbeState.COMPILED and _is_named(probe)]


def _is_named(probe: Probepoint) -> bool:
    """Return whether the place was written as the name of a function, without a distance or a number."""
    match probe.definition.location:
        case Glob() | Offset(Expression(0, str())):
            return True
    return False
