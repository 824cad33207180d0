"""
Compilation of a DProbes C program to RPN programs: the passes in their order.

    parse  →  find instructions  →  type, fold  →  emit

The result is an RPN program for each module, with its templates.
"""

from __future__ import annotations

import enum
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.dpc.syntax.syntax_tree import Declaration, Function, Probe, ProgramTree
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.name_scope import ProbedModule, TypeListener
    from dprobes.dpc.typedtree.typed_program import TypedBlock, TypedFunction
    from dprobes.preprocessor import Preprocessed
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import SourceFile

__all__ = [
    "PASSES",
    "CompiledSource",
    "Passes",
    "compile_source",
    "compile_text",
    "dump_lines",
    "in_c",
    "token_lines",
    "tree_lines",
]

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
    """Return the names of the fields of a node, dataclass or named tuple. Any other value has none."""
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
    Compile a program. There is one compilation for each module.

    * ``module`` is the module of probepoints that name none.
    * ``word_size_of`` returns the word size of a module in bytes, 4 or 8. ``module_of`` returns the module's
      description, or None if it is unknown. ``tell_modules`` receives the names of all modules before these two are
      called.
    * ``places`` finds instructions by debug information. Without it, no source line and no inlined call has
      instructions.
    * ``note`` receives the results of passes, ``tell_type`` the types of expressions and parameters.

    Raise ``SourceError`` if the program has errors.
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
        compilations = emitter.compilations() if program.parts else []
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
    Report a RecursionError in the ``with`` block, at ``span``, as an expression that is nested too deeply.

    The parser limits nesting in brackets, but a chain of operators nests without brackets.
    """
    try:
        yield
    except RecursionError:
        message = "there is an expression with too many operators here"
        diagnostics.error(span, message, hint="keep parts of it in variables")


def _outline(program: ProgramTree, typer: ProgramTyper, word_size: int, module: str) -> list[Compilation]:
    """Return programs with empty handlers for a source with errors, so that its probepoints can be resolved."""
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


_ENDINGS = {"1": "debugger()", "2": "crash()", "3": "core()"}
_NAMES = {"procid": "cpu", "time": "nsecs"}
"""DProbes C names of system variables, by their RPN names, where the two differ."""
_VARIABLES = {"vars": "static", "gvars": "global", "cvars": "percpu", "tvars": "thread"}

_OF_SIZE = {1: "char", 2: "short", 4: "int", 8: "long"}
"""C types by the size in bytes of the watched object."""


def _watched(match: re.Match[str]) -> str:
    """Return a matched RPN address range of a watchpoint in C: the type of its size and the symbol, in hexadecimal."""
    name, first, last = match[1], match[2] or "", match[3] or match[2] or ""
    size = int(last or "0", 16) - int(first or "0", 16) + 1
    return f"'({_OF_SIZE.get(size, 'char')}){name}{first and '+'}{first}' as what is watched"


_WORDS = (
    # instructions, which messages quote
    (r"'pop [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be changed"""),
    (r"'push [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be read"""),
    (r"^allowed: ('[^']+'(?:, '[^']+')*)$", r"RPN has \1 for it"),
    (r"'push (?:[ru]|entry), (arg[0-5]|retval|pc|sp)'", r"'\1'"),
    (r"'push (?:[ru]|entry), (\w+)'", r"""'reg("\1")'"""),
    (r"'pop r, (\w+)'", r"""'reg("\1") = …'"""),
    (r"'push tp, FIELD', or 'reg\(\"\w+\"\)' for that of the program", "the name of a field"),
    (r"'push tp, FIELD', or '\w+' for that of the program", "the name of a field"),
    (r"'push tp, FIELD': a system call has its arguments at its end as well",
     "the name of a field: a system call has its arguments at its end as well"),
    (r"'push tp, (\w+)'", r"'\1'"),
    (r"'push usdt, (\d+)'", lambda match: f"'arg{int(match[1]) - 1}'"),
    (r"'push (pid|tid|uid|procid|time|elapsed)'", lambda match: f"'{_NAMES.get(match[1], match[1])}'"),
    (r"'push mem, [us]\d+'", "'*p'"),
    (r"'pop mem, [us]\d+'", "'*p = …'"),
    (r"'log ([ku])stack(?:, (\d+))?'", lambda match: f"'{match[1]}stack({match[2] or ''})'"),
    (r"'log str'", "'str(p)'"),
    (r"'log mrf'", "'mem(p, n)'"),
    (r"'match str[^']*'", "a comparison of strings"),
    (r"'exit ([123])'(?: \([^)]*\))?", lambda match: f"'{_ENDINGS[match[1]]}'"),
    (r"; here it acts as 'exit'", "; here it only ends the hit"),
    (r"'tally' cannot look at table", "there is no looking at table"),
    # table keys
    (r"\bthe key 'kstack' of table", "the key 'kstack()' of table"),
    (r"'ustack\[(\d+)\]'", r"'ustack(\1)'"),
    (r"\btable '_'", "table '@'"),
    (r"\btable '(\w+)'", r"table '@\1'"),
    (r"; give it a smaller 'room ='", ""),
    # header statements
    (r"the program has no '(group|type)def ='", r"no probe has a '\1'"),
    (r"write name = (\"[^\"]*/[^\"]*\")", r"write \1: before the place"),
    (r"name = (\"[^\"]+\")", r"'kmod \1:' before the place"),
    (r"'address = ([^']+)' and 'watchpoint = w' \(or rw\)", r"'watch w \1' (or rw)"),
    (r"'address = ([A-Za-z_]\w*)(?: \+ (0x\w+))?(?: : \1(?: \+ (0x\w+))?)?'", _watched),
    (r"'address = ([^']+)'", r"'\1' after 'watch'"),
    (r"'opcode ='", "'opcode'"),
    (r"'opcode = (\w+)'", r"'[opcode \1]' before the place"),
    (r"'(minor|maxhits|passcount|major|jmpmax|logmax) = (\w+)'", r"'\1 \2'"),
    (r"'offset = usdt:PROVIDER:NAME'", "'usdt MODULE:PROVIDER:NAME'"),
    (r"'offset = usdt:([^']+)'", r"'usdt MODULE:\1'"),
    (r"'offset = SUBSYSTEM:NAME' or 'offset = syscall:NAME'", "'tracepoint SUBSYSTEM:NAME' or 'syscall NAME'"),
    (r"'offset = ([^']+)'", r"'\1'"),
    (r"\boffset = (\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+)", r"\1"),
    (r"'offset ='", "a place"),
    (r"'return = yes'", "'return'"),
    (r"'sampler ='", "'sample'"),
    (r"'watchpoint = (\w+)'", r"'watch \1'"),
    (r"'modtype = kernel' and 'name = vmlinux' in the file header", "'kernel:' before the place"),
    (r"'modtype = tracepoint' and 'name = vmlinux' in the file header", "'tracepoint' before the place"),
    (r"'modtype = tracepoint'( in the file header)?", "'tracepoint'"),
    (r"'name = vmlinux' and 'modtype = kernel'", "'kernel:' before the place"),
    (r"'name = (\w+)' and 'modtype = kmod'", r"'kmod \1:' before the place"),
    (r"'name = vmlinux', or 'modtype = kmod' for a module of the kernel",
     "'kernel:', or 'kmod NAME:' for a module of the kernel"),
    (r"'modtype = kernel'", "'kernel:'"),
    (r"'modtype = kmod'", "'kmod'"),
    (r"a program of the type 'user' is hit outside of the kernel", "a probe in a program is hit outside of the kernel"),
    (r"a program about the kernel", "a probe in the kernel"),
    (r"'(g|c|t|)vars = (\d+)'", lambda match: f"at most {match[2]} {_VARIABLES[match[1] + 'vars']} variables"),
    # exceptions
    (r"catch it with 'sx', or see where it is raised with 'autostacktrace = yes'", "catch it with 'try'"),
)  # fmt: skip


