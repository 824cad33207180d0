"""From a program's source to a PPDF in memory, for the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.api.sourcefile import parse_program
from dprobes.cli.resolvedprogram import is_c, source_of
from dprobes.formatters.templates.carried import carried_templates
from dprobes.ppdf.writer import encode
from dprobes.resolve.localmodule import open_named_module
from dprobes.resolve.portable import build_ppdf
from dprobes.resolve.spaces import Space, space_of
from dprobes.target.modules import find_module

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.modulefiles import ModuleFiles
    from dprobes.engines.insertion import Vantage
    from dprobes.rpn.pipeline import CompileOptions

__all__ = ["compiled_here"]


def compiled_here(
    file: Path | str,
    options: CompileOptions,
    symbols: Path | None,
    vantage: Vantage,
    diagnostics: Diagnostics,
    templates: Path | None = None,
) -> bytes:
    """
    Compile a program, in a file or a text, with the symbols of its module, if that is here; raises as ``build_ppdf``.

    ``templates`` is the directory of its templates.
    """
    program, own_templates = parse_program(
        source_of(file) if isinstance(file, str) else file,
        diagnostics,
        options,
        files=_files(file, symbols, vantage),
    )
    module = None
    if space_of(program) is Space.MODULE:
        module = find_module(program.name, pid=vantage.tid, command=vantage.command)
        if module is not None:
            open_named_module(program, module, diagnostics)
    ppdf = build_ppdf(
        program,
        [module] if module is not None else [],
        diagnostics,
        extra_symbols=symbols,
        allow_write=options.allow_write,
        with_ebpf=False,
        templates=carried_templates(templates, program, diagnostics) if templates is not None else own_templates,
    )
    return encode(ppdf)


def _files(file: Path | str, symbols: Path | None, vantage: Vantage) -> ModuleFiles | None:
    if not is_c(file):
        return None
    from dprobes.dpc.modulefiles import ModuleFiles

    return ModuleFiles(vantage.tid, vantage.command, symbols)
