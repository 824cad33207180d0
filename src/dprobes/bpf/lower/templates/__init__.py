"""The templates of the rows of the instruction table, a module for each kind of rows."""

from __future__ import annotations

from dprobes.bpf.lower.templates.arithmetic_templates import ARITHMETIC_TEMPLATES, STACK_TEMPLATES
from dprobes.bpf.lower.templates.flow_templates import FLOW_TEMPLATES
from dprobes.bpf.lower.templates.log_templates import LOG_MEMORY_TEMPLATES, LOG_TEMPLATES
from dprobes.bpf.lower.templates.table_templates import TABLE_TEMPLATES
from dprobes.bpf.lower.templates.variable_templates import HEAP_TEMPLATES, VARIABLE_TEMPLATES
from dprobes.bpf.lower.templates.world_templates import MATCH_TEMPLATES, USDT_TEMPLATES, WORLD_TEMPLATES

__all__ = ["ROW_TEMPLATES"]

ROW_TEMPLATES = {
    **FLOW_TEMPLATES,
    **ARITHMETIC_TEMPLATES,
    **STACK_TEMPLATES,
    **VARIABLE_TEMPLATES,
    **WORLD_TEMPLATES,
    **USDT_TEMPLATES,
    **LOG_TEMPLATES,
    **LOG_MEMORY_TEMPLATES,
    **MATCH_TEMPLATES,
    **HEAP_TEMPLATES,
    **TABLE_TEMPLATES,
}
"""Templates by the syntax of the row. ``composer`` has the template that calls extensions."""
