"""Source files of both languages as programs, with the templates that they have of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn.pipeline import parse_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.pipeline import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.source import SourceFile

__all__ = ["C_SUFFIX", "parse_c", "parse_program"]

C_SUFFIX = ".dpc"
"""How the names of files in DProbes C end."""

_TEMPLATE_FILE = "program.fmt"


def parse_program(
    path: Path, diagnostics: Diagnostics, options: CompileOptions, *, module: str = ""
) -> tuple[Program, Mapping[str, bytes]]:
    """
    Return the program in a source file of either language, and the templates that it has of its own.

    ``module`` is that of probes in DProbes C that name none. Raise ``SourceError`` if it has errors of form, or is for
    several modules.
    """
    if path.suffix != C_SUFFIX:
        return parse_file(path, diagnostics, options), {}
    from dprobes.preprocessor import read_source

    (first, *others), templates = parse_c(read_source(path), diagnostics, options, module)
    if others:
        names = ", ".join(f"'{each.name}'" for each in (first, *others))
        diagnostics.error(
            others[0].spans.get("name"),
            f"this is a program for several modules: {names}",
            hint="'dprobes run' inserts it as a whole; here it has to be one program for each",
        )
        diagnostics.raise_if_errors()
    return first, templates


def parse_c(
    source: SourceFile, diagnostics: Diagnostics, options: CompileOptions, module: str
) -> tuple[tuple[Program, ...], Mapping[str, bytes]]:
    """Return the programs in a source in DProbes C, one for each module, and the templates of all."""
    from dprobes.dpc.pipeline import compile_source as compile_c
    from dprobes.formatters.templates.directory import DIRECTORY_FILE

    compiled = compile_c(source, diagnostics, options, module=module)
    if not compiled.templates:
        return compiled.programs, {}
    listed = f"{compiled.programs[0].major} {_TEMPLATE_FILE}\n"
    return compiled.programs, {DIRECTORY_FILE: listed.encode(), _TEMPLATE_FILE: compiled.templates.encode()}
