"""
Which engine a run takes where that is left to dprobes.

The cheapest engine that can do all that is asked for. The others are named by their rows in the registry only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.registry import candidates
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.engines.capabilities import Requirement
    from dprobes.engines.interface import Scope
    from dprobes.engines.registry import Candidacy, EngineRow, KernelSupport

__all__ = ["Choice", "choose"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of an engine, and why it was taken."""

    engine: str
    reason: str


def choose(
    scope: Scope,
    needs: Iterable[Requirement],
    support: Callable[[EngineRow], KernelSupport],
    *,
    traced_by: str | None = None,
) -> Choice:
    """
    Return the engine for a scope and what a program needs; ``support`` is asked only if it matters.

    ``traced_by`` names the process that traces the target already, which keeps tracers away from it.
    """
    needed = list(needs)
    chosen, *others = candidates()
    reason = _candidacy(chosen).usual_reason
    for other in others:
        reason_against = _reason_against(chosen, other, scope, needed, support, traced_by)
        chosen, reason = (other, reason_against[1]) if reason_against[0] else (chosen, reason_against[1])
    return Choice(chosen.name, reason)


def _reason_against(
    row: EngineRow,
    other: EngineRow,
    scope: Scope,
    needs: Sequence[Requirement],
    support: Callable[[EngineRow], KernelSupport],
    traced_by: str | None,
) -> tuple[bool, str]:
    """Return whether a more expensive engine is to take the place of another one, and why or why not."""
    mine, others = _candidacy(row), _candidacy(other)
    if scope.kind not in other.scopes:
        return False, mine.scope_reason
    for need in needs:
        if need.capability not in other.capabilities and need.capability in row.capabilities | mine.found_by_trying:
            return False, f"'{need.what}' needs {need.capability.value}, which the {other.name} engine lacks"
    if traced_by is not None and other.is_tracer:
        return False, f"the process is traced by {traced_by} already"
    for need in needs:
        if need.capability in others.better_at:
            return True, f"'{need.what}' {others.better_at[need.capability]}"
    for need in needs:
        if need.capability not in row.capabilities and not (
            need.capability in mine.found_by_trying and need.capability in support(row).capabilities
        ):
            return True, f"'{need.what}' needs {need.capability.value}, which the {row.name} engine lacks"
    if (problem := support(row).problem) is not None:
        return True, f"the {row.name} engine cannot work here: {problem}"
    if (problem := support(row).tree_problem) is not None:
        return True, f"the {row.name} engine cannot follow processes here: {problem}"
    return False, mine.usual_reason


def _candidacy(row: EngineRow) -> Candidacy:
    assert row.candidacy is not None, "auto chooses from candidates"
    return row.candidacy
