"""
From the text of a program in DProbes C to RPN programs: the passes in their order.

    parse  →  type, fold  →  emit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.parser import parse
from dprobes.dpc.programemitter import ProgramEmitter
from dprobes.dpc.programtyper import ProgramTyper

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.programemitter import Compilation
    from dprobes.preprocessor import Preprocessed

__all__ = ["compile_text"]


def compile_text(
    text: Preprocessed,
    diagnostics: Diagnostics,
    *,
    module: str = "",
    word_size_of: Callable[[str], int] = lambda _module: 8,
    allow_write: bool = False,
) -> list[Compilation]:
    """
    Compile a program.

    ``module`` is that of points that name none, and ``word_size_of`` knows how many bytes a word of a module has: 4 or
    8. There is a compilation for each module. Raise ``SourceError`` if the program is wrong.
    """
    program = parse(text, diagnostics)
    named = next((point.module for probe in program.probes for point in probe.points if point.module), "")
    word_size = word_size_of(program.module or named or module)
    typer = ProgramTyper(program, word_size, diagnostics, allow_write=allow_write)
    typer.declare()
    functions = [made for function in program.functions if (made := typer.function(function)) is not None]
    probes = [found for probe in program.probes if (found := typer.probe(probe)) is not None]
    diagnostics.raise_if_errors()
    emitter = ProgramEmitter(program, typer, functions, probes, word_size, diagnostics, module)
    compilations = emitter.compilations()
    diagnostics.raise_if_errors()
    return compilations
