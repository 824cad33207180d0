"""Loading of a program, source or compiled, and resolution of its probepoints, for run, check and show."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.api import C_SUFFIX, compiled_program
from dprobes.cli.option_values import usage_error
from dprobes.errors import DprobesError, SourceError
from dprobes.resolve.local_module import ResolvedProgram, resolve_here
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.sets import is_set_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.api.compiled_program import CompiledProgram
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.engines.engine_interface import Scope
    from dprobes.runs.run_steps import Vantage
    from dprobes.source_text import SourceFile
    from dprobes.target.btf import Btf

__all__ = [
    "ResolvedProgram",
    "check_promises",
    "compile_programs",
    "files_of",
    "is_c",
    "kernel_types_in",
    "load_program",
    "module_of",
    "source_of",
]


def load_program(
    path: Path | str,
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
    Read a program, and keep the definitions of certain groups and types; raise ``DprobesError`` for its errors.

    ``path`` may also be the text of a program in DProbes C, whose default module is ``module``. ``symbols`` is the
    value of ``--sym``. Options that do not apply to a compiled program are usage errors.
    """
    source = source_of(path) if isinstance(path, str) else path
    has_options = symbols is not None or options != CompileOptions(allow_write=options.allow_write)
    if has_options and isinstance(source, Path) and compiled_program.is_compiled(source):
        raise usage_error(f"'{path}' is compiled: -D, -I, --cpp and --sym are for the text of a program")
    return compiled_program.load_program(
        source,
        options,
        symbols=symbols,
        groups=groups,
        types=types,
        verify_build_id=verify_build_id,
        verify_opcodes=verify_opcodes,
        module=module,
        files=files,
    )


def is_c(path: Path | str) -> bool:
    """Return whether a program is in DProbes C: a text and a set are, and a file depends on its name."""
    return isinstance(path, str) or path.suffix == C_SUFFIX or is_set_path(path)


def source_of(path: Path | str) -> SourceFile:
    """Return the source of a program, a text or in a file; raise ``SourceError`` if that cannot be read."""
    if isinstance(path, str):
        from dprobes.source_text import SourceFile

        return SourceFile("-e", path)
    from dprobes.preprocessor import read_source

    return read_source(path)


def module_of(scope: Scope) -> str:
    """
    Return the program that a command or process executes, which is the default module of probes.

    It is a path if that leads to the same file in the file system of dprobes. Otherwise it is a name: for a command
    that the shell would search, and for a process with a different file system. It is empty if the target is that of an
    endpoint: then the command starts the endpoint, and the process is not on this machine.
    """
    if scope.endpoint is not None:
        return ""
    if scope.command:
        command = scope.command[0]
        return str(Path(command).absolute()) if "/" in command else command
    return _program_of(scope.pid) if scope.pid is not None else ""


def _program_of(pid: int) -> str:
    link = Path(f"/proc/{pid}/exe")
    try:
        path = link.readlink()
        # The kernel appends "(deleted)" to the path of a deleted file.
        return str(path) if path.exists() and path.samefile(link) else path.name.removesuffix(" (deleted)")
    except OSError:
        return ""


def files_of(
    path: Path | str,
    symbols: Path | None,
    vantage: Vantage | None = None,
    pid: int | None = None,
    kernel_types: Path | None = None,
) -> ModuleFiles | None:
    """
    Return the finder of modules' files for a program in DProbes C, or None for a program in RPN.

    It searches the file system of the vantage's or the given process. The kernel of the vantage's engine may differ
    from the running one. ``kernel_types`` is a file with the types of a kernel.
    """
    if not is_c(path):
        return None
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.engines.engine_registry import AUTO, engine_row

    command, types = None, None
    if vantage is not None:
        request = vantage.request
        if request.scope.endpoint is None:
            pid, command = vantage.tid, vantage.command
        if request.engine != AUTO:
            types = engine_row(request.engine).kernel_types_of(request.scope)
    if kernel_types is not None:
        types = kernel_types_in(kernel_types)
    return ModuleFiles(pid, command, symbols, kernel_types=types)


def kernel_types_in(path: Path) -> Callable[[], Btf]:
    """Return a function that reads the types of the kernel in a file; raise ``TargetError`` if it has none."""
    from dprobes.target.btf import types_in

    types = types_in(path)
    return lambda: types


def compile_programs(
    path: Path | str,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    pid: int | None = None,
    architecture_name: str | None = None,
    kernel_types: Path | None = None,
) -> list[ResolvedProgram]:
    """
    Load a program, find its module, and resolve its probes; raise ``DprobesError`` with all of its errors.

    A source in DProbes C is compiled to one program for each module, with common diagnostics. ``kernel_types`` is a
    file with the types of the kernel, if that is not the running one.
    """
    module = _program_of(pid) if pid is not None else ""
    try:
        files = files_of(path, symbols, pid=pid, kernel_types=kernel_types)
        loaded = load_program(path, options, symbols=symbols, module=module, files=files)
    except SourceError as error:
        raise _with_places(error, symbols, pid, architecture_name, has_kernel=kernel_types is None) from None
    return [
        resolve_here(
            program,
            loaded.diagnostics,
            allow_write=options.allow_write,
            symbols=known,
            pid=pid,
            architecture_name=architecture_name,
            has_kernel=kernel_types is None,
        )
        for program, known in zip(loaded.programs, loaded.all_symbols, strict=True)
    ]


def _with_places(
    error: SourceError, symbols: Path | None, pid: int | None, architecture_name: str | None, *, has_kernel: bool
) -> SourceError:
    """Return an error with the diagnostics of ``error``, in the handlers, and those about the places of the probes."""
    from dprobes.diagnostics import Diagnostics, Severity
    from dprobes.target.probed_module import FileSymbols

    diagnostics = Diagnostics()
    diagnostics.extend(error.diagnostics)
    for program in error.outline:
        found = Diagnostics()
        with suppress(DprobesError):  # those of a program are in the diagnostics
            resolve_here(
                program,
                found,
                symbols=FileSymbols(symbols),
                pid=pid,
                architecture_name=architecture_name,
                has_kernel=has_kernel,
            )
        diagnostics.extend(each for each in found.since(0) if each.severity is not Severity.NOTE)
    return SourceError(tuple(diagnostics))


def check_promises(path: Path, options: CompileOptions, diagnostics: Diagnostics, files: ModuleFiles | None) -> None:
    """Raise ``SourceError`` if the program of a set breaks what its ``set.toml`` promises."""
    from dprobes.formatters.templates.template_collection import templates_of
    from dprobes.sets.set_library import load_set
    from dprobes.sets.set_program import broken_promises

    loaded = load_program(path, options, files=files)
    broken_promises(load_set(path), loaded.programs, templates_of(loaded.templates), diagnostics)
    diagnostics.raise_if_errors()
