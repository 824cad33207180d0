"""
The watchpoints, samplers and tracepoints of a program, which leave the code unchanged.

A symbol stands for a link address, which has another run-time address in each process; a number is a run-time address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.arch.x86_processors import WATCHPOINT_LENGTHS, WATCHPOINTS
from dprobes.diagnostics import Note
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import ProbeKind, Probepoint, ProbeState, WatchedMemory
from dprobes.rpn.program_needs import traced_fields
from dprobes.rpn.rpn_program import Access, Address, Expression, Sampler, Tracepoint

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import SymbolSpace
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.source_text import Span
    from dprobes.target.kernel.traced_fields import TracedEvent
    from dprobes.target.kernel.tracepoints import KernelTracepoints

__all__ = ["PAGES_LENGTH_MAX", "length_problem", "resolve_samplers", "resolve_tracepoints", "resolve_watchpoints"]


PAGES_LENGTH_MAX = 10_000
"""Maximum length in bytes of a watchpoint on protected pages."""


def resolve_samplers(program: Program, path: str) -> tuple[Probepoint, ...]:
    """
    Return the samplers of a program.

    Hits are in the code of the file at ``path``, or anywhere if that is ANYWHERE.
    """
    return tuple(
        Probepoint(
            ProbeKind.SAMPLER,
            number,
            definition,
            path,
            str(definition.location),
            definition.location,
        )
        for number, definition in enumerate(program.definitions)
        if isinstance(definition.location, Sampler)
    )


def length_problem(access: Access, address: int, length: int) -> str | None:
    """Return the reason why the processor cannot watch ``length`` bytes at ``address``, or None if it can."""
    if access is Access.EXECUTE:
        return None if length == 1 else "an execute watchpoint is one byte long, the first one of the instruction"
    if length not in WATCHPOINT_LENGTHS:
        return "the processor watches 1, 2, 4 or 8 bytes"
    if address % length:
        return f"the processor watches {length} bytes only at multiples of {length}"
    return None


def resolve_watchpoints(
    program: Program,
    space: SymbolSpace,
    diagnostics: Diagnostics,
    most: int = WATCHPOINTS,
    *,
    by_pages: bool = False,
) -> tuple[Probepoint, ...]:
    """
    Return the watchpoints of a program on memory; more than ``most`` are refused. Errors are added to ``diagnostics``.

    With ``by_pages`` the engine can watch writes without debug registers, any number and up to PAGES_LENGTH_MAX bytes.
    """
    found: list[Probepoint] = []
    for number, definition in enumerate(program.definitions):
        if definition.watchpoint is None or definition.watches_ports:
            continue
        if isinstance(definition.location, Address):
            resolver = _Resolver(space, definition, definition.watchpoint, definition.location, diagnostics, most)
            resolver.pages_exist = by_pages
            resolver.by_pages = by_pages and definition.watchpoint is Access.WRITE
            if (watchpoint := resolver.watchpoint(number, found)) is not None:
                found.append(watchpoint)
    return tuple(found)


@dataclass(slots=True)
class _Resolver:
    space: SymbolSpace
    definition: ProbeDefinition
    access: Access
    location: Address
    diagnostics: Diagnostics
    most: int
    pages_exist: bool = False
    """True if watchpoints for writes need no debug registers."""
    by_pages: bool = False
    """True if this one needs none."""

    @property
    def _span(self) -> Span | None:
        return self.definition.span("address")

    @property
    def _movable(self) -> Access | None:
        """Accesses whose watchpoints can use protected pages instead of debug registers; None without such pages."""
        return Access.WRITE if self.pages_exist else None

    def watchpoint(self, number: int, earlier: list[Probepoint]) -> Probepoint | None:
        low, high = self.location.low, self.location.high
        try:
            address = self._value(low)
            length = 1 if high is None else self._value(high) - address + 1
        except TargetError as error:
            self.diagnostics.error(self._span, error.message, hint=error.hint)
            return None
        absolute = low.symbol is None
        if high is not None and absolute != (high.symbol is None):
            self.diagnostics.error(
                self._span,
                "one of the addresses is a number, the other one a symbol of the module",
                hint="a number is an address in the process; a symbol has another address in each process",
            )
            return None
        if length < 1:
            self.diagnostics.error(self._span, "the upper address is below the lower one")
            return None
        if address < 0 or address + length > 1 << 8 * self.space.word_size:
            self.diagnostics.error(self._span, f"'{self.space.path}' can have no address {address:#x}")
            return None
        watchpoint = Probepoint(
            ProbeKind.WATCHPOINT,
            number,
            self.definition,
            str(self.space.path),
            str(low).replace(" ", ""),
            WatchedMemory(address, length, absolute, self.access),
            self._state(low, address, length, earlier),
        )
        self._check_unique(watchpoint, earlier)
        return watchpoint

    def _value(self, expression: Expression) -> int:
        if expression.symbol is None:
            return expression.addend
        return self.space.address_of(expression.symbol) + expression.addend

    def _state(self, low: Expression, address: int, length: int, earlier: list[Probepoint]) -> ProbeState:
        if self.by_pages:
            if length <= PAGES_LENGTH_MAX:
                return ProbeState.COMPILED
            state = ProbeState.WATCHPOINT_LEN_INVALID
            reason = f"{length} bytes at {address:#x}, but protected pages watch at most {PAGES_LENGTH_MAX} bytes"
            hint = f"write 'address = {low} : {Expression(low.addend + PAGES_LENGTH_MAX - 1, low.symbol)}'"
            self.diagnostics.warning(self._span, state.line(reason), hint=hint)
            return state
        problem = length_problem(self.access, address, length)
        if problem is not None:
            state = ProbeState.WATCHPOINT_LEN_INVALID
            count = f"{length} byte{'s' if length != 1 else ''}"
            hint = f"write '{_suggestion(self.access, low, address, length)}'"
            self.diagnostics.warning(self._span, state.line(f"{count} at {address:#x}, but {problem}"), hint=hint)
            return state
        taken = sum(other.state is ProbeState.COMPILED for other in earlier if other.memory.access is not self._movable)
        if taken >= self.most:
            state = ProbeState.DEBUGREG_UNAVAIL
            before = f"{self.most} watchpoints come before this one"
            reason = f"the processor has {self.most} debug registers, and {before}"
            self.diagnostics.warning(self._span, state.line(reason))
            return state
        return ProbeState.COMPILED

    def _check_unique(self, watchpoint: Probepoint, earlier: list[Probepoint]) -> None:
        for other in earlier:
            if other.memory == watchpoint.memory:
                self.diagnostics.error(
                    self._span,
                    f"two watchpoints of the same kind at address {watchpoint.memory.address:#x}",
                    notes=(Note("the first one is here", other.definition.span("address")),),
                )
                return


def _suggestion(access: Access, low: Expression, address: int, length: int) -> str:
    """
    Return the statement for a range that the processor can watch, the widest one at or around ``address``.

    ``access`` and ``length`` are those requested, ``low`` the expression of the address as it is written.
    """
    if access is Access.EXECUTE:
        return f"address = {low}"
    # The smallest block that contains the range, or the widest one with the same start.
    for size in WATCHPOINT_LENGTHS:
        start = address // size * size
        if start + size >= address + length:
            break
    else:
        size = max(n for n in WATCHPOINT_LENGTHS if address % n == 0)
        start = address
    first = Expression(low.addend + start - address, low.symbol)
    last = Expression(first.addend + size - 1, low.symbol)
    return f"address = {first}" if size == 1 else f"address = {first} : {last}"


def resolve_tracepoints(program: Program, path: str, diagnostics: Diagnostics) -> tuple[Probepoint, ...]:
    """Return the tracepoints of a program; add an error for each that the kernel lacks, and for each missing field."""
    if not any(isinstance(definition.location, Tracepoint) for definition in program.definitions):
        return ()
    from dprobes.target.kernel.tracepoints import KernelTracepoints

    known = KernelTracepoints()
    found: dict[tuple[Tracepoint, bool], Probepoint] = {}
    for number, definition in enumerate(program.definitions):
        location = definition.location
        if not isinstance(location, Tracepoint):
            continue
        if (other := found.get((location, definition.at_return))) is not None:
            notes = (Note("the first one is here", other.definition.span("offset")),)
            diagnostics.error(definition.span("offset"), f"two probe definitions at {location}", notes=notes)
            continue
        try:
            event = _find(known, program, definition, location, diagnostics)
        except TargetError as error:
            diagnostics.error(definition.span("offset"), error.message, hint=error.hint)
            continue
        probe = Probepoint(ProbeKind.TRACEPOINT, number, definition, path, str(location), event)
        found[location, definition.at_return] = probe
    return tuple(found.values())


def _find(
    known: KernelTracepoints,
    program: Program,
    definition: ProbeDefinition,
    location: Tracepoint,
    diagnostics: Diagnostics,
) -> TracedEvent:
    """Return a tracepoint with the fields of a handler that exist; add an error for each missing field."""
    from dprobes.target.kernel.tracepoints import FieldError

    places = {str(each.operand): each.operand_place for each in reversed(traced_fields(program, definition))}
    while True:
        try:
            if location.is_system_call:
                return known.find_system_call(location.name, places, at_return=definition.at_return)
            return known.find(location.subsystem, location.name, places)
        except FieldError as error:
            diagnostics.error(places.pop(error.field), error.message, hint=error.hint)
