"""A source in DProbes C as programs like any other, one for each module, and their templates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.emitters.programemitter import Compilation
    from dprobes.dpc.modules.modulefiles import ModuleFiles
    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.dpc.typedtree.scope import TypeListener
    from dprobes.rpn.pipeline import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.source import SourceFile

__all__ = ["CompiledSource", "compile_source", "dump_lines"]


class CompiledSource(NamedTuple):
    """
    A program for each module, in the order in which the source names them, and the RPN source of each.

    They share their variables and tables. ``templates`` is the text of the file of their templates, empty if they print
    nothing. ``tool`` is what the tool executes, None if that is nothing.
    """

    programs: tuple[Program, ...]
    sources: tuple[str, ...]
    templates: str
    tool: ToolProgram | None = None

    @property
    def rpn(self) -> str:
        """The RPN sources as one text, with a line before each if there are several."""
        if len(self.sources) == 1:
            return self.sources[0]
        count = len(self.sources)
        return "\n".join(f"// program {number} of {count}\n{text}" for number, text in enumerate(self.sources, 1))


def compile_source(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    *,
    module: str = "",
    files: ModuleFiles | None = None,
    tell_type: TypeListener | None = None,
) -> CompiledSource:
    """
    Compile a source; ``module`` is that of points that name none, ``files`` finds those of modules.

    ``tell_type`` hears of the types of expressions and parameters, also of a source that is wrong.

    Raise ``SourceError`` if it is wrong; if only its handlers are, with an outline.
    """
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.compiler import compile_text
    from dprobes.dpc.cterms import in_c
    from dprobes.dpc.modules.modulefiles import ModuleFiles
    from dprobes.errors import SourceError
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.parser import parse

    if source.wording is None:
        source = replace(source, wording=in_c)
    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    files = files or ModuleFiles()
    try:
        found, tool = compile_text(
            text,
            diagnostics,
            module=module,
            word_size_of=files.word_size_of,
            module_of=files.module_of,
            places=files.places,
            tell_modules=files.tell_modules,
            allow_write=options.allow_write,
            tell_type=tell_type,
        )
    except SourceError as error:
        outline = [parse(compilation.preprocessed(), Diagnostics()) for compilation in error.outline]
        raise SourceError(error.diagnostics, [each for each in outline if each is not None]) from None
    if not found:
        hint = "'begin', 'every' and 'end' go with probes" if tool is not None else None
        diagnostics.error(text.span(0, 0), "there is no probe", hint=hint)
    programs = [parse(compilation.preprocessed(), diagnostics) for compilation in found]
    diagnostics.raise_if_errors()
    return CompiledSource(
        tuple(program for program in programs if program is not None),
        tuple(compilation.source for compilation in found),
        _templates_of(found),
        tool,
    )


def dump_lines(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    name: str,
    files: ModuleFiles | None = None,
) -> list[str]:
    """
    Return what the pass called ``name`` makes of a source, as lines (``dump.PASSES``).

    ``files`` finds those of modules. Raise ``SourceError`` if the source is so wrong that the pass has made nothing.
    """
    from dprobes.dpc.compiler import compile_text
    from dprobes.dpc.dump import Passes, token_lines, tree_lines
    from dprobes.dpc.modules.modulefiles import ModuleFiles
    from dprobes.errors import SourceError
    from dprobes.preprocessor import preprocess

    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    if name == "source":
        return text.text.splitlines()
    if name == "tokens":
        lines = list(token_lines(text, diagnostics))
        diagnostics.raise_if_errors()
        return lines
    passes = Passes()
    files = files or ModuleFiles()
    try:
        found, _ = compile_text(
            text,
            diagnostics,
            word_size_of=files.word_size_of,
            module_of=files.module_of,
            places=files.places,
            tell_modules=files.tell_modules,
            allow_write=options.allow_write,
            note=passes.note,
        )
    except SourceError:
        if name not in passes.found or name == "typed":
            raise
        return list(tree_lines(passes.found[name]))
    if name == "rpn":
        return CompiledSource((), tuple(each.source for each in found), "").rpn.splitlines()
    return list(tree_lines(passes.found[name]))


def _templates_of(found: list[Compilation]) -> str:
    from dprobes.dpc.emitters.programemitter import template_file

    templates = {minor: text for compilation in found for minor, text in compilation.templates.items()}
    return template_file(found[0].major, templates) if templates else ""
