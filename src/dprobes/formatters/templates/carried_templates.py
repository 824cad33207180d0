"""The templates that are saved with a program, and a check of signed numbers that handlers log as whole registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import RegisterClass, architecture
from dprobes.formatters.templates.data_extraction import data_parts
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.formatters.templates.template_collection import Templates, templates_in
from dprobes.formatters.templates.template_model import Conversion, Placeholder, Skip, Text
from dprobes.rpn.program_needs import record_majors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.template_model import Template
    from dprobes.rpn.rpn_program import Program

__all__ = ["carried_templates", "check_widths", "name_addresses"]

_WORD = 8
_NO_INTS = ("esp", "eip", "ebp", "eflags")
"""Registers that cannot hold an int variable of a function."""


def check_widths(templates: Templates, program: Program, diagnostics: Diagnostics) -> None:
    """
    Warn of each ``%d`` for a whole register that may contain an int variable.

    The upper half of such a register need not be a sign extension.
    """
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
    """Iterate over the logged words at fixed offsets: byte offset, placeholder, and the text before it."""
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


# The templates that belong to a program, for compiled files, trace files and log targets.


def carried_templates(directory: Path, program: Program, diagnostics: Diagnostics) -> dict[str, bytes]:
    """
    Return the files of a template directory that the records of a program need.

    Warnings about them go to ``diagnostics``. Raise ``SourceError`` if one has errors, and ``FormatError`` if they
    cannot be read.
    """
    majors = record_majors(program)
    templates = Templates.from_directory(directory, majors)
    diagnostics.extend(templates.diagnostics)
    templates.diagnostics.raise_if_errors()
    check_widths(templates, program, diagnostics)
    files = templates.carried(majors)
    if not files:
        which = "" if majors is None else f" for major {' or '.join(str(major) for major in sorted(majors))}"
        diagnostics.warning(None, f"'{directory}' has no templates{which}")
    return files


def name_addresses(templates: Templates) -> bool:
    """Return whether any of the templates has ``%a``."""
    return any(
        isinstance(part, Placeholder) and part.conversion is Conversion.ADDRESS
        for template in templates.all()
        for part in data_parts(template)
    )
