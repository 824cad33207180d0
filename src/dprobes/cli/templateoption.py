"""The option ``--templates``, and what is said about templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.cli import console
from dprobes.record.layout import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.collection import Templates
    from dprobes.rpn.program import Program

__all__ = [
    "TEMPLATE_SUFFIX",
    "check_program_templates",
    "check_templates",
    "note_addresses",
    "read_templates",
    "say_problems",
    "templates_option",
]

TEMPLATE_SUFFIX = ".fmt"
"""How the names of template files end, by convention."""

_NEEDED = Item.PID
"""What names need in a run, in which it is known what the processes map."""


def templates_option(help_: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that names a directory of templates."""
    import click

    return click.option(
        "--templates", "templates", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=help_
    )


def read_templates(directory: Path | None) -> Templates | None:
    """
    Return the templates of a directory, and print what is doubtful or wrong; one with an error is left out.

    Raise ``FormatError`` if that is no directory of templates.
    """
    if directory is None:
        return None
    from dprobes.formatters.templates.collection import Templates

    templates = Templates.from_directory(directory)
    if templates.diagnostics.has_errors:
        say_problems(templates, f"'{directory}'")
    elif text := templates.diagnostics.render():
        console.write(text)
    return templates


def check_templates(path: Path) -> int:
    """Print what is wrong with a directory of templates, or one file of it; return the exit status."""
    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.collection import Templates, read_file, source_of
    from dprobes.formatters.templates.directory import DIRECTORY_FILE
    from dprobes.formatters.templates.parser import parse_file

    if path.is_dir() or path.name == DIRECTORY_FILE:
        diagnostics = Templates.from_directory(path if path.is_dir() else path.parent).diagnostics
    else:
        diagnostics = Diagnostics()
        source = source_of(str(path), read_file(path), diagnostics)
        if source is not None:
            parse_file(source, None, diagnostics)
    diagnostics.raise_if_errors()
    if text := diagnostics.render():
        console.write(text)
    return 0


def check_program_templates(directory: Path, program: Program, diagnostics: Diagnostics) -> None:
    """Add to ``diagnostics`` what is wrong with a program's templates, and which of its records have none."""
    from dprobes.formatters.templates.carried import carried_templates
    from dprobes.formatters.templates.collection import Templates
    from dprobes.rpn.needs import sets_codes

    templates = Templates.from_files(carried_templates(directory, program, diagnostics))
    if not templates or sets_codes(program):
        return
    first = {definition.minor: definition for definition in reversed(program.definitions)}
    for minor, definition in sorted(first.items()):
        if templates.find(program.major, minor) is None:
            span = definition.span("minor")
            diagnostics.note(span, f"'{directory}' has no template for the records {program.major},{minor}")


def say_problems(templates: Templates, where: str) -> None:
    """Print what is wrong with templates that came with a file; their records are printed without them."""
    if templates.diagnostics.has_errors:
        console.warning(f"templates of {where} have errors, and are not used")
        console.write(templates.diagnostics.render())


def printed_items(files: Mapping[str, bytes]) -> Item:
    """Return the header items that templates print (``%{name}``): records must carry them."""
    if not files:
        return Item(0)
    from dprobes.formatters.fieldvalues import HEADER_FIELDS
    from dprobes.formatters.templates.collection import templates_of
    from dprobes.formatters.templates.model import HeaderValue

    items = Item(0)
    for template in templates_of(files).all():
        for part in (part for line in template.lines for part in line):
            if isinstance(part, HeaderValue):
                items |= HEADER_FIELDS[part.name]
    return items


def note_addresses(files: Mapping[str, bytes], items: Item) -> None:
    """Say what records with certain items lack for the names of the addresses that their templates print."""
    if not files or items & _NEEDED:
        return
    from dprobes.formatters.templates.carried import name_addresses
    from dprobes.formatters.templates.collection import templates_of

    if name_addresses(templates_of(files)):
        console.note("the templates name addresses (%a); for that, records need --log PID,CSEIP")
