"""
Compilation of a DProbes C program to RPN programs: the passes in their order.

    parse  →  find instructions  →  type, fold  →  emit
"""

from __future__ import annotations

import enum
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from dprobes.c_tokens import TokenKind
from dprobes.diagnostics import Diagnostics, Note
from dprobes.dpc.emitters.program_emitter import KERNEL_KINDS, ProgramEmitter, jmpmax_of
from dprobes.dpc.modules.debug_places import DebugPlaces, with_instructions
from dprobes.dpc.modules.probed_modules import ProbedModules
from dprobes.dpc.syntax.expression_parser import TokenStream
from dprobes.dpc.syntax.program_parser import parse
from dprobes.dpc.syntax.syntax_tree import PointKind, ToolBlock
from dprobes.dpc.typedtree.typed_program import Steps, TypedProbe, find_log_paths
from dprobes.dpc.typers.program_typer import ProgramTyper
from dprobes.dpc.typers.type_table import UnknownTypeError
from dprobes.dpc.types.c_types import Array, Enumeration, Integer, Pointer, Record, Stack, String, Void
from dprobes.errors import SourceError
from dprobes.source_text import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.dpc.emitters.program_emitter import Compilation
    from dprobes.dpc.modules.debug_places import PlaceFinder
    from dprobes.dpc.syntax.syntax_tree import Declaration, Function, Probe, ProgramTree
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.name_scope import ProbedModule, TypeListener
    from dprobes.dpc.typedtree.typed_program import TypedBlock, TypedFunction
    from dprobes.preprocessor import Preprocessed

__all__ = ["PASSES", "Passes", "compile_text", "token_lines", "tree_lines"]

PASSES = {
    "source": "the text after preprocessing",
    "tokens": "its tokens",
    "tree": "the syntax tree, before names and types are resolved",
    "places": "the same, with instructions in the place of lines and inlined calls",
    "typed": "names resolved, conversions written out, constants worked out",
    "rpn": "the RPN source, with the lines of C as comments",
}
"""Descriptions of the results of the passes, by pass name, in the order of the passes."""

_WRITTEN = ("probe", "block")
"""Fields of typed trees that refer to the syntax tree; ``tree_lines`` prints only their span in the source."""

_TYPES = (Array, Enumeration, Integer, Pointer, Record, Stack, String, Void)


