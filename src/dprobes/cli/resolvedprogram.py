"""From a program's file, be it a text or compiled, to its resolved probes: what run, check and show begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.api import compiledprogram
from dprobes.api.compiledprogram import is_compiled
from dprobes.resolve.localmodule import Compiled, resolve_here
from dprobes.rpn.pipeline import CompileOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.api.compiledprogram import CompiledProgram

__all__ = ["Compiled", "compile_program", "is_compiled", "load_program"]


def load_program(
    path: Path,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    groups: Sequence[str] = (),
    types: Sequence[str] = (),
    verify_build_id: bool = True,
    verify_opcodes: bool = True,
) -> CompiledProgram:
    """
    Read a program, and keep the definitions of certain groups and types; raise an error of ours if it is wrong.

    ``symbols`` is what ``--sym`` names. Which options mean nothing for a compiled program is a usage error.
    """
    if is_compiled(path) and (symbols is not None or options != CompileOptions(allow_write=options.allow_write)):
        raise click.UsageError(f"'{path}' is compiled: -D, -I, --cpp and --sym are for the text of a program")
    return compiledprogram.load_program(
        path,
        options,
        symbols=symbols,
        groups=groups,
        types=types,
        verify_build_id=verify_build_id,
        verify_opcodes=verify_opcodes,
    )


def compile_program(
    path: Path,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    pid: int | None = None,
    architecture_name: str | None = None,
) -> Compiled:
    """Load a program, find its module, and resolve its probes; raise an error of ours with everything that is wrong."""
    loaded = load_program(path, options, symbols=symbols)
    return resolve_here(
        loaded.program,
        loaded.diagnostics,
        allow_write=options.allow_write,
        symbols=loaded.symbols,
        pid=pid,
        architecture_name=architecture_name,
    )
