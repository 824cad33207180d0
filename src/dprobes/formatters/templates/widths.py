"""Numbers that a template prints with a sign, and that the handler logs as whole registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import RegisterClass, architecture
from dprobes.formatters.templates.collection import templates_in
from dprobes.formatters.templates.derived import derived_templates
from dprobes.formatters.templates.model import Conversion, Placeholder, Skip, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.collection import Templates
    from dprobes.formatters.templates.model import Template
    from dprobes.rpn.program import Program

__all__ = ["check_widths"]

_WORD = 8
_NO_INTS = ("esp", "eip", "ebp", "eflags")
"""Registers in which a function has no int."""


def check_widths(templates: Templates, program: Program, diagnostics: Diagnostics) -> None:
    """Warn of each ``%d`` of a whole register that may hold an int, whose upper half is not that of a negative word."""
    told = templates_in(derived_templates(program).get(_WORD, ""), program.major)
    for minor, derived in sorted(told.items()):
        written = templates.find(program.major, minor)
        if written is None:
            continue
        names = {offset: name for offset, part, name in _words(derived) if part.conversion is Conversion.VALUE}
        for offset, part, _ in _words(written):
            name = names.get(offset)
            if name is not None and part.conversion is Conversion.SIGNED and _may_be_int(name):
                diagnostics.warning(
                    part.span,
                    f"this prints all of the register '{name}', in which the -1 of an int is 4294967295",
                    hint=f"write '{name}:s32' where the handler pushes it, if it is an int, else '{name}:s64'",
                )


def _words(template: Template) -> Iterator[tuple[int, Placeholder, str]]:
    """Iterate over the words that are at one place in all records: offset, place-holder, and the text before it."""
    offset, text = 0, ""
    for part in (part for line in template.lines for part in line):
        match part:
            case Text():
                text = part.text
                continue
            case Skip(count):
                offset += count
            case Placeholder(size=size) if part.is_item or size == 0:
                return
            case Placeholder():
                size = _WORD if part.size is None else part.size
                if size == _WORD:
                    yield offset, part, text.strip().removesuffix("=")
                offset += size
        text = ""


def _may_be_int(name: str) -> bool:
    register = architecture("x86_64").register(name)
    return register is not None and register.kind is RegisterClass.GENERAL and register.name not in _NO_INTS
