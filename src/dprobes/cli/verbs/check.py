"""The verb ``check``: the diagnostics of a program or of templates, without a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.arch import ARCHITECTURE_NAMES
from dprobes.cli import console
from dprobes.cli.console import Progress
from dprobes.cli.option_values import compile_options, program_of
from dprobes.cli.record_options import TEMPLATE_SUFFIX, check_program_templates, check_templates, templates_option
from dprobes.cli.resolved_program import check_promises, compile_programs, files_of
from dprobes.cli.shared_options import PROGRAM, kernel_types_option, program_options, symbols_option, text_option
from dprobes.diagnostics import Severity
from dprobes.engines.engine_choice import note_unsupported
from dprobes.errors import TargetError
from dprobes.formatters.templates.template_directory import DIRECTORY_FILE
from dprobes.sets import SET_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.cli.resolved_program import ResolvedProgram

__all__ = ["check_command"]


@click.command("check")
@click.argument("file", type=PROGRAM, required=False)
@text_option("Check")
@program_options
@symbols_option
@kernel_types_option
@templates_option("Also check the templates in this directory, and report records that have none.")
@click.option(
    "--arch", type=click.Choice(ARCHITECTURE_NAMES), help="Check for this processor instead of this machine's."
)
def check_command(
    file: Path | None,
    text: str | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    kernel_types: Path | None,
    templates: Path | None,
    arch: str | None,
) -> int:
    """
    Check the probe program FILE and print errors and warnings.

    The program is compiled, and its module's symbols and instructions are looked up if the module is on this machine.
    If there is nothing to report, nothing is printed and the exit status is 0.

    FILE may also be the name of an instrumentation set (its description is checked as well), a directory of templates,
    or a file in it.
    """
    program = program_of(file, text)
    if file is not None and _is_of_templates(file):
        return check_templates(file)
    options = compile_options(defines, includes, cpp, allow_write=allow_write)
    with Progress("checking the program"):
        found = compile_programs(program, options, symbols=symbols, architecture_name=arch, kernel_types=kernel_types)
    if file is not None and file.name == SET_FILE:
        files = files_of(file, symbols, kernel_types=kernel_types)
        check_promises(file, options, found[0].diagnostics, files)
    for compiled in found:
        note_unsupported(compiled)
        _note_foreign_debug_file(compiled)
        if templates is not None:
            check_program_templates(templates, compiled.program, compiled.diagnostics)
    if said := found[0].render(*Severity):
        console.write(said)
    return 0


def _note_foreign_debug_file(compiled: ResolvedProgram) -> None:
    """Print a note if the installed debug file of the module is that of another build."""
    from dprobes.target.elf.symbol_sources import lack_of_debug_file

    if compiled.resolved is None:
        return
    try:
        problem = lack_of_debug_file(compiled.resolved.module.elf)
    except TargetError:
        return  # a damaged file is reported where it is needed
    if problem is not None:
        compiled.diagnostics.note(compiled.program.spans.get("name"), problem, hint="install that of this build")


def _is_of_templates(file: Path) -> bool:
    return file.is_dir() or file.name == DIRECTORY_FILE or file.suffix == TEMPLATE_SUFFIX
