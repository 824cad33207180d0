"""The verb ``build``: compilation of a program for certain builds of its module, to a PPDF."""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.api import C_SUFFIX
from dprobes.api.compiled_program import is_compiled, parse_programs
from dprobes.cli import console
from dprobes.cli.console import Progress, print_lines
from dprobes.cli.option_values import compile_options, program_of
from dprobes.cli.record_options import templates_option
from dprobes.cli.resolved_program import is_c, kernel_types_in, source_of
from dprobes.cli.shared_options import (
    PROGRAM,
    PROGRAM_FILE,
    kernel_types_option,
    program_options,
    symbols_option,
    text_option,
)
from dprobes.diagnostics import Diagnostics, Severity
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.rpn_program import ModuleType
from dprobes.sets import is_set_path, view_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Program

__all__ = ["build_command"]

SUFFIX = ".ppdf"

DUMPS = ("source", "tokens", "tree", "places", "typed", "rpn")
"""The passes of the compiler (``dpc.compiler.PASSES``)."""


@click.command("build")
@click.argument("file", type=PROGRAM, required=False)
@text_option("Compile")
@click.option(
    "-o",
    "--output",
    type=PROGRAM_FILE,
    metavar="OUT",
    help=f"Write there; the default is FILE's name with {SUFFIX}, in the current directory.",
)
@click.option(
    "--for", "modules", multiple=True, type=PROGRAM_FILE, metavar="LIB",
    help="Compile for the build of the module, or for the kernel, in this file; may be given several times.",
)  # fmt: skip
@click.option(
    "--emit",
    "emitted",
    type=click.Choice(("rpn", "bpf")),
    help="Print the program as RPN source, or as eBPF for this kernel, and build nothing.",
)
@click.option(
    "--dump", "dumped", metavar="PASS", type=click.Choice(DUMPS),
    help=f"Print FILE after this pass of the DProbes C compiler, and build nothing: {', '.join(DUMPS)}."
)  # fmt: skip
@program_options
@symbols_option
@kernel_types_option
@templates_option("Add the templates of its records from this directory to OUT.")
def build_command(
    file: Path | None,
    text: str | None,
    output: Path | None,
    modules: tuple[Path, ...],
    emitted: str | None,
    dumped: str | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    kernel_types: Path | None,
    templates: Path | None,
) -> int:
    """
    Compile the probe program FILE for machines that have neither its source nor its module's symbols.

    The result contains the program and, for each build of its module, the symbols that it needs and the instructions
    expected at its probepoints. 'dprobes apply' and 'dprobes run' accept it as FILE, and refuse other builds of the
    module. Without --for the program is compiled for the module on this machine.

    For the kernel, --for names a vmlinux with symbols, or a vmlinuz beside its System.map; for a kernel module, its .ko
    file. In kernels that --for does not name, the places of the program are looked up by name at insertion.
    """
    from dprobes.formatters.templates.carried_templates import carried_templates
    from dprobes.ppdf.ppdf_file import encode
    from dprobes.resolve.portable_program import build_joined, files_of_modules
    from dprobes.rpn.rpn_program import joined_program

    chosen = program_of(file, text)
    if file is not None and is_compiled(file):
        raise click.UsageError(f"'{file}' is compiled already")
    if dumped is None and emitted is None:
        output = _output(file, output)
    diagnostics = Diagnostics()
    options = compile_options(defines, includes, cpp, allow_write=allow_write)
    files_of = partial(_files, chosen, symbols, kernel_types)
    if dumped is not None:
        print_lines(_dump(chosen, diagnostics, options, dumped, files_of(modules)))
        return 0
    if emitted == "bpf":
        from dprobes.cli.resolved_program import compile_programs
        from dprobes.engines.engine_registry import code_listing

        for number, compiled in enumerate(
            compile_programs(chosen, options, symbols=symbols, kernel_types=kernel_types)
        ):
            print_lines([""] if number else [])
            print_lines(code_listing(compiled))
        return 0
    if emitted is not None:
        print_lines(_rpn_source(chosen, diagnostics, options, files_of, modules).splitlines())
        return 0
    assert output is not None
    source = parse_programs(
        source_of(chosen) if isinstance(chosen, str) else chosen,
        diagnostics,
        options,
        files=files_of(modules),
    )
    found = files_of_modules(source.programs, modules, "name its file with --for FILE", has_kernel=kernel_types is None)
    if is_c(chosen):
        _check_same(chosen, options, files_of, modules, found)
    if len(source.programs) == 1:
        _doubt_names(source.programs[0], found[0], diagnostics)
    files = source.templates
    if templates is not None:
        files = carried_templates(templates, joined_program(source.programs), diagnostics)
    with Progress("compiling the program"):
        ppdf = build_joined(
            source.programs,
            found,
            source.tool,
            diagnostics,
            extra_symbols=symbols,
            allow_write=allow_write,
            templates=files,
        )
    if said := "\n".join(d.render() for d in diagnostics if d.severity is Severity.WARNING):
        console.write(said)
    _write(output, encode(ppdf))
    console.note(f"'{output}' {_purpose(ppdf)}")
    return 0