class Passes:
    """Results of the passes, by the names of the passes."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def note(self, name: str, made: object) -> None:
        """Store ``made``, the result of the pass ``name``; the last one stored for a name counts."""
        self.found[name] = made


def token_lines(text: Preprocessed, diagnostics: Diagnostics) -> Iterator[str]:
    """
    Iterate over lines, one for each token, with the token's span.

    The place of a probepoint is several tokens here; the parser reads it as one word.
    """
    stream = TokenStream(text, diagnostics)
    while (token := stream.take()).kind is not TokenKind.END:
        span = stream.span(token)
        yield f"{span}: {token.kind.value} {token.text}"


def tree_lines(node: object, name: str = "", depth: int = 0) -> Iterator[str]:
    """Iterate over lines that show a tree: one for each node or record, and for each other value that is not empty."""
    indent = "  " * depth
    label = f"{name}: " if name else ""
    if isinstance(node, (list, tuple)) and not _fields_of(node):
        for number, each in enumerate(node):
            yield from tree_lines(each, f"{name}[{number}]" if name else "", depth)
        return
    if isinstance(node, dict):
        for key, each in node.items():
            yield from tree_lines(each, f"{name}[{key}]", depth)
        return
    if not _fields_of(node) or isinstance(node, _TYPES):
        yield f"{indent}{label}{_shown(node)}"
        return
    plain, inner, place = [], [], ""
    for field in _fields_of(node):
        value = getattr(node, field)
        if isinstance(value, Span):
            place = f" @{value}"
        elif field in _WRITTEN:
            place = f" @{value.span}"
        elif field == "at" or value in (None, (), [], {}, ""):  # ``at`` is keyed by the ids of statements
            continue
        elif _is_plain(value):
            plain.append(f" {field}={_shown(value)}")
        else:
            inner.append((field, value))
    yield f"{indent}{label}{type(node).__name__}{place}{''.join(plain)}"
    for field_name, value in inner:
        yield from tree_lines(value, field_name, depth + 1)


def _fields_of(value: object) -> tuple[str, ...]:
    """Return the names of the fields of a node, dataclass or named tuple; none for another value."""
    return getattr(value, "__match_args__", ())


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)) and not _fields_of(value):
        return all(isinstance(each, (str, int)) for each in value)
    return isinstance(value, _TYPES) or not (_fields_of(value) or isinstance(value, dict))


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (frozenset, set)):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"<{value}>" if isinstance(value, _TYPES) else str(value)


class CompiledText(NamedTuple):
    """
    The RPN programs of a source, one for each module, and its blocks of the tool.

    ``tool`` is None without such blocks.
    """

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

    ``module`` is the module of probepoints that name none. ``word_size_of`` returns the word size of a module in bytes,
    4 or 8; ``module_of`` returns the module's description, None if it is unknown. ``tell_modules`` receives the names
    of all modules before ``word_size_of`` and ``module_of`` are called. There is one compilation for each module.
    ``places`` finds instructions by debug information; without it, no source line and no inlined call has instructions.
    ``note`` receives the results of passes, ``tell_type`` the types of expressions and parameters. Raise
    ``SourceError`` if the program has errors.
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
    # A 32-bit program accesses one half of a variable of a 64-bit program, and carries no overflow into the other half.
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
    for part in program.parts:  # the first use of a table decides the type of its values
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
    Return the RPN sources and templates, by module, of a program that is compiled for the other word size.

    A program whose source and templates are equal for both sizes suits both. Debug information of a file is for one
    word size and is not read here, so programs that depend on it differ. Return an empty mapping if the program cannot
    be compiled for that size.
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
    Report, at ``span``, an expression that is nested too deeply for the recursion of the passes.

    The parser limits nesting in brackets, but a chain of operators nests without brackets.
    """
    try:
        yield
    except RecursionError:
        message = "there is an expression with too many operators here"
        diagnostics.error(span, message, hint="keep parts of it in variables")


def _outline(program: ProgramTree, typer: ProgramTyper, word_size: int, module: str) -> list[Compilation]:
    """Return the programs of a source with errors, with empty handlers; their probepoints can be resolved."""
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
    from dprobes.dpc.tool_block import ToolProgram, check_block

    by_name = {each.signature.name: each for each in functions}
    for block in blocks:
        check_block(block, by_name, diagnostics)
    tables = tuple(table.name for table in typer.tables)
    return ToolProgram(tuple(blocks), by_name, tables, word_size, jmpmax_of(program))


def _word_size(program: ProgramTree, module: str, word_size_of: Callable[[str], int], diagnostics: Diagnostics) -> int:
    """Return the common word size of the program's modules in bytes, 8 without modules; report different sizes."""
    sizes: dict[int, tuple[str, Span]] = {}
    for probe in program.probes:
        for point in probe.points:
            is_anywhere = point.kind is PointKind.SAMPLE  # a sampler needs no module
            name = point.module or program.module or ("" if is_anywhere else module)
            if name and point.kind not in KERNEL_KINDS:
                sizes.setdefault(word_size_of(name), (name, point.span))
    if len(sizes) > 1:
        (size, (first, span)), (other, (second, place)) = list(sizes.items())[:2]
        notes = (Note(f"'{first}' has words of {size} bytes", span),)
        hint = "modules of one program must have words of the same size: write two programs"
        diagnostics.error(place, f"'{second}' has words of {other} bytes", notes=notes, hint=hint)
    return next(iter(sizes), 8)
