"""The templates: what each row of the instruction table becomes, a module for each kind of row."""

from __future__ import annotations

from dprobes.bpf.lower.rows import (
    arithmetic,
    flow,
    heap,
    log,
    logmemory,
    matches,
    stack,
    tables,
    trace,
    usdt,
    variables,
    world,
)

__all__ = ["ROW_TEMPLATES"]

ROW_TEMPLATES = {
    **flow.TEMPLATES,
    **arithmetic.TEMPLATES,
    **stack.TEMPLATES,
    **variables.TEMPLATES,
    **world.TEMPLATES,
    **usdt.TEMPLATES,
    **log.TEMPLATES,
    **logmemory.TEMPLATES,
    **matches.TEMPLATES,
    **trace.TEMPLATES,
    **heap.TEMPLATES,
    **tables.TEMPLATES,
}
"""The templates by the syntax of rows; those of calls of extensions are the composer's."""
