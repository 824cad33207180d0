"""
Compiled programs: from a file, a text or a builder to what can be inserted, and saved for other machines.

``load_program`` reads a program without looking for its module; the verbs of the command line begin with it.
``compile_file`` and its like also find the module on this machine, so that all mistakes show at once.
"""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.api import C_SUFFIX
from dprobes.diagnostics import Diagnostics
from dprobes.errors import FormatError
from dprobes.lazydataclass import dataclass
from dprobes.rpn.groups import select, without_opcodes
from dprobes.rpn.pipeline import CompileOptions, parse_file, parse_source
from dprobes.target.location import FileSymbols

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dprobes.dpc.modulefiles import ModuleFiles
    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.ppdf.model import Ppdf
    from dprobes.rpn.program import Program
    from dprobes.source import SourceFile
    from dprobes.target.location import SymbolProvider

__all__ = [
    "CompiledProgram",
    "compile_file",
    "compile_program",
    "compile_source",
    "compiled_bytes",
    "is_compiled",
    "load_c_source",
    "load_ppdf",
    "load_program",
    "read_compiled",
]


@dataclass(frozen=True)
class CompiledProgram:
    """
    Hold a program that can be inserted, with what is known of the symbols of its module.

    ``diagnostics`` are warnings and notes about it. ``ppdf`` is what was read from a ``.ppdf`` file, or built for
    certain modules, else None. ``templates`` maps the names of the template files that go with it to their bytes.
    ``companions`` are the programs for other modules that were written with it, and share its variables and tables;
    ``tool`` is what the tool executes of them.
    """

    program: Program
    symbols: SymbolProvider
    diagnostics: Diagnostics
    allow_write: bool = False
    ppdf: Ppdf | None = None
    templates: Mapping[str, bytes] = field(default_factory=dict)
    companions: tuple[Program, ...] = ()
    tool: ToolProgram | None = None

    @property
    def name(self) -> str:
        """The module that it probes."""
        return self.program.name

    @property
    def needs_write(self) -> bool:
        """Whether it changes or stops its target, and so must be allowed to."""
        from dprobes.resolve.portable import needs_write

        return self.ppdf.needs_write if self.ppdf is not None else needs_write(self.program)

    @property
    def text(self) -> str:
        """The program in the language, after the preprocessor."""
        from dprobes.rpn.printer import print_program

        return print_program(self.program)

    def select(self, groups: Iterable[str] = (), types: Iterable[str] = ()) -> CompiledProgram:
        """
        Return the program with the definitions of these groups and types only; without names all stay.

        Raise ``SourceError`` for an unknown name, and if nothing is left.
        """
        chosen = select(self.program, groups, types)
        if chosen is self.program:
            return self
        return replace(
            self, program=chosen, ppdf=_selected(self.ppdf, self.program, chosen) if self.ppdf is not None else None
        )

    def with_templates(self, directory: str | Path) -> CompiledProgram:
        """
        Return the program with templates of a directory, those that its records need, in the place of its own.

        They are saved with it, and whoever formats its records has them. Raise ``SourceError`` if one is wrong, and
        ``FormatError`` if they cannot be read.
        """
        from dprobes.formatters.templates.carried import carried_templates

        diagnostics = Diagnostics()
        diagnostics.extend(self.diagnostics)
        templates = carried_templates(Path(directory), self.program, diagnostics)
        ppdf = replace(self.ppdf, templates=templates) if self.ppdf is not None else None
        return replace(self, diagnostics=diagnostics, ppdf=ppdf, templates=templates)

    def to_bytes(self, modules: Iterable[str | Path] | None = None) -> bytes:
        """
        Return the program as the bytes of a ``.ppdf`` file, for the builds of its module in the files ``modules``.

        Without ``modules`` it is for what it was compiled for, or else for the module on this machine. Raise
        ``SourceError`` if it is wrong for one of them, and ``TargetError`` if there is none.
        """
        from dprobes.ppdf.writer import encode

        if modules is None and self.ppdf is not None:
            return encode(self.ppdf)
        return encode(_built(self, modules, with_ebpf=True))

    def save(self, path: str | Path, modules: Iterable[str | Path] | None = None) -> None:
        """Write ``to_bytes`` to a file, which ``load_ppdf`` and ``dprobes apply`` read where the sources are not."""
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

    ``defines`` and ``includes`` are for the preprocessor (``-D``, ``-I``). ``symbols`` is a file that gives the
    module's symbols (``--sym``). ``allow_write`` allows instructions that change or stop the target. ``modules`` are
    files of the module to compile it for; without them it is checked with the one on this machine, if there is one.

    Raise ``SourceError``, with all diagnostics, if there is anything wrong.
    """
    diagnostics = Diagnostics()
    options = _options(defines, includes, allow_write=allow_write)
    from dprobes.api.sourcefile import parse_program

    program, templates = parse_program(Path(path), diagnostics, options)
    return compile_program(
        program,
        symbols=symbols,
        allow_write=allow_write,
        modules=modules,
        diagnostics=diagnostics,
        templates=templates,
    )


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
    """Compile the text of a program, which messages call ``name``; all else is as with ``compile_file``."""
    from dprobes.source import SourceFile

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
    """Check a program that is data already, with files of templates; all else is as with ``compile_file``."""
    diagnostics = Diagnostics() if diagnostics is None else diagnostics
    provider = FileSymbols(Path(symbols) if symbols is not None else None)
    compiled = CompiledProgram(program, provider, diagnostics, allow_write, templates=templates or {})
    if modules is not None:
        return _with_ppdf(compiled, _built(compiled, modules, with_ebpf=False))
    from dprobes.resolve.localmodule import resolve_here

    resolve_here(program, diagnostics, allow_write=allow_write, symbols=provider)
    return compiled


def load_ppdf(
    path: str | Path, *, verify_build_id: bool = True, verify_opcodes: bool = True, allow_write: bool = False
) -> CompiledProgram:
    """
    Read a ``.ppdf`` file, which ``CompiledProgram.save`` and ``dprobes build`` write.

    It can be inserted into the builds of its module that it was made for; without ``verify_build_id`` into others too,
    and without ``verify_opcodes`` also where the instructions are not those of these builds. ``allow_write`` must be
    given for a program that ``needs_write``. Raise ``FormatError`` if the file is none, or damaged.
    """
    ppdf = read_compiled(Path(path))
    loaded = _carried(ppdf, str(path), verify_build_id=verify_build_id, verify_opcodes=verify_opcodes)
    program = ppdf.program if verify_opcodes else without_opcodes(ppdf.program)
    return replace(loaded, program=program, allow_write=allow_write)


# Below the functions that check at once: reading only


def load_program(
    path: Path,
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
    Read a program, be it a text or compiled, and keep the definitions of certain groups and types.

    ``module`` is that of probes in DProbes C that name none, ``files`` finds the files of modules for them. A source
    for several modules has companions.
    Nothing but its form is checked: its module is not looked for. Raise an error of ours if that is wrong.
    """
    if is_compiled(path):
        loaded = load_ppdf(path, verify_build_id=verify_build_id, verify_opcodes=verify_opcodes)
        return replace(loaded, program=select(loaded.program, groups, types), allow_write=options.allow_write)
    if path.suffix == C_SUFFIX:
        from dprobes.preprocessor import read_source

        loaded = load_c_source(read_source(path), options, symbols=symbols, module=module, files=files)
    else:
        diagnostics = Diagnostics()
        program = parse_file(path, diagnostics, options)
        loaded = CompiledProgram(program, FileSymbols(symbols), diagnostics, options.allow_write)
    chosen = [select(program, groups, types) for program in (loaded.program, *loaded.companions)]
    first, *others = chosen if verify_opcodes else map(without_opcodes, chosen)
    return replace(loaded, program=first, companions=tuple(others))


