"""Choice of the engine of a run: the named one, or the engine that ``auto`` chooses for the probe program."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Severity
from dprobes.engines.engine_capabilities import Capability, requirements
from dprobes.engines.engine_interface import ScopeKind
from dprobes.engines.engine_registry import AUTO, TOOL, candidates, engine_row, faster_row, rows
from dprobes.errors import NotSupportedError, PrivilegeError, SourceError
from dprobes.platform.linux.procfs import process_field
from dprobes.resolve.probepoints import Space, space_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.engine_capabilities import Requirement
    from dprobes.engines.engine_interface import Engine, EngineOptions, Job, Plan, Scope
    from dprobes.engines.engine_registry import Candidacy, EngineRow, KernelSupport
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.running_kernel import RunningKernel

__all__ = ["Choice", "Selection", "choose", "note_unsupported", "obstacle", "refuse_unsupported", "scope_problem"]

# Automatic choice of the engine: of the engines with all required capabilities, that with the cheapest hits, unless a
# more expensive engine is better at a required capability (``Candidacy.better_at``).
#
# Engines are named only by their rows in the registry.


class Choice(NamedTuple):
    """Name of an engine, and the reason for its choice."""

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
    Return the engine for a scope and the needs of a program.

    ``support`` is called only if the choice depends on it. ``traced_by`` is the name of the process that already traces
    the target, which excludes tracers, or None.
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
    """Return whether the more expensive engine ``other`` must replace ``row``, and the reason for the decision."""
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


def scope_problem(name: str, scope: Scope, options: EngineOptions) -> str | None:
    """Return the reason why the engine called ``name`` cannot probe a scope with these options, or None if it can."""
    asked = candidates() if name == AUTO else (engine_row(name),)
    if not any(scope.kind in row.scopes for row in asked):
        return _scope_refusal(name, asked, scope)
    if name != AUTO:
        for row in rows():
            for option, written in row.demands.items():
                if row.name != name and options.own.get(option):
                    return f"{written} needs --engine {row.usage}"
    return None


def _scope_refusal(name: str, asked: tuple[EngineRow, ...], scope: Scope) -> str:
    able = [row.usage for row in rows() if scope.kind in row.scopes]
    if name == AUTO:
        known = f"use --engine {able[0]}" if able else "none of this version can"
        return f"no engine that auto chooses from can probe {scope.kind.value}; {known}"
    (row,) = asked
    if row.argument is not None:
        return f"the {name} engine probes what --engine {row.usage} names, not {scope.kind.value}"
    if row.scopes == {ScopeKind.TREE} and scope.kind in (ScopeKind.EVERYWHERE, ScopeKind.CGROUP, ScopeKind.USER):
        ways = "a command (-c COMMAND) or a process (-p PID)"
        return f"the {name} engine needs {ways}; other scopes need --engine {able[0]}"
    known = f"--engine {able[0]} can" if able else "none of this version can"
    return f"the {name} engine cannot probe {scope.kind.value}; {known}"


def refuse_unsupported(
    needs: Iterable[Requirement], row: EngineRow, diagnostics: Diagnostics, engine: Engine | None = None
) -> None:
    """
    Add an error for each need that the engine of ``row`` does not meet, with the name of an engine that does.

    ``engine``, if it exists, may have capabilities in addition to those of its row.
    """
    for requirement in needs:
        capability = requirement.capability
        if capability in row.capabilities or (engine is not None and capability in engine.found_capabilities):
            continue
        able = [other for other in _able(capability) if other is not row]
        # The obstacle on this machine is more useful to the user than an engine for other machines.
        here = [other.how_to_ask for other in able if other.scopes != {ScopeKind.ENDPOINT}]
        elsewhere = [other.how_to_ask for other in able if other.scopes == {ScopeKind.ENDPOINT}]
        hint = next(filter(None, (*here, requirement.hurdle, *elsewhere)), "no engine of this version provides that")
        diagnostics.error(
            requirement.span,
            f"'{requirement.what}' needs {requirement.capability.value}, which the {row.name} engine lacks",
            hint=hint,
        )


def obstacle(row: EngineRow, needs: Iterable[Requirement], support: KernelSupport) -> str | None:
    """Return the reason why an engine cannot run programs with these needs on this machine, or None if it can."""
    if support.problem is not None:
        return f"{support.problem}; {support.remedy}" if support.remedy is not None else support.problem
    for need in needs:
        if need.capability not in row.capabilities and need.capability not in support.capabilities:
            return f"'{need.what}' needs {need.capability.value}" + (f"; {need.hurdle}" if need.hurdle else "")
    return None


def note_unsupported(compiled: ResolvedProgram) -> None:
    """Add a note for each capability that the program needs and no engine has."""
    for requirement in requirements(compiled.program, compiled.architecture):
        if not _able(requirement.capability):
            compiled.diagnostics.note(
                requirement.span,
                f"'{requirement.what}' needs {requirement.capability.value}, which no engine of this version has",
                hint=requirement.hurdle,
            )


def _able(capability: Capability) -> list[EngineRow]:
    """Return the engines that messages may suggest to a user who needs a capability."""
    return [row for row in rows() if row.how_to_ask is not None and capability in _possible(row)]


def _possible(row: EngineRow) -> frozenset[Capability]:
    """Return the capabilities of an engine's row, and those that it has only on some kernels."""
    return row.capabilities | (row.candidacy.found_by_trying if row.candidacy is not None else frozenset())


