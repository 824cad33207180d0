"""Options about records: ``--log``, ``--log-format``, ``--templates``, and messages about templates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.cli import console
from dprobes.cli.option_values import usage_error
from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.template_collection import Templates
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "LOG_ITEMS",
    "TEMPLATE_SUFFIX",
    "check_program_templates",
    "check_templates",
    "has_structure",
    "log_format_option",
    "log_items_of",
    "note_addresses",
    "read_templates",
    "say_problems",
    "templates_option",
]

# The header items of records, with their names in ``--log``.


LOG_ITEMS = {
    "PROCNAME": Item.PROCESS_NAME,
    "PID": Item.PID,
    "UID": Item.UID,
    "CSEIP": Item.CS | Item.IP,
    "SSESP": Item.SS | Item.SP,
    "TSC": Item.TIME,
    "TID": Item.TID,
}
"""The valid names of ``--log``; the first six are the original's, for x86."""

ALL_ITEMS = Item.PROCESS_NAME | Item.PID | Item.UID | Item.CS | Item.IP | Item.SS | Item.SP | Item.TIME | Item.TID


def log_items_of(
    names: Sequence[str], *, is_tree: bool, all_by_default: bool = False, for_people: bool = False
) -> Item:
    """
    Return the items for the values of ``--log``; ``is_tree`` is true if the run has one process tree as its scope.

    ``all_by_default`` is true if the consumer of the records needs all items by default. ``for_people`` is true if
    records are printed as lines, which contain the time and the process.
    """
    items = Item.MAJOR | Item.MINOR
    if for_people and not names:
        items |= Item.PROCESS_NAME | Item.PID | Item.TIME
    if not is_tree:
        items |= Item.PROCESS_NAME | Item.PID  # a record of an unidentified process is useless
    if all_by_default and not names:
        items |= ALL_ITEMS | Item.CPU
    if os.sysconf("SC_NPROCESSORS_ONLN") > 1:
        items |= Item.CPU
    for name in ",".join(names).replace(" ", ",").upper().split(","):
        if name == "ALL":
            items |= ALL_ITEMS
        elif name in LOG_ITEMS:
            items |= LOG_ITEMS[name]
        elif name:
            from dprobes.diagnostics import did_you_mean

            hint = did_you_mean(name, [item.lower() for item in LOG_ITEMS]) or f"write {', '.join(LOG_ITEMS)}, or ALL"
            raise usage_error(f"--log has no item '{name.lower()}'; {hint}")
    return items


# The options of verbs with log targets.


def log_format_option(default: str | None, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return the decorator that adds ``--log-format``, with further ``names`` if the verb has no other use for them.

    None as ``default`` means that the verb chooses the format.
    """
    import click

    from dprobes.formatters import LOG_FORMATS

    return click.option(
        "--log-format",
        *names,
        "log_format",
        type=click.Choice(LOG_FORMATS),
        default=default,
        show_default=default is not None,
        help="The format for log targets that have no format of their own; binary: unchanged header and data.",
    )


def has_structure(targets: Sequence[str]) -> bool:
    """Return whether one of the log targets accepts structured records, and thus needs all items of their headers."""
    if not targets:
        return False
    from dprobes.sinks.target_kinds import is_trace_name, parse_target

    names = [parse_target(target) for target in targets]
    return any(name.kind.has_structure or is_trace_name(name.argument) for name in names)


TEMPLATE_SUFFIX = ".fmt"
"""The conventional suffix of template files."""

_NEEDED = Item.PID
"""The item that names of addresses need in a run, which knows the mappings of its processes."""


def templates_option(help_: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds ``--templates``, a directory of templates; ``help_`` is its help text."""
    import click

    return click.option(
        "--templates", "templates", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=help_
    )


def read_templates(directory: Path | None) -> Templates | None:
    """
    Return the templates of a directory, and print warnings and errors. Templates with an error are omitted.

    Return None if ``directory`` is None. Raise ``FormatError`` if it is not a directory of templates.
    """
    if directory is None:
        return None
    from dprobes.formatters.templates.template_collection import Templates

    templates = Templates.from_directory(directory)
    if templates.diagnostics.has_errors:
        say_problems(templates, f"'{directory}'")
    elif text := templates.diagnostics.render():
        console.write(text)
    return templates


def check_templates(path: Path) -> int:
    """Print the errors of a directory of templates, or of one file in it; return the exit status."""
    from dprobes.diagnostics import Diagnostics
    from dprobes.formatters.templates.template_collection import Templates, read_file, source_of
    from dprobes.formatters.templates.template_directory import DIRECTORY_FILE
    from dprobes.formatters.templates.template_parser import parse_file

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
    """Add the errors of a program's templates to ``diagnostics``, and the records that have no template."""
    from dprobes.formatters.templates.carried_templates import carried_templates
    from dprobes.formatters.templates.template_collection import Templates
    from dprobes.rpn.program_needs import sets_codes

    templates = Templates.from_files(carried_templates(directory, program, diagnostics))
    if not templates or sets_codes(program):
        return
    first = {definition.minor: definition for definition in reversed(program.definitions)}
    for minor, definition in sorted(first.items()):
        if templates.find(program.major, minor) is None:
            span = definition.span("minor")
            diagnostics.note(span, f"'{directory}' has no template for the records {program.major},{minor}")


def say_problems(templates: Templates, where: str) -> None:
    """
    Print the errors of templates that came with a file, whose records are then printed without them.

    ``where`` is the file in the messages.
    """
    if templates.diagnostics.has_errors:
        console.warning(f"templates of {where} have errors, and are not used")
        console.write(templates.diagnostics.render())


def printed_items(files: Mapping[str, bytes]) -> Item:
    """Return the header items that templates print (``%{name}``): records must carry them."""
    if not files:
        return Item(0)
    from dprobes.formatters.field_values import HEADER_FIELDS
    from dprobes.formatters.templates.template_collection import templates_of
    from dprobes.formatters.templates.template_model import HeaderValue

    items = Item(0)
    for template in templates_of(files).all():
        for part in (part for line in template.lines for part in line):
            if isinstance(part, HeaderValue):
                items |= HEADER_FIELDS[part.name]
    return items


def note_addresses(files: Mapping[str, bytes], items: Item) -> None:
    """
    Print a note if templates show addresses by name (%a), but records lack the pid that these names need.

    ``files`` maps names of template files to their bytes. ``items`` has the header items of records.
    """
    if not files or items & _NEEDED:
        return
    from dprobes.formatters.templates.carried_templates import name_addresses
    from dprobes.formatters.templates.template_collection import templates_of

    if name_addresses(templates_of(files)):
        console.note("the templates print addresses by name (%a), which needs --log PID,CSEIP")
