"""Compilation of a program's source to a PPDF in memory, for the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.api.compiled_program import parse_programs
from dprobes.cli.resolved_program import files_of, source_of
from dprobes.formatters.templates.carried_templates import carried_templates
from dprobes.ppdf.ppdf_file import encode
from dprobes.resolve.local_module import open_named_module
from dprobes.resolve.portable_program import build_joined
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.rpn_program import joined_program
from dprobes.target.module_lookup import find_module

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Program
    from dprobes.runs.run_steps import Vantage

__all__ = ["compiled_here"]


def compiled_here(
    file: Path | str,
    options: CompileOptions,
    symbols: Path | None,
    vantage: Vantage,
    diagnostics: Diagnostics,
    templates: Path | None = None,
    kernel_types: Path | None = None,
) -> bytes:
    """
    Compile a program with the symbols of its module, if that is on this machine; return the bytes of a PPDF.

    ``file`` is a path, or a source text. ``vantage`` is the request, with the thread or command whose file system is
    searched for modules. ``templates`` is the directory of its templates. ``kernel_types`` is a file with the types of
    the kernel; without it, the types of the probed kernel are used. Errors are those of ``build_ppdf``.
    """
    source = parse_programs(
        source_of(file) if isinstance(file, str) else file,
        diagnostics,
        options,
        files=files_of(file, symbols, vantage, kernel_types=kernel_types),
    )
    program = joined_program(source.programs)
    ppdf = build_joined(
        source.programs,
        [_module_of(each, vantage, diagnostics) for each in source.programs],
        source.tool,
        diagnostics,
        extra_symbols=symbols,
        allow_write=options.allow_write,
        with_ebpf=False,
        templates=carried_templates(templates, program, diagnostics) if templates is not None else source.templates,
    )
    return encode(ppdf)


def _module_of(program: Program, vantage: Vantage, diagnostics: Diagnostics) -> Sequence[Path]:
    """Return the file of a program's module, or an empty sequence if it is not on this machine."""
    if space_of(program) is not Space.MODULE:
        return ()
    module = find_module(program.name, pid=vantage.tid, command=vantage.command)
    if module is None:
        return ()
    open_named_module(program, module, diagnostics)
    return (module,)
