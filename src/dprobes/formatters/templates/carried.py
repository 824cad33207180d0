"""The templates that belong to a program, for compiled files, trace files and log targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.formatters.templates.collection import Templates
from dprobes.formatters.templates.extraction import data_parts
from dprobes.formatters.templates.model import Conversion, Placeholder
from dprobes.formatters.templates.widths import check_widths
from dprobes.rpn.needs import record_majors

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import Program

__all__ = ["carried_templates", "name_addresses"]


def carried_templates(directory: Path, program: Program, diagnostics: Diagnostics) -> dict[str, bytes]:
    """
    Return the files of a template directory that the records of a program need.

    What is doubtful about them goes to ``diagnostics``. Raise ``SourceError`` if one is wrong, and ``FormatError`` if
    they cannot be read.
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
    """Return whether one of some templates has ``%a``."""
    return any(
        isinstance(part, Placeholder) and part.conversion is Conversion.ADDRESS
        for template in templates.all()
        for part in data_parts(template)
    )
