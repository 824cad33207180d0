"""
The passes from a file to a checked program, in their order.

    read_source  →  preprocess  →  parse  →  check
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import ExternalPreprocessor
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import SourceFile

__all__ = ["CompileOptions", "check_program", "parse_file", "parse_source"]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """
    Options of a compilation, as on the command line.

    ``defines`` has the names and values of ``-D``, ``include_dirs`` the directories of ``-I``. ``cpp`` is an external
    preprocessor, or None for the built-in one. ``allow_write`` permits instructions that change the target.
    """

    defines: tuple[tuple[str, str], ...] = ()
    include_dirs: tuple[Path, ...] = field(default=())
    cpp: ExternalPreprocessor | None = None
    allow_write: bool = False


def parse_file(path: Path, diagnostics: Diagnostics, options: CompileOptions = CompileOptions()) -> Program:
    """Return the program in a file; raise ``SourceError`` if the file cannot be read or has syntax errors."""
    from dprobes.preprocessor import read_source

    return parse_source(read_source(path), diagnostics, options)


def parse_source(source: SourceFile, diagnostics: Diagnostics, options: CompileOptions = CompileOptions()) -> Program:
    """Return the program in a source text; raise ``SourceError`` if it has errors of preprocessing or syntax."""
    # Compiled programs need neither preprocessor nor parser.
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.rpn_parser import parse

    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    program = parse(text, diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None, "a program without a name is an error"
    return program


def check_program(
    program: Program, architecture: Architecture, diagnostics: Diagnostics, options: CompileOptions = CompileOptions()
) -> None:
    """
    Check a parsed program for a processor; raise ``SourceError`` for semantic errors.

    Warnings are added to ``diagnostics``.
    """
    from dprobes.rpn.program_checker import check

    check(program, architecture, diagnostics, allow_write=options.allow_write)
    diagnostics.raise_if_errors()
