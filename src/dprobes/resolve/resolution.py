"""A program against the module that it is about: checked for the processor, with its probepoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture
from dprobes.diagnostics import Severity
from dprobes.errors import TargetError
from dprobes.resolve.breakpoints import resolve_breakpoints
from dprobes.resolve.probepoints import ResolvedModule
from dprobes.resolve.pushedsymbols import pushed_symbols
from dprobes.resolve.samplers import resolve_samplers
from dprobes.resolve.spaces import ANYWHERE, EveryProcess, Space, space_of
from dprobes.resolve.usdtprobes import argument_symbols
from dprobes.resolve.watchpoints import resolve_watchpoints
from dprobes.rpn.checker import check
from dprobes.rpn.encoder import encode
from dprobes.rpn.program import calls_extensions

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Program
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.location import Module

__all__ = ["architecture_of", "check_with_extensions", "resolve", "resolve_everywhere"]


def architecture_of(elf: ElfFile) -> Architecture:
    """Return the architecture of a module's file; raise ``TargetError`` if we know nothing of it."""
    machine = elf.machine
    if machine not in ARCHITECTURE_NAMES:
        raise TargetError(
            f"'{elf.path}' is for the processor '{machine}'", hint="known are " + ", ".join(ARCHITECTURE_NAMES)
        )
    return architecture(machine)


def check_with_extensions(program: Program, arch: Architecture, diagnostics: Diagnostics, *, allow_write: bool) -> None:
    """Check a program for a processor, and that the extensions it calls are there."""
    check(program, arch, diagnostics, allow_write=allow_write)
    if calls_extensions(program):
        from dprobes.extensions.registry import check_extensions

        check_extensions(program, diagnostics, allow_write=allow_write)


def resolve(program: Program, module: Module, diagnostics: Diagnostics, *, allow_write: bool = False) -> ResolvedModule:
    """Check a program for a module's processor and find its places; raise ``SourceError`` if something is wrong."""
    arch = architecture_of(module.elf)
    check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
    checked = len(diagnostics)
    in_code, left_out = resolve_breakpoints(program, module, diagnostics)
    watchpoints = resolve_watchpoints(program, module, diagnostics)
    samplers = resolve_samplers(program, str(module.path))
    symbols = pushed_symbols(program, module, diagnostics)
    diagnostics.raise_if_errors()
    known = dict(symbols)
    symbols += tuple((n, a) for n, a in argument_symbols(program, module, in_code).items() if n not in known)
    warnings = tuple(d for d in diagnostics.since(checked) if d.severity is Severity.WARNING)
    probepoints = (*in_code, *watchpoints, *samplers)
    return ResolvedModule(module, arch, encode(program, arch), probepoints, symbols, tuple(left_out), warnings)


def resolve_everywhere(program: Program, arch: Architecture, diagnostics: Diagnostics) -> tuple[Probepoint, ...]:
    """
    Return the probepoints that a program has without any file; raise ``SourceError`` if something is wrong.

    They are the same for all programs of a processor. A program about a module has none.
    """
    match space_of(program):
        case Space.PROCESSES:
            watchpoints = resolve_watchpoints(program, EveryProcess(arch), diagnostics)
            diagnostics.raise_if_errors()
            return watchpoints
        case Space.SYSTEM:
            return resolve_samplers(program, ANYWHERE)
        case Space.MODULE | Space.KERNEL:
            return ()
