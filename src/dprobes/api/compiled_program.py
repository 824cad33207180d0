"""
Compiled programs: from a file, a source text or a builder to a program that can be inserted or saved.

``load_program`` reads a program without searching for its module; the verbs of the command line begin with it.
``compile_file`` and similar functions also find the module on this machine, so that all errors are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.api import C_SUFFIX
from dprobes.diagnostics import Diagnostics
from dprobes.errors import FormatError
from dprobes.rpn.compilation_passes import CompileOptions, parse_file, parse_source
from dprobes.rpn.rpn_program import select_all, without_opcodes
from dprobes.sets import is_set_path
from dprobes.target.probed_module import FileSymbols

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.name_scope import TypeListener
    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import SourceFile
    from dprobes.target.probed_module import SymbolProvider

__all__ = [
    "CompiledProgram",
    "ParsedSource",
    "compile_file",
    "compile_program",
    "compile_source",
    "compiled_bytes",
    "is_compiled",
    "load_ppdf",
    "load_program",
    "parse_c",
    "parse_programs",
    "read_compiled",
]

# Files of compiled programs: their detection and their contents.


def is_compiled(path: Path) -> bool:
    """Return whether a file is a PPDF, even a damaged one. Only regular files are opened; others return False."""
    from dprobes.ppdf.ppdf_sections import MAGIC

    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix == ".ppdf"
    except OSError:
        return False  # the reader of source text reports the problem


def read_compiled(path: Path) -> Ppdf:
    """Return a PPDF; raise ``FormatError`` if the file is not a valid one."""
    return _read_compiled(path)[0]


def compiled_bytes(path: Path) -> bytes:
    """Return the bytes of a PPDF, including additions of newer versions; raise ``FormatError`` if it is invalid."""
    return _read_compiled(path)[1]


def _read_compiled(path: Path) -> tuple[Ppdf, bytes]:
    from dprobes.ppdf.ppdf_file import decode
    from dprobes.ppdf.ppdf_sections import SIZE_MAX

    with path.open("rb") as file:
        data = file.read(SIZE_MAX + 1)
    try:
        return decode(data), data
    except FormatError as error:
        raise FormatError(f"'{path}': {error.message}", hint=error.hint) from None


# Source files of both languages as programs, with the templates in them.


_TEMPLATE_FILE = "program.fmt"


def parse_programs(
    source: Path | SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    *,
    module: str = "",
    files: ModuleFiles | None = None,
) -> ParsedSource:
    """
    Return the contents of a source file in RPN or DProbes C, or of an instrumentation set or its view.

    A ``SourceFile`` is in DProbes C. ``module`` is the default module of probes in DProbes C; ``files`` finds the files
    of modules for them. Raise ``SourceError`` for syntax errors.
    """
    from dprobes.source_text import SourceFile

    if not isinstance(source, SourceFile):
        if is_set_path(source):
            from dprobes.sets.set_program import set_source, with_probe_names

            text, options, names = set_source(source, options, files)
            parsed = parse_c(text, diagnostics, options, module, files)
            if (templates := parsed.templates.get(_TEMPLATE_FILE)) is None:
                return parsed
            named = with_probe_names(templates.decode(), names).encode()
            return parsed._replace(templates={**parsed.templates, _TEMPLATE_FILE: named})
        if source.suffix != C_SUFFIX:
            return ParsedSource((parse_file(source, diagnostics, options),), {}, None)
        from dprobes.preprocessor import read_source

        source = read_source(source)
    return parse_c(source, diagnostics, options, module, files)


class ParsedSource(NamedTuple):
    """The programs of a source, one for each module, their templates, and the blocks that dprobes itself executes."""

    programs: tuple[Program, ...]
    templates: Mapping[str, bytes]
    tool: ToolProgram | None


def parse_c(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    module: str,
    files: ModuleFiles | None = None,
    tell_type: TypeListener | None = None,
) -> ParsedSource:
    """
    Parse and compile a source in DProbes C.

    ``tell_type`` is called with the type of each expression and parameter, unless it is None. The other arguments are
    those of ``parse_programs``.
    """
    from dprobes.dpc.compiler import compile_source as compile_c
    from dprobes.formatters.templates.template_directory import DIRECTORY_FILE

    compiled = compile_c(source, diagnostics, options, module=module, files=files, tell_type=tell_type)
    if not compiled.templates:
        return ParsedSource(compiled.programs, {}, compiled.tool)
    listed = f"{compiled.programs[0].major} {_TEMPLATE_FILE}\n"
    templates = {DIRECTORY_FILE: listed.encode(), _TEMPLATE_FILE: compiled.templates.encode()}
    return ParsedSource(compiled.programs, templates, compiled.tool)


@dataclass(frozen=True)
class CompiledProgram:
    """
    Program that can be inserted, with the symbols of its module.

    * ``diagnostics`` has warnings and notes about it.
    * ``ppdf`` is the contents of a ``.ppdf`` file, or was built for certain modules; otherwise it is None.
    * ``templates`` maps the names of its template files to their bytes.
    * ``companions`` has the programs for other modules from the same source, which share its variables and tables.
      ``companion_symbols`` has the symbols of each, if they differ.
    * ``tool`` has the blocks of the tool, or is None.
    """

    program: Program
    symbols: SymbolProvider
    diagnostics: Diagnostics
    allow_write: bool = False
    ppdf: Ppdf | None = None
    templates: Mapping[str, bytes] = field(default_factory=dict)
    companions: tuple[Program, ...] = ()
    tool: ToolProgram | None = None
    companion_symbols: tuple[SymbolProvider, ...] = ()

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program and its companions."""
        return (self.program, *self.companions)

    @property
    def all_symbols(self) -> tuple[SymbolProvider, ...]:
        """The symbols for each of ``programs``."""
        return (self.symbols, *(self.companion_symbols or (self.symbols,) * len(self.companions)))

    @property
    def is_joined(self) -> bool:
        """True if the source is for several modules, or has ``begin``, ``every`` or ``end`` blocks."""
        return bool(self.companions) or self.tool is not None

    @property
    def name(self) -> str:
        """The name of the probed module."""
        return self.program.name

    @property
    def needs_write(self) -> bool:
        """True if a handler changes or stops its target. Insertion then needs ``allow_write``."""
        from dprobes.resolve.portable_program import needs_write

        if self.ppdf is not None:
            return any(each.needs_write for each in self.ppdf.members)
        return any(map(needs_write, self.programs))

    @property
    def text(self) -> str:
        """The source text of the program in RPN, after preprocessing."""
        from dprobes.rpn.program_text import print_program

        return "\n".join(map(print_program, self.programs))

    def select(self, groups: Iterable[str] = (), types: Iterable[str] = ()) -> CompiledProgram:
        """
        Return the program with only the definitions in one of ``groups`` and with one of ``types``.

        An empty argument selects all. Raise ``SourceError`` for an unknown name, and if no definition remains.
        """
        chosen = select_all(self.programs, groups, types)
        if chosen == self.programs:
            return self
        ppdf = self.ppdf
        if ppdf is not None:
            from dprobes.resolve.portable_program import selected

            first, *others = map(selected, ppdf.members, self.programs, chosen)
            ppdf = replace(first, companions=tuple(others))
        return replace(self, program=chosen[0], companions=tuple(chosen[1:]), ppdf=ppdf)

    def without_opcodes(self) -> CompiledProgram:
        """
        Return the program without the ``opcode =`` statements that have no effect.

        It must not have been compiled into a PPDF.
        """
        first, *others = map(without_opcodes, self.programs)
        return replace(self, program=first, companions=tuple(others))

    def with_templates(self, directory: str | Path) -> CompiledProgram:
        """
        Return the program with its templates replaced by those from ``directory`` that its records need.

        The templates are saved with the program, and available wherever its records are formatted. Raise
        ``SourceError`` for an error in a template, and ``FormatError`` if a file cannot be read.
        """
        from dprobes.formatters.templates.carried_templates import carried_templates
        from dprobes.rpn.rpn_program import joined_program

        diagnostics = Diagnostics()
        diagnostics.extend(self.diagnostics)
        templates = carried_templates(Path(directory), joined_program(self.programs), diagnostics)
        ppdf = replace(self.ppdf, templates=templates) if self.ppdf is not None else None
        return replace(self, diagnostics=diagnostics, ppdf=ppdf, templates=templates)

    def to_bytes(self, modules: Iterable[str | Path] | None = None) -> bytes:
        """
        Return the bytes of a ``.ppdf`` file with the program, for the builds of its module in the files ``modules``.

        Without ``modules``, the builds are those of its compilation, or else the module on this machine. Raise
        ``SourceError`` if the program does not fit a build, and ``TargetError`` if there is no build.
        """
        from dprobes.ppdf.ppdf_file import encode

        if modules is None and self.ppdf is not None:
            return encode(self.ppdf)
        return encode(_built(self, modules, with_ebpf=True))

    def save(self, path: str | Path, modules: Iterable[str | Path] | None = None) -> None:
        """Write ``to_bytes`` to a file. ``load_ppdf`` and ``dprobes apply`` read it without the sources."""
        Path(path).write_bytes(self.to_bytes(modules))


