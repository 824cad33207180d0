"""A program with its module: checked for the processor, with its probepoints in the file on this machine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture, go_architecture, host_architecture
from dprobes.diagnostics import Severity
from dprobes.errors import TargetError
from dprobes.resolve.breakpoints import GoConventions, resolve_breakpoints
from dprobes.resolve.probepoints import ANYWHERE, EveryProcess, ResolvedModule, Space, pushed_symbols, space_of
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_checker import check
from dprobes.rpn.rpn_program import Offset, Usdt, calls_extensions
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.go_binary import passes_in_registers
from dprobes.target.probed_module import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.kernel_symbols import CarriedKernel
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = [
    "ResolvedProgram",
    "architecture_of",
    "check_with_extensions",
    "encode_for",
    "open_named_module",
    "resolve",
    "resolve_everywhere",
    "resolve_here",
]


def architecture_of(elf: ElfFile) -> Architecture:
    """
    Return the architecture of a module's file; that of a Go program has Go's argument registers.

    Raise ``TargetError`` if the processor is not supported.
    """
    machine = elf.machine
    if passes_in_registers(elf):
        return go_architecture()
    if machine not in ARCHITECTURE_NAMES:
        raise TargetError(
            f"'{elf.path}' is for the processor '{machine}'", hint="known are " + ", ".join(ARCHITECTURE_NAMES)
        )
    return architecture(machine)


def check_with_extensions(program: Program, arch: Architecture, diagnostics: Diagnostics, *, allow_write: bool) -> None:
    """Check a program for a processor, and that the extensions that it calls exist."""
    check(program, arch, diagnostics, allow_write=allow_write)
    if calls_extensions(program):
        from dprobes.extensions.extension_registry import check_extensions

        check_extensions(program, diagnostics, allow_write=allow_write)


def resolve(
    program: Program,
    module: Module,
    diagnostics: Diagnostics,
    *,
    allow_write: bool = False,
    by_pages: bool = False,
) -> ResolvedModule:
    """
    Check a program for a module's processor and find its places; raise ``SourceError`` for errors.

    ``by_pages`` is as for ``resolve_watchpoints``.
    """
    arch = architecture_of(module.elf)
    check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
    checked = len(diagnostics)
    conventions = GoConventions(program, is_go=arch.convention == "Go")
    in_code, left_out = resolve_breakpoints(program, module, diagnostics, conventions)
    of_c = conventions.definitions_of_c(module, in_code, diagnostics)
    elsewhere = _events(program, module, diagnostics, by_pages=by_pages)
    symbols = pushed_symbols(program, module.address_of, diagnostics)
    diagnostics.raise_if_errors()
    if any(isinstance(each.location, Usdt) for each in program.definitions):
        from dprobes.resolve.usdt_probes import argument_symbols

        known = dict(symbols)
        symbols += tuple((n, a) for n, a in argument_symbols(program, module, in_code).items() if n not in known)
    warnings = tuple(d for d in diagnostics.since(checked) if d.severity is Severity.WARNING)
    probepoints = (*in_code, *elsewhere)
    image = encode_for(program, arch, of_c)
    return ResolvedModule(module, arch, image, probepoints, symbols, tuple(left_out), warnings, of_c)


def _events(program: Program, module: Module, diagnostics: Diagnostics, *, by_pages: bool) -> tuple[Probepoint, ...]:
    """Return the watchpoints, then the samplers of a program in a module, none of which change code."""
    if all(definition.is_in_code for definition in program.definitions):
        return ()
    from dprobes.resolve.codeless_probes import resolve_samplers, resolve_watchpoints

    watchpoints = resolve_watchpoints(program, module, diagnostics, by_pages=by_pages)
    return (*watchpoints, *resolve_samplers(program, str(module.path)))


def encode_for(program: Program, arch: Architecture, of_c: frozenset[int]) -> CodeImage:
    """
    Return a program's handlers as encoded RPN for a processor.

    The handlers of the definitions numbered ``of_c`` are in C functions: ``arg0`` and so on are C's registers, not
    Go's.
    """
    return encode(program, arch, dict.fromkeys(of_c, architecture(arch.name)))


def resolve_everywhere(
    program: Program, arch: Architecture, diagnostics: Diagnostics, *, by_pages: bool = False
) -> tuple[Probepoint, ...]:
    """
    Return the probepoints that a program has without any file; raise ``SourceError`` for errors.

    ``by_pages`` is as for ``resolve_watchpoints``. They are the same in all processes of a processor. A probe program
    for a module has none.
    """
    match space_of(program):
        case Space.PROCESSES:
            from dprobes.resolve.codeless_probes import resolve_watchpoints

            watchpoints = resolve_watchpoints(program, EveryProcess(arch), diagnostics, by_pages=by_pages)
            diagnostics.raise_if_errors()
            return watchpoints
        case Space.SYSTEM:
            from dprobes.resolve.codeless_probes import resolve_samplers

            return resolve_samplers(program, ANYWHERE)
        case Space.MODULE | Space.KERNEL:
            return ()


class ResolvedProgram(NamedTuple):
    """
    A checked program, and its probepoints if its module was found.

    ``diagnostics`` has no errors: those have been raised. ``everywhere`` are the probepoints of a program without a
    module, in every process or in the whole system. ``kernel`` is the result for a program about the kernel,
    ``obstacle`` the reason why there is none.
    """

    program: Program
    architecture: Architecture
    resolved: ResolvedModule | None
    diagnostics: Diagnostics
    everywhere: tuple[Probepoint, ...] = ()
    kernel: ResolvedKernel | None = None
    obstacle: TargetError | None = None

    def render(self, *severities: Severity) -> str:
        """Return the diagnostics of these severities as text."""
        return "\n".join(d.render() for d in self.diagnostics if d.severity in severities)


def resolve_here(
    program: Program,
    diagnostics: Diagnostics,
    *,
    allow_write: bool = False,
    symbols: SymbolProvider = OWN_SYMBOLS,
    pid: int | None = None,
    command: str | None = None,
    architecture_name: str | None = None,
    choose_engine: Callable[[Program, Architecture, Diagnostics], bool] | None = None,
    kernel: Callable[[Program], AbstractContextManager[RunningKernel] | None] = lambda _: None,
    processor: Callable[[Program], AbstractContextManager[Architecture | None] | None] = lambda _: None,
    has_kernel: bool = True,
) -> ResolvedProgram:
    """
    Find the module of a program and resolve its probes; raise ``SourceError`` with all errors.

    ``choose_engine`` adds errors for features that the chosen engine lacks; it returns ``by_pages``, as for
    ``resolve_watchpoints``. For a program about a kernel ``processor``
    returns a context with that kernel's processor; None means the processor of this machine. After ``choose_engine``,
    ``kernel`` returns a context with the kernel; None means the running one. Without ``has_kernel`` a program about a
    kernel is for a kernel of another machine.
    """
    if space_of(program) is Space.KERNEL and not has_kernel:
        arch = architecture(architecture_name) if architecture_name else host_architecture()
        check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
        message = "the program is for another kernel than the one that runs here: its places are not looked up"
        diagnostics.note(program.spans.get("name"), message)
        return ResolvedProgram(program, arch, None, diagnostics)
    if space_of(program) is Space.KERNEL:
        named = architecture(architecture_name) if architecture_name else host_architecture()
        with processor(program) or nullcontext(None) as found:
            return _resolve_in_kernel(
                program,
                found or named,
                diagnostics,
                symbols.kernels,
                kernel,
                allow_write=allow_write,
                choose_engine=choose_engine,
            )
    architecture_name = architecture_name or symbols.machine(host_architecture().name) or _narrow_processor(program)
    module = _find_module(program, diagnostics, pid, command, architecture_name)
    if module is None:
        arch = architecture(architecture_name) if architecture_name else host_architecture()
        by_pages = choose_engine is not None and choose_engine(program, arch, diagnostics)
        check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
        everywhere = resolve_everywhere(program, arch, diagnostics, by_pages=by_pages)
        return ResolvedProgram(program, arch, None, diagnostics, everywhere)
    elf = open_named_module(program, module, diagnostics)
    loaded = symbols.module_of(elf)
    arch = architecture_of(elf)
    by_pages = choose_engine is not None and choose_engine(program, arch, diagnostics)
    resolved = resolve(program, loaded, diagnostics, allow_write=allow_write, by_pages=by_pages)
    return ResolvedProgram(program, arch, resolved, diagnostics)


def _narrow_processor(program: Program) -> str | None:
    """Return the processor of 32-bit programs on this machine, for a program for 32-bit words only; else None."""
    return "i386" if program.word_size == 4 and host_architecture().name == "x86_64" else None


def _resolve_in_kernel(
    program: Program,
    arch: Architecture,
    diagnostics: Diagnostics,
    carried: Sequence[CarriedKernel],
    other: Callable[[Program], AbstractContextManager[RunningKernel] | None],
    *,
    allow_write: bool,
    choose_engine: Callable[[Program, Architecture, Diagnostics], bool] | None,
) -> ResolvedProgram:
    """
    Resolve a program for a kernel; data that is not available here is a note, and left to the engine.

    ``carried`` are the builds of it that the program was compiled for; ``other`` returns a context with a kernel that
    does not run here, or None.
    """
    from dprobes.target.kernel.running_kernel import RunningKernel

    if choose_engine is not None:
        choose_engine(program, arch, diagnostics)
    check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
    diagnostics.raise_if_errors()
    with other(program) or nullcontext(RunningKernel()) as kernel:
        return _resolved_in(kernel, program, arch, diagnostics, carried)


def _resolved_in(
    kernel: RunningKernel,
    program: Program,
    arch: Architecture,
    diagnostics: Diagnostics,
    carried: Sequence[CarriedKernel],
) -> ResolvedProgram:
    from dprobes.resolve.kernel_places import kernel_here, kernel_module_of, needs_addresses, resolve_kernel

    try:
        if carried:
            kernel = kernel_here(program, carried, kernel, diagnostics)
            diagnostics.raise_if_errors()
        module = kernel_module_of(program, kernel)
        if needs_addresses(program):
            module.check()
    except TargetError as error:
        diagnostics.note(program.spans.get("name"), error.message, hint=error.hint)
        return ResolvedProgram(program, arch, None, diagnostics, obstacle=error)
    resolved = resolve_kernel(program, module, arch, diagnostics)
    diagnostics.raise_if_errors()
    return ResolvedProgram(program, arch, None, diagnostics, kernel=resolved)


def open_named_module(program: Program, path: Path, diagnostics: Diagnostics) -> ElfFile:
    """Return the file to which ``name =`` of a program refers; raise ``SourceError`` at it if that is not a module."""
    try:
        elf = ElfFile.open(path)
        architecture_of(elf)
    except TargetError as error:
        diagnostics.error(program.spans.get("name"), error.message, hint=error.hint)
        diagnostics.raise_if_errors()
        raise
    return elf


def _find_module(
    program: Program, diagnostics: Diagnostics, pid: int | None, command: str | None, architecture_name: str | None
) -> Path | None:
    if space_of(program) is not Space.MODULE:
        return None
    from dprobes.target.module_lookup import advice_on_name, find_module, is_made_by_kernel, suggestion

    if is_made_by_kernel(program.name):
        diagnostics.error(
            program.spans.get("name"),
            f"'{program.name}' cannot be probed: the kernel provides it, and no file contains its code",
            hint="probe the function that calls it, such as clock_gettime of 'libc.so.6'",
        )
        diagnostics.raise_if_errors()
    path = find_module(program.name, pid=pid, command=command, architecture=architecture_name)
    if path is not None:
        return path
    later = "its probes are resolved when a process maps one"
    if architecture_name is not None and find_module(program.name) is not None:
        message, hint = f"there is no module '{program.name}' for {architecture_name} on this machine; {later}", None
    else:
        message = f"there is no module '{program.name}' on this machine; {later}"
        hint = (
            _advice_on_tracepoints(program)
            or advice_on_name(program.name, {})
            or suggestion(program.name, pid=pid, command=command)
        )
    diagnostics.note(program.spans.get("name"), message, hint=hint)
    return None


def _advice_on_tracepoints(program: Program) -> str | None:
    """Return advice on probing tracepoints, if the module's name is a subsystem of the kernel; else None."""
    from dprobes.target.kernel.tracefs import open_trace_files

    if not program.name.isidentifier():
        return None
    try:
        with open_trace_files() as files:
            events = files.names(f"events/{program.name}")
    except OSError:
        return None
    places = [each.location for each in program.definitions]
    is_subsystem = any(each.expression.symbol in events for each in places if isinstance(each, Offset))
    return "write 'modtype = tracepoint' and 'name = vmlinux' in the file header" if is_subsystem else None