class Selection:
    """
    Selection of the engine of a run, in two steps.

    ``choose`` is called when the program and its processor are known, and adds errors for missing capabilities.
    ``settle`` is called when the offsets of the probepoints are known; ``auto`` may then choose another engine.
    """

    def __init__(self, name: str, scope: Scope, options: EngineOptions) -> None:
        self._name = name
        self._scope = scope
        self._options = options
        self._needs: tuple[Requirement, ...] = ()
        self._choice: Choice | None = None
        self._engine: Engine | None = None
        self._is_in_kernel = False

    def choose(self, program: Program, architecture: Architecture, diagnostics: Diagnostics) -> bool:
        """
        Choose the engine for a program, and add an error for each need that it does not meet.

        Return whether it can watch writes without debug registers.
        """
        if not program.definitions:  # a program of blocks alone needs no engine that probes
            self._engine = TOOL.make(self._options, self._scope)
            return False
        name = self._name
        self._needs = tuple(requirements(program, architecture))
        if name == AUTO:
            self._choice = choose(self._scope, self._needs, self._support, traced_by=self._traced_by())
            name = self._choice.engine
        row = engine_row(name)
        if self._engine is None:
            self._engine = row.make(self._options, self._scope)
        self._is_in_kernel = space_of(program) is Space.KERNEL
        if self._is_in_kernel and all(need.capability in _possible(row) for need in self._needs):
            # The engine's capabilities in the kernel are found by trial, and the kernel's layout is read from its
            # files. Both may fail for lack of privileges, which this checks.
            self._check(self._engine)
        refuse_unsupported(self._needs, row, diagnostics, self._engine)
        return Capability.PAGE_WATCHPOINT in row.capabilities

    def visit_kernel(self, program: Program) -> AbstractContextManager[RunningKernel] | None:
        """Return a context manager that yields the kernel of the chosen engine's target, or None for this machine's."""
        return None if self._engine is None else self._engine.visit_kernel(program)

    def visit_processor(self, program: Program) -> AbstractContextManager[Architecture | None] | None:
        """
        Return a context manager that yields the processor of a kernel program's target, or None for this machine's.

        Call this before ``choose``, because the needs depend on the processor.
        """
        if self._name == AUTO:
            return None
        self._engine = engine_row(self._name).make(self._options, self._scope)
        return self._engine.visit_processor(program)

    @property
    def reason(self) -> str | None:
        """The reason for the choice of ``auto``, or None if the engine was named."""
        return self._choice.reason if self._choice is not None else None

    def settle(self, job: Job) -> Plan:
        """Return the plan of the chosen engine or its replacement; raise ``DprobesError`` if none can serve the job."""
        plan = self._possible_plan(job)
        # Programs that may be replaced use breakpoints, whose replacement is better tested.
        faster = None if self._choice is None or self._options.replaceable else faster_row(plan.engine.name)
        if self._choice is None or faster is None or not self._can(faster) or not faster.speeds_up(job.compiled):
            return plan

        assert faster.speedup is not None
        self._choice = Choice(faster.name, f"{self._choice.reason}; {faster.speedup.reason}")
        return faster.make(self._options, self._scope).plan(job)

    def _possible_plan(self, job: Job) -> Plan:
        engine, compiled = self._engine, job.compiled
        assert engine is not None, "the program has not been compiled with this selection"
        self._check(engine)
        fallback = None if compiled.everywhere else self._fallback(engine)
        if fallback is None:
            return engine.plan(job)
        reason = f"there is no module '{compiled.program.name}' on this machine yet"
        if compiled.resolved is not None:
            reason = engine.drawback(job) or ""
        if not reason:
            try:
                return engine.plan(job)
            except SourceError as error:
                reason = next(d for d in error.diagnostics if d.severity is Severity.ERROR).message
        self._choice = Choice(fallback.name, reason)
        return fallback.make(self._options, self._scope).plan(job)

    def _check(self, engine: Engine) -> None:
        """
        Raise ``DprobesError`` if an engine cannot work on this machine.

        If ``auto`` chose the engine, the hint names another engine. Kernel programs have no other engine.
        """
        try:
            engine.check(self._scope, self._options)
        except PrivilegeError as error:
            if self._choice is None or error.hint is None or self._is_in_kernel:
                raise
            raise PrivilegeError(error.message, hint=f"{error.hint}; {self._offer(engine)}") from None
        except NotSupportedError as error:
            remedy = self._support(engine_row(engine.name)).tree_remedy
            if not self._is_in_kernel or remedy is None:
                raise
            raise NotSupportedError(error.message, hint=f"leave out -c and -p, or use {remedy}") from None

    def _offer(self, engine: Engine) -> str:
        """
        Return advice for a user who lacks the privileges that ``engine`` needs: how to use another engine.

        If no engine that needs no privileges can run the program, the advice names the capability that they lack.
        """
        others = [row for row in candidates() if row.name != engine.name and row.candidacy and row.candidacy.offer]
        lacks = [need.capability for need in self._needs if not any(need.capability in o.capabilities for o in others)]
        if others and not lacks:
            assert others[0].candidacy is not None
            return others[0].candidacy.offer
        offer = f"no engine that needs neither has {lacks[0].value}" if lacks else "no other engine is there"
        if lacks and lacks[0] in (Capability.SAMPLER, Capability.COUNTER_SAMPLER):
            offer += "; probes on functions need neither, and 'perf record -p PID' samples your own processes"
        return offer

    def _fallback(self, engine: Engine) -> EngineRow | None:
        """Return a more expensive engine that can replace ``auto``'s choice, or None."""
        if self._choice is None:
            return None
        weighed = candidates()
        for row in weighed[weighed.index(engine_row(engine.name)) + 1 :]:
            if self._can(row) and not (row.is_tracer and self._traced_by() is not None):
                return row
        return None

    def _can(self, row: EngineRow) -> bool:
        """Return whether the engine of a row has all capabilities that the program needs, and accepts the scope."""
        return all(need.capability in row.capabilities for need in self._needs) and self._scope.kind in row.scopes

    def _traced_by(self) -> str | None:
        if self._scope.pid is None or self._options.traces_already:
            return None
        tracer = int(process_field(self._scope.pid, "TracerPid") or 0)
        if not tracer or tracer in self._options.tracers:
            return None
        return f"process {tracer} ({process_field(tracer, 'Name')})"

    def _support(self, row: EngineRow) -> KernelSupport:
        return row.support(self._options.knowledge)