def _output(file: Path | None, output: Path | None) -> Path:
    """Return the output file; raise a usage error if it has no name, or is the program itself."""
    if output is None and (file is None or str(file) == "-"):
        where = "on the command line" if file is None else "from standard input"
        raise click.UsageError(f"a program {where} needs a name for what is built: -o OUT")
    if output is None:
        assert file is not None
        output = Path(_stem(file) + SUFFIX)
    if file is not None and output.exists() and file.exists() and output.samefile(file):
        raise click.UsageError(f"'{output}' is the program itself; name another file with -o")
    return output


def _stem(file: Path) -> str:
    """Return the name of a compiled program without its suffix: that of the source, the set, or the set and view."""
    if not is_set_path(file):
        return file.stem
    view = view_in(file)
    return file.absolute().parent.name if view is None else f"{file.absolute().parent.parent.name}.{view}"


def _dump(
    program: Path | str, diagnostics: Diagnostics, options: CompileOptions, name: str, files: ModuleFiles | None
) -> list[str]:
    """
    Return the lines of ``--dump``: the result of compiler pass ``name`` for a program in DProbes C.

    Raise a usage error for a program in RPN.
    """
    from dprobes.dpc.compiler import dump_lines

    if not is_c(program):
        raise click.UsageError(f"--dump is for programs in DProbes C, whose names end in {C_SUFFIX}")
    return dump_lines(source_of(program), diagnostics, options, name, files)


def _files(
    program: Path | str, symbols: Path | None, kernel_types: Path | None, modules: Sequence[Path]
) -> ModuleFiles | None:
    """Return the finder of modules' files for DProbes C, or None for a program in RPN. ``modules`` come first."""
    if not is_c(program):
        return None
    from dprobes.dpc.modules.probed_modules import ModuleFiles

    types = None if kernel_types is None else kernel_types_in(kernel_types)
    return ModuleFiles(symbols=symbols, named=modules, kernel_types=types)


def _check_same(
    program: Path | str,
    options: CompileOptions,
    files_of: Callable[[Sequence[Path]], ModuleFiles | None],
    modules: Sequence[Path],
    found: Sequence[Sequence[Path]],
) -> None:
    """Raise an error if the contents of a program differ between the builds ``found`` of a module."""
    for builds in found:
        others = [module for module in modules if module not in builds]
        sources = [_rpn_source(program, Diagnostics(), options, files_of, (module, *others)) for module in builds[1:]]
        first = _rpn_source(program, Diagnostics(), options, files_of, (builds[0], *others)) if sources else ""
        for module, source in zip(builds[1:], sources, strict=True):
            if source != first:
                what = "the text of -e" if isinstance(program, str) else f"'{program}'"
                raise TargetError(
                    f"{what} becomes another program for '{module}' than for '{builds[0]}': "
                    "their types or variables differ",
                    hint="build a file for each of them",
                )


def _rpn_source(
    program: Path | str,
    diagnostics: Diagnostics,
    options: CompileOptions,
    files_of: Callable[[Sequence[Path]], ModuleFiles | None],
    modules: Sequence[Path],
) -> str:
    """
    Return a program as RPN source. A source in DProbes C is compiled, and its lines become comments.

    ``files_of`` returns the finder of modules' files, in which ``modules`` come first.
    """
    if not is_c(program):
        from dprobes.rpn.program_text import print_program

        return print_program(parse_programs(Path(program), diagnostics, options).programs[0])
    from dprobes.dpc.compiler import compile_source

    return compile_source(source_of(program), diagnostics, options, files=files_of(modules)).rpn


def _purpose(ppdf: Ppdf) -> str:
    """Return a clause, without its subject, about the builds of each module that a PPDF was compiled for."""
    if not ppdf.companions:
        return _purpose_of_one(ppdf)
    return "; ".join(f"for '{each.program.name}' it {_purpose_of_one(each)}" for each in ppdf.members)


def _purpose_of_one(ppdf: Ppdf) -> str:
    if count := len(ppdf.builds) or len(ppdf.kernels):
        return f"is for {count} build{'s' if count != 1 else ''} of '{ppdf.program.name}'"
    if space_of(ppdf.program) is Space.KERNEL:
        return "is for any build of the kernel: its places are found by name"
    return "uses no symbols or types of any module"


def _doubt_names(program: Program, modules: Sequence[Path], diagnostics: Diagnostics) -> None:
    """Print a warning about files that do not match the module's name."""
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_lookup import matches

    for path in modules if program.modtype is ModuleType.USER else ():
        soname = ElfFile.open(path).soname
        if not matches(program.name, path, soname):
            called = f", and its SONAME is '{soname}'" if soname is not None else ""
            diagnostics.warning(
                program.spans.get("name"), f"'{path}' is not called '{program.name}'{called}: is it the module?"
            )


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically: an existing one remains until the new one is complete."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a pipe, or a device
        return
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(draft).chmod(0o666 & ~umask)
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise
