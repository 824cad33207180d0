"""A source in DProbes C as a program like any other, and its templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.pipeline import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.source import SourceFile

__all__ = ["CompiledSource", "compile_source"]


class CompiledSource(NamedTuple):
    """A program, its RPN source, and the text of the file of its templates; that is empty if it prints nothing."""

    program: Program
    rpn: str
    templates: str


def compile_source(
    source: SourceFile, diagnostics: Diagnostics, options: CompileOptions, *, module: str = ""
) -> CompiledSource:
    """
    Compile a source; ``module`` is that of points that name none.

    Raise ``SourceError`` if it is wrong. A program for the modules of several names is wrong, too.
    """
    from dprobes.dpc.compiler import compile_text
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.parser import parse

    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    found = compile_text(text, diagnostics, module=module, word_size_of=_word_size_of, allow_write=options.allow_write)
    if len(found) != 1:
        names = ", ".join(f"'{each.module}'" for each in found)
        message = f"the probes of a program are in one module, not in {names}" if found else "there is no probe"
        diagnostics.error(text.span(0, 0), message)
        diagnostics.raise_if_errors()
    (compilation,) = found
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return CompiledSource(program, compilation.source, compilation.template_file if compilation.templates else "")


def _word_size_of(module: str) -> int:
    """Return the size of a word of a module, in bytes; that of 64-bit programs if it is not on this machine."""
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.modules import find_module

    try:
        path = find_module(module)
        return ElfFile.open(path).word_size if path is not None else 8
    except TargetError:
        return 8