def compile_file(
    path: str | Path,
    *,
    defines: Mapping[str, str | int] | None = None,
    includes: Iterable[str | Path] = (),
    symbols: str | Path | None = None,
    allow_write: bool = False,
    modules: Iterable[str | Path] | None = None,
) -> CompiledProgram:
    """
    Compile a ``.rpn`` or ``.dpc`` file, as ``dprobes check`` does.

    ``defines`` and ``includes`` are for the preprocessor (``-D``, ``-I``). ``symbols`` is a file with the module's
    symbols (``--sym``). ``allow_write`` allows instructions that change or stop the target. ``modules`` has the files
    of the module for which the program is compiled. By default, the program is checked against the module on this
    machine, if there is one.

    Raise ``SourceError`` with all diagnostics if there are errors.
    """
    diagnostics = Diagnostics()
    options = _options(defines, includes, allow_write=allow_write)

    source = parse_programs(Path(path), diagnostics, options)
    return _compiled(source, symbols, diagnostics, modules, allow_write=allow_write)


def compile_source(
    text: str,
    *,
    name: str = "program.rpn",
    defines: Mapping[str, str | int] | None = None,
    includes: Iterable[str | Path] = (),
    symbols: str | Path | None = None,
    allow_write: bool = False,
    modules: Iterable[str | Path] | None = None,
) -> CompiledProgram:
    """
    Compile the source text of a program in RPN. ``name`` is its file name in messages.

    The other arguments are those of ``compile_file``.
    """
    from dprobes.source_text import SourceFile

    diagnostics = Diagnostics()
    options = _options(defines, includes, allow_write=allow_write)
    program = parse_source(SourceFile(name, text), diagnostics, options)
    return compile_program(program, symbols=symbols, allow_write=allow_write, modules=modules, diagnostics=diagnostics)


