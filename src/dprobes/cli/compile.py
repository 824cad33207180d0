"""From a program's file to its resolved probes: what run, check and show begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics, Severity
from dprobes.engines.base import refuse_unsupported, requirements, watches_user_addresses
from dprobes.extensions.registry import check_extensions
from dprobes.rpn.load import check_program, parse_file
from dprobes.rpn.program import ModuleType
from dprobes.target.arch import architecture, host_architecture

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.base import Engine
    from dprobes.engines.resolve import ResolvedModule
    from dprobes.engines.watchpoints import ResolvedWatchpoint
    from dprobes.rpn.load import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.target.arch import Architecture

__all__ = ["Compiled", "compile_program", "note_unsupported"]


@dataclass(frozen=True)
class Compiled:
    """
    Hold a checked program, and where its probes are if its module was found.

    ``diagnostics`` holds no errors: those have been raised.
    """

    program: Program
    architecture: Architecture
    resolved: ResolvedModule | None
    diagnostics: Diagnostics
    everywhere: tuple[ResolvedWatchpoint, ...] = ()
    """What is watched in every process, whatever that maps."""

    def render(self, *severities: Severity) -> str:
        """Return the diagnostics of these severities as text."""
        return "\n".join(d.render() for d in self.diagnostics if d.severity in severities)


def compile_program(
    path: Path,
    options: CompileOptions,
    *,
    symbols: Path | None = None,
    pid: int | None = None,
    command: str | None = None,
    architecture_name: str | None = None,
    engine: Engine | None = None,
) -> Compiled:
    """
    Compile a file, find its module, and resolve its probes; raise ``SourceError`` with everything that is wrong.

    With ``engine``, what that cannot do is an error as well.
    """
    diagnostics = Diagnostics()
    program = parse_file(path, diagnostics, options)
    module = _find_module(program, diagnostics, pid, command, architecture_name)
    if module is None:
        arch = architecture(architecture_name) if architecture_name else host_architecture()
        if engine is not None:
            refuse_unsupported(program, arch, engine, (), diagnostics)
        check_extensions(program, diagnostics, allow_write=options.allow_write)
        check_program(program, arch, diagnostics, options)
        everywhere: tuple[ResolvedWatchpoint, ...] = ()
        if watches_user_addresses(program):
            from dprobes.engines.watchpoints import EveryProgram, resolve_watchpoints

            everywhere = resolve_watchpoints(program, EveryProgram(arch), diagnostics)
            diagnostics.raise_if_errors()
        return Compiled(program, arch, None, diagnostics, everywhere)
    from dprobes.engines.resolve import architecture_of, resolve
    from dprobes.target.location import Module

    loaded = Module.load(module, symbols)
    arch = architecture_of(loaded)
    if engine is not None:
        refuse_unsupported(program, arch, engine, (), diagnostics)
    resolved = resolve(program, loaded, diagnostics, allow_write=options.allow_write)
    return Compiled(program, arch, resolved, diagnostics)


def _find_module(
    program: Program, diagnostics: Diagnostics, pid: int | None, command: str | None, architecture_name: str | None
) -> Path | None:
    if program.modtype is not ModuleType.USER:
        return None
    from dprobes.target.modules import find_module, is_made_by_kernel, near_modules

    if is_made_by_kernel(program.name):
        diagnostics.error(
            program.spans.get("name"),
            f"'{program.name}' cannot be probed: the kernel makes it, and no file says what its code should be",
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
        near = near_modules(program.name, pid=pid, command=command)
        message = f"there is no module '{program.name}' on this machine; {later}"
        hint = f"did you mean '{near[0]}'?" if near else None
    diagnostics.note(program.spans.get("name"), message, hint=hint)
    return None


def note_unsupported(compiled: Compiled, engines: tuple[Engine, ...]) -> None:
    """Add a note for everything that the program needs and none of ``engines`` has."""
    for requirement in requirements(compiled.program, compiled.architecture):
        if not any(requirement.capability in engine.capabilities for engine in engines):
            compiled.diagnostics.note(
                requirement.span,
                f"'{requirement.what}' needs {requirement.capability.value}, which no engine of this version has",
                hint=requirement.hurdle,
            )