def load_c_source(
    source: SourceFile,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    module: str = "",
    files: ModuleFiles | None = None,
) -> CompiledProgram:
    """Compile a source in DProbes C; ``module`` is that of probes that name none. Else as ``load_program``."""
    diagnostics = Diagnostics()
    from dprobes.api.sourcefile import parse_c

    (first, *others), templates, tool = parse_c(source, diagnostics, options, module, files)
    symbols_of = FileSymbols(symbols)
    return CompiledProgram(
        first, symbols_of, diagnostics, options.allow_write, templates=templates, companions=tuple(others), tool=tool
    )


def is_compiled(path: Path) -> bool:
    """Return whether a file is a PPDF, be it a damaged one; what is not a regular file is not looked at."""
    from dprobes.ppdf.container import MAGIC

    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix == ".ppdf"
    except OSError:
        return False  # the reader of source text says what is wrong


def read_compiled(path: Path) -> Ppdf:
    """Return a PPDF; raise ``FormatError`` if it is none."""
    return _read_compiled(path)[0]


def compiled_bytes(path: Path) -> bytes:
    """Return the bytes of a PPDF, whatever a newer version has put into it; raise ``FormatError`` if it is none."""
    return _read_compiled(path)[1]


def _read_compiled(path: Path) -> tuple[Ppdf, bytes]:
    from dprobes.ppdf.container import SIZE_MAX
    from dprobes.ppdf.reader import decode

    with path.open("rb") as file:
        data = file.read(SIZE_MAX + 1)
    try:
        return decode(data), data
    except FormatError as error:
        raise FormatError(f"'{path}': {error.message}", hint=error.hint) from None