def compile_program(
    program: Program,
    *,
    symbols: str | Path | None = None,
    allow_write: bool = False,
    modules: Iterable[str | Path] | None = None,
    diagnostics: Diagnostics | None = None,
    templates: Mapping[str, bytes] | None = None,
) -> CompiledProgram:
    """
    Check a parsed program and find its probepoints; return it as a compiled program.

    ``templates`` maps the names of template files to their bytes. The other arguments and the errors are those of
    ``compile_file``.
    """
    diagnostics = Diagnostics() if diagnostics is None else diagnostics
    source = ParsedSource((program,), templates or {}, None)
    return _compiled(source, symbols, diagnostics, modules, allow_write=allow_write)


def _compiled(
    source: ParsedSource,
    symbols: str | Path | None,
    diagnostics: Diagnostics,
    modules: Iterable[str | Path] | None,
    *,
    allow_write: bool,
) -> CompiledProgram:
    provider = FileSymbols(Path(symbols) if symbols is not None else None)
    compiled = _of_source(source, provider, diagnostics, allow_write=allow_write)
    if modules is not None:
        return _with_ppdf(compiled, _built(compiled, modules, with_ebpf=False))
    from dprobes.resolve.local_module import resolve_here

    for program in source.programs:
        resolve_here(program, diagnostics, allow_write=allow_write, symbols=provider)
    return compiled


def _of_source(
    source: ParsedSource, symbols: SymbolProvider, diagnostics: Diagnostics, *, allow_write: bool
) -> CompiledProgram:
    first, *others = source.programs
    return CompiledProgram(
        first,
        symbols,
        diagnostics,
        allow_write,
        templates=source.templates,
        companions=tuple(others),
        tool=source.tool,
    )


