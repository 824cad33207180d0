"""
From the text of a program in DProbes C to RPN programs: the passes in their order.

    parse  →  find instructions  →  type, fold  →  emit
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics, Note
from dprobes.dpc.emitters.programemitter import KERNEL_KINDS, ProgramEmitter, jmpmax_of
from dprobes.dpc.modules.debugplaces import DebugPlaces, with_instructions
from dprobes.dpc.modules.probedmodules import ProbedModules
from dprobes.dpc.syntax.parser import parse
from dprobes.dpc.syntax.programtree import PointKind, ToolBlock
from dprobes.dpc.typedtree.logpaths import find_log_paths
from dprobes.dpc.typedtree.typedprogram import TypedProbe
from dprobes.dpc.typedtree.typedstatement import Steps
from dprobes.dpc.typers.programtyper import ProgramTyper
from dprobes.dpc.typers.typetable import UnknownTypeError
from dprobes.errors import SourceError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.dpc.emitters.programemitter import Compilation
    from dprobes.dpc.modules.debugplaces import PlaceFinder
    from dprobes.dpc.syntax.programtree import Function, Probe, ProgramTree
    from dprobes.dpc.syntax.tree import Declaration
    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.dpc.typedtree.scope import ProbedModule, TypeListener
    from dprobes.dpc.typedtree.typedprogram import TypedBlock, TypedFunction
    from dprobes.preprocessor import Preprocessed
    from dprobes.source import Span

__all__ = ["CompiledText", "compile_text"]


class CompiledText(NamedTuple):
    """The RPN programs of a source, one for each module, and what the tool executes; None if there is nothing."""

    compilations: list[Compilation]
    tool: ToolProgram | None


def compile_text(
    text: Preprocessed,
    diagnostics: Diagnostics,
    *,
    module: str = "",
    word_size_of: Callable[[str], int] = lambda _module: 8,
    module_of: Callable[[str], ProbedModule | None] = lambda _module: None,
    allow_write: bool = False,
    places: PlaceFinder | None = None,
    tell_modules: Callable[[Sequence[str]], None] = lambda _names: None,
    note: Callable[[str, object], None] = lambda _name, _made: None,
    tell_type: TypeListener | None = None,
) -> CompiledText:
    """
    Compile a program.

    ``module`` is that of points that name none, and ``word_size_of`` knows how many bytes a word of a module has: 4
    or 8; ``module_of`` what describes it; before they are asked, ``tell_modules`` is told of all modules. There is a
    compilation for each module. ``places`` finds instructions by debug information; without it, no module has any.
    ``note`` is told what passes have made (``dump``), ``tell_type`` the types of expressions and parameters. Raise
    ``SourceError`` if the program is wrong.
    """
    program = parse(text, diagnostics)
    is_understood = not diagnostics.has_errors
    note("tree", program)
    tell_modules(ProbedModules(program, module, module_of).names)
    program = with_instructions(program, module, places or DebugPlaces(), diagnostics)
    note("places", program)
    word_size = _word_size(program, module, word_size_of, diagnostics)
    modules = ProbedModules(program, module, module_of)
    typer = ProgramTyper(program, word_size, diagnostics, modules, allow_write=allow_write, tell=tell_type)
    functions, probes, blocks = _typed(program, typer, diagnostics)
    tool = _tool(program, typer, functions, blocks, word_size, diagnostics) if blocks else None
    note("typed", [*functions, *probes, *blocks])
    if diagnostics.has_errors:
        raise SourceError(tuple(diagnostics), _outline(program, typer, word_size, module) if is_understood else ())
    emitter = ProgramEmitter(program, typer, functions, probes, word_size, diagnostics, module)
    compilations: list[Compilation] = []
    with _limited(_span_of(program.parts[0]), diagnostics) if program.parts else nullcontext():
        compilations = emitter.compilations()
    diagnostics.raise_if_errors()
    if all(made.is_in_kernel for made in compilations):
        return CompiledText(compilations, tool)
    # Programs of 32 bits have half of a variable that those of 64 bits have, and carry nothing to the other half.
    other = {} if typer.shares_words else _sources_for(12 - word_size, program, module, allow_write=allow_write)
    return CompiledText(
        [
            made
            if made.is_in_kernel or other.get(made.module) == (made.source, made.templates)
            else made.for_words_of(word_size)
            for made in compilations
        ],
        tool,
    )


def _typed(
    program: ProgramTree, typer: ProgramTyper, diagnostics: Diagnostics
) -> tuple[list[TypedFunction], list[TypedProbe], list[TypedBlock]]:
    names: list[Declaration | Function] = [*program.declarations, *program.functions]
    for declared in names:
        with _limited(declared.span, diagnostics):
            typer.declare(declared)
    functions: list[TypedFunction] = []
    for function in program.functions:
        with _limited(function.type.declarator.span, diagnostics):
            functions += [made] if (made := typer.function(function)) is not None else []
    probes: list[TypedProbe] = []
    blocks: list[TypedBlock] = []
    for part in program.parts:  # the first use of a table says what it keeps
        with _limited(_span_of(part), diagnostics):
            if isinstance(part, ToolBlock):
                blocks.append(typer.block(part))
            else:
                probes += typer.probes(part)
    typer.tables.check()
    return functions, probes, blocks


def _sources_for(
    word_size: int, program: ProgramTree, module: str, *, allow_write: bool
) -> dict[str, tuple[str, Mapping[int, str]]]:
    """
    Return the RPN sources and templates by module that a program is compiled to for words of another size.

    Those that come out the same are right for both sizes. Debug information of a file is of one size, and not looked at
    here: what depends on it comes out otherwise. Return nothing if the program cannot be compiled so.
    """
    diagnostics, emitted = Diagnostics(), Diagnostics()
    undescribed = ProbedModules(program, module, lambda _name: None)
    typer = ProgramTyper(program, word_size, diagnostics, undescribed, allow_write=allow_write)
    functions, probes, _ = _typed(program, typer, diagnostics)
    if diagnostics.has_errors:
        return {}
    emitter = ProgramEmitter(program, typer, functions, probes, word_size, emitted, module)
    made: list[Compilation] = []
    with _limited(_span_of(program.parts[0]), emitted) if program.parts else nullcontext():
        made = emitter.compilations()
    return {} if emitted.has_errors else {each.module: (each.source, each.templates) for each in made}


def _span_of(part: Probe | ToolBlock) -> Span:
    return part.span if isinstance(part, ToolBlock) else part.points[0].span


@contextmanager
def _limited(span: Span, diagnostics: Diagnostics) -> Iterator[None]:
    """
    Report at ``span`` an expression that is too deep for passes, which call themselves for what is in one.

    The parser limits what stands in brackets; a chain of operators, in which each is in the next one, has no brackets.
    """
    try:
        yield
    except RecursionError:
        message = "there is an expression with too many operators here"
        diagnostics.error(span, message, hint="keep parts of it in variables")


def _outline(program: ProgramTree, typer: ProgramTyper, word_size: int, module: str) -> list[Compilation]:
    """Return a program with the places of one whose handlers are wrong: they can be looked for all the same."""
    empty = Steps(())
    paths = find_log_paths(empty, 0, Diagnostics())
    probes = [TypedProbe(probe, probe.points, None, empty, 0, paths) for probe in program.probes]
    try:
        return ProgramEmitter(program, typer, (), probes, word_size, Diagnostics(), module).compilations()
    except UnknownTypeError:
        return []


def _tool(
    program: ProgramTree,
    typer: ProgramTyper,
    functions: list[TypedFunction],
    blocks: list[TypedBlock],
    word_size: int,
    diagnostics: Diagnostics,
) -> ToolProgram:
    from dprobes.dpc.toolblock import ToolProgram, check_block

    by_name = {each.signature.name: each for each in functions}
    for block in blocks:
        check_block(block, by_name, diagnostics)
    tables = tuple(table.name for table in typer.tables)
    return ToolProgram(tuple(blocks), by_name, tables, word_size, jmpmax_of(program))


def _word_size(program: ProgramTree, module: str, word_size_of: Callable[[str], int], diagnostics: Diagnostics) -> int:
    """Return the size of a word of the modules of a program, which is one: what they share has one form."""
    sizes: dict[int, tuple[str, Span]] = {}
    for probe in program.probes:
        for point in probe.points:
            is_anywhere = point.kind is PointKind.SAMPLE  # without a module of its own
            name = point.module or program.module or ("" if is_anywhere else module)
            if name and point.kind not in KERNEL_KINDS:
                sizes.setdefault(word_size_of(name), (name, point.span))
    if len(sizes) > 1:
        (size, (first, span)), (other, (second, place)) = list(sizes.items())[:2]
        notes = (Note(f"'{first}' has words of {size} bytes", span),)
        hint = "what modules of one program share has one form: write two programs"
        diagnostics.error(place, f"'{second}' has words of {other} bytes", notes=notes, hint=hint)
    return next(iter(sizes), 8)