def _carried(ppdf: Ppdf, name: str, *, verify_build_id: bool, verify_opcodes: bool) -> CompiledProgram:
    from dprobes.target.carriedsymbols import CarriedSymbols, OtherBuild

    other = OtherBuild.REFUSE if verify_build_id else OtherBuild.NEAREST
    symbols = CarriedSymbols(ppdf.builds, name, other, verify_opcodes, ppdf.kernels)
    return CompiledProgram(ppdf.program, symbols, Diagnostics(), ppdf=ppdf, templates=ppdf.templates)


def _selected(ppdf: Ppdf, program: Program, chosen: Program) -> Ppdf:
    """Return the file of a part of its program."""
    from dprobes.resolve.portable import needs_write

    kept = [n for n, each in enumerate(program.definitions) if any(each is other for other in chosen.definitions)]
    numbers = {old: new for new, old in enumerate(kept)}
    builds = tuple(
        replace(
            build,
            places=tuple(
                replace(place, definition=numbers[place.definition])
                for place in build.places
                if place.definition in numbers
            ),
        )
        for build in ppdf.builds
    )
    kernels = tuple(
        replace(
            kernel,
            places=tuple(
                place._replace(definition=numbers[place.definition])
                for place in kernel.places
                if place.definition in numbers
            ),
        )
        for kernel in ppdf.kernels
    )
    return replace(ppdf, program=chosen, builds=builds, kernels=kernels, needs_write=needs_write(chosen), ebpf=())


def _with_ppdf(compiled: CompiledProgram, ppdf: Ppdf) -> CompiledProgram:
    carried = _carried(ppdf, compiled.name, verify_build_id=True, verify_opcodes=True)
    return replace(carried, diagnostics=compiled.diagnostics, allow_write=compiled.allow_write)


def _built(compiled: CompiledProgram, modules: Iterable[str | Path] | None, *, with_ebpf: bool) -> Ppdf:
    from dprobes.resolve.portable import build_ppdf, module_here

    if not isinstance(compiled.symbols, FileSymbols):
        raise FormatError(
            "a compiled program can be saved for the builds that it was made for only",
            hint="compile its source for the other modules",
        )
    if modules is None:
        paths = module_here(compiled.program, "name its file: modules=[...]")
    else:
        paths = [Path(module) for module in modules]
    return build_ppdf(
        compiled.program,
        paths,
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