def in_c(message: str) -> str:
    """Return a message with the terms of RPN replaced by those of C."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


class CompiledSource(NamedTuple):
    """
    Programs of the modules, in the order in which the source names the modules, and the RPN source of each.

    The programs share their variables and tables. ``templates`` is the text of their template file, which is empty
    without output. ``tool`` is the program that dprobes executes, or None if the source has no ``begin``, ``every`` or
    ``end``.
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
    Compile a source to RPN programs, one for each module.

    ``module`` is the module of probepoints that name none, ``files`` finds the files of modules. ``tell_type`` receives
    the types of expressions and parameters, also for a source with errors. Raise ``SourceError`` for errors. If only
    handlers have errors, the exception has an outline: the programs with empty handlers.
    """
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.errors import SourceError
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.rpn_parser import parse

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
        diagnostics.error(text.span(0, 0), "the program has no probe and no 'begin', 'every' or 'end' block")
    programs = [parse(each.preprocessed(), diagnostics, has_blocks=tool is not None) for each in found]
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
    Return the result of the pass ``name`` for a source, as lines (``compiler.PASSES``).

    ``files`` finds the files of modules. Raise ``SourceError`` if the pass has no result because of errors.
    """
    from dprobes.dpc.modules.probed_modules import ModuleFiles
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
    from dprobes.dpc.emitters.program_emitter import template_file

    templates = {minor: text for compilation in found for minor, text in compilation.templates.items()}
    return template_file(found[0].major, templates) if templates else ""
