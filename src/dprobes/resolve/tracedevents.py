"""The tracepoints and system calls of a program, as the running kernel has them, with the ways to their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import ProbeKind, Probepoint
from dprobes.rpn.needs import traced_fields
from dprobes.rpn.program import Tracepoint

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import ProbeDefinition, Program
    from dprobes.target.kernel.tracedfields import TracedEvent
    from dprobes.target.kernel.tracepoints import KernelTracepoints

__all__ = ["resolve_tracepoints"]


def resolve_tracepoints(program: Program, path: str, diagnostics: Diagnostics) -> tuple[Probepoint, ...]:
    """Return the tracepoints of a program; add an error for each that the running kernel lacks, or a field of it."""
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
    """Return a tracepoint with the fields that it has of those that a handler names; the others are errors."""
    from dprobes.target.kernel.tracepoints import FieldError

    places = {str(each.operand): each.operand_place for each in reversed(traced_fields(program, definition))}
    while True:
        try:
            if location.is_system_call:
                return known.find_system_call(location.name, places, at_return=definition.at_return)
            return known.find(location.subsystem, location.name, places)
        except FieldError as error:
            diagnostics.error(places.pop(error.field), error.message, hint=error.hint)
