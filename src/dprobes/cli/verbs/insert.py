"""The verb ``insert``: compile a program, and have the manager insert it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.api.compiledfile import compiled_bytes, is_compiled
from dprobes.cli import console
from dprobes.cli.managerinsertion import insert, insertion_from, insertion_options
from dprobes.cli.options import PROGRAM, kernel_types_option, program_options, symbols_option, text_option
from dprobes.cli.optionvalues import compile_options, program_of, word_of_program
from dprobes.cli.scopeoptions import scope_options
from dprobes.cli.shippedexamples import example_templates
from dprobes.cli.templateoption import templates_option
from dprobes.diagnostics import Diagnostics, Severity

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command"]


@click.command("insert")
@click.argument("file", type=PROGRAM, required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@text_option("Insert")
@scope_options
@program_options
@symbols_option
@kernel_types_option
@templates_option("Print its records by the templates in this directory; they are sent to the manager.")
@insertion_options
def command(
    file: Path | None,
    arguments: tuple[str, ...],
    text: str | None,
    symbols: Path | None,
    kernel_types: Path | None,
    templates: Path | None,
    **options: Any,
) -> int:
    """
    Insert the probe program FILE, an .rpn source or a .ppdf, into all processes, or those of -p, -c, --cgroup, --uid.

    The probe manager, which is started if necessary, keeps it inserted until 'dprobes remove'. Records go to the
    manager's trace file ('dprobes log' prints it) and to log targets.
    """
    if text is not None and file is not None:
        file, arguments = None, (word_of_program(), *arguments)
    program = program_of(file, text)
    where = insertion_from(options, arguments)
    templates = templates or (example_templates(file) if file is not None else None)
    allow_write = options["allow_write"]
    if file is not None and is_compiled(file):
        data = compiled_bytes(file) if templates is None else _with_templates(file, templates)
        return insert(data, where, options, allow_write=allow_write)
    from dprobes.cli.compilation import compiled_here

    diagnostics = Diagnostics()
    compiling = compile_options(options["defines"], options["includes"], options["cpp"], allow_write=allow_write)
    ppdf = compiled_here(program, compiling, symbols, where, diagnostics, templates, kernel_types)
    if said := "\n".join(d.render() for d in diagnostics if d.severity is Severity.WARNING):
        console.write(said)
    return insert(ppdf, where, options, allow_write=allow_write, own_symbols=symbols is None)


def _with_templates(file: Path, templates: Path) -> bytes:
    """Return a compiled program with other templates than its own."""
    from dprobes.api.compiledprogram import load_ppdf

    loaded = load_ppdf(file).with_templates(templates)
    if text := loaded.diagnostics.render():
        console.write(text)
    return loaded.to_bytes()
