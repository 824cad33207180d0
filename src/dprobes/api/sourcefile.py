"""Source files of both languages as programs, with the templates that they have of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.api import C_SUFFIX
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.pipeline import parse_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.modules.modulefiles import ModuleFiles
    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.dpc.typedtree.scope import TypeListener
    from dprobes.rpn.pipeline import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.source import SourceFile

__all__ = ["ParsedSource", "parse_c", "parse_programs"]

_TEMPLATE_FILE = "program.fmt"


def parse_programs(
    source: Path | SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    *,
    module: str = "",
    files: ModuleFiles | None = None,
) -> ParsedSource:
    """
    Return what is in a source file of either language.

    A source that has been read is in DProbes C. ``module`` is that of probes in DProbes C that name none, ``files``
    finds the files of modules for them. Raise ``SourceError`` if it has errors of form.
    """
    from dprobes.source import SourceFile

    if not isinstance(source, SourceFile):
        if source.suffix != C_SUFFIX:
            return ParsedSource((parse_file(source, diagnostics, options),), {}, None)
        from dprobes.preprocessor import read_source

        source = read_source(source)
    return parse_c(source, diagnostics, options, module, files)


class ParsedSource(NamedTuple):
    """The programs of a source, one for each module, the templates of all, and what the tool executes."""

    programs: tuple[Program, ...]
    templates: Mapping[str, bytes]
    tool: ToolProgram | None


def parse_c(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    module: str,
    files: ModuleFiles | None = None,
    tell_type: TypeListener | None = None,
) -> ParsedSource:
    """Return what is in a source in DProbes C; ``tell_type`` hears of the types of expressions and parameters."""
    from dprobes.dpc.pipeline import compile_source as compile_c
    from dprobes.formatters.templates.directory import DIRECTORY_FILE

    compiled = compile_c(source, diagnostics, options, module=module, files=files, tell_type=tell_type)
    if not compiled.templates:
        return ParsedSource(compiled.programs, {}, compiled.tool)
    listed = f"{compiled.programs[0].major} {_TEMPLATE_FILE}\n"
    templates = {DIRECTORY_FILE: listed.encode(), _TEMPLATE_FILE: compiled.templates.encode()}
    return ParsedSource(compiled.programs, templates, compiled.tool)