def load_ppdf(
    path: str | Path, *, verify_build_id: bool = True, verify_opcodes: bool = True, allow_write: bool = False
) -> CompiledProgram:
    """
    Read a ``.ppdf`` file, which ``CompiledProgram.save`` and ``dprobes build`` write.

    The program can be inserted into the builds of its module for which it was made. Without ``verify_build_id``, it can
    be inserted into other builds, too. Without ``verify_opcodes``, the instructions at its probepoints may differ from
    those of these builds. ``allow_write`` is required for a program that ``needs_write``. Raise ``FormatError`` if the
    file is damaged or not a PPDF.
    """
    ppdf = read_compiled(Path(path))
    loaded = _carried(ppdf, str(path), verify_build_id=verify_build_id, verify_opcodes=verify_opcodes)
    if not verify_opcodes:
        first, *others = map(without_opcodes, loaded.programs)
        loaded = replace(loaded, program=first, companions=tuple(others))
    return replace(loaded, allow_write=allow_write)


# A lower layer than the functions that also check: only reading


def load_program(
    source: Path | SourceFile,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    groups: Sequence[str] = (),
    types: Sequence[str] = (),
    verify_build_id: bool = True,
    verify_opcodes: bool = True,
    module: str = "",
    files: ModuleFiles | None = None,
) -> CompiledProgram:
    """
    Read a program, source or compiled, and keep the definitions of certain groups and types.

    ``module`` is the default module of probes in DProbes C; ``files`` finds the files of their modules. The programs
    for further modules become companions. Only syntax or file format is checked: the module is not searched for. Raise
    a subclass of ``DprobesError`` for errors.
    """
    if isinstance(source, Path) and is_compiled(source):
        loaded = load_ppdf(source, verify_build_id=verify_build_id, verify_opcodes=verify_opcodes)
        first, *others = select_all(loaded.programs, groups, types)
        return replace(loaded, program=first, companions=tuple(others), allow_write=options.allow_write)
    diagnostics = Diagnostics()
    parsed = parse_programs(source, diagnostics, options, module=module, files=files)
    loaded = _of_source(parsed, FileSymbols(symbols), diagnostics, allow_write=options.allow_write)
    loaded = loaded.select(groups, types)
    return loaded if verify_opcodes else loaded.without_opcodes()


def _carried(ppdf: Ppdf, name: str, *, verify_build_id: bool, verify_opcodes: bool) -> CompiledProgram:
    from dprobes.target.carried_symbols import CarriedSymbols, OtherBuild

    other = OtherBuild.REFUSE if verify_build_id else OtherBuild.NEAREST
    programs = [each.program for each in ppdf.members]
    symbols = [CarriedSymbols(each.builds, name, other, verify_opcodes, each.kernels) for each in ppdf.members]
    return CompiledProgram(
        programs[0],
        symbols[0],
        Diagnostics(),
        ppdf=ppdf,
        templates=ppdf.templates,
        companions=tuple(programs[1:]),
        tool=ppdf.blocks,
        companion_symbols=tuple(symbols[1:]),
    )


def _with_ppdf(compiled: CompiledProgram, ppdf: Ppdf) -> CompiledProgram:
    carried = _carried(ppdf, compiled.name, verify_build_id=True, verify_opcodes=True)
    return replace(carried, diagnostics=compiled.diagnostics, allow_write=compiled.allow_write)


def _built(compiled: CompiledProgram, modules: Iterable[str | Path] | None, *, with_ebpf: bool) -> Ppdf:
    from dprobes.resolve.portable_program import build_joined, files_of_modules

    if not isinstance(compiled.symbols, FileSymbols):
        raise FormatError(
            "a compiled program can be saved for the builds that it was made for only",
            hint="compile its source for the other modules",
        )
    paths = [Path(module) for module in modules or ()]
    if modules is None or len(compiled.programs) > 1:
        files = files_of_modules(compiled.programs, paths, "name its file: modules=[...]")
    else:
        files = [paths]
    return build_joined(
        compiled.programs,
        files,
        compiled.tool,
        compiled.diagnostics,
        extra_symbols=compiled.symbols.extra,
        allow_write=compiled.allow_write,
        with_ebpf=with_ebpf,
        templates=compiled.templates,
    )


def _options(
    defines: Mapping[str, str | int] | None, includes: Iterable[str | Path], *, allow_write: bool
) -> CompileOptions:
    return CompileOptions(
        tuple((key, str(value)) for key, value in (defines or {}).items()),
        tuple(Path(directory) for directory in includes),
        allow_write=allow_write,
    )
