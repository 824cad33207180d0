"""A program against the module that it is about: checked for the processor, with its probepoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture, go_architecture
from dprobes.diagnostics import Severity
from dprobes.errors import TargetError
from dprobes.resolve.breakpoints import GoConventions, resolve_breakpoints
from dprobes.resolve.probed_space import ANYWHERE, EveryProcess, Space, pushed_symbols, space_of
from dprobes.resolve.probepoints import ResolvedModule
from dprobes.resolve.usdt_probes import argument_symbols
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_checker import check
from dprobes.rpn.rpn_program import calls_extensions
from dprobes.target.go_binary import passes_in_registers

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.probed_module import Module

__all__ = ["architecture_of", "check_with_extensions", "encode_for", "resolve", "resolve_everywhere"]


def architecture_of(elf: ElfFile) -> Architecture:
    """
    Return the architecture of a module's file, in which Go has its own arguments.

    Raise ``TargetError`` if we know nothing of the processor.
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
    """Check a program for a processor, and that the extensions it calls are there."""
    check(program, arch, diagnostics, allow_write=allow_write)
    if calls_extensions(program):
        from dprobes.extensions.extension_registry import check_extensions

        check_extensions(program, diagnostics, allow_write=allow_write)


def resolve(program: Program, module: Module, diagnostics: Diagnostics, *, allow_write: bool = False) -> ResolvedModule:
    """Check a program for a module's processor and find its places; raise ``SourceError`` if something is wrong."""
    arch = architecture_of(module.elf)
    check_with_extensions(program, arch, diagnostics, allow_write=allow_write)
    checked = len(diagnostics)
    conventions = GoConventions(program, is_go=arch.convention == "Go")
    in_code, left_out = resolve_breakpoints(program, module, diagnostics, conventions)
    of_c = conventions.definitions_of_c(module, in_code, diagnostics)
    elsewhere = _events(program, module, diagnostics)
    symbols = pushed_symbols(program, module, diagnostics)
    diagnostics.raise_if_errors()
    known = dict(symbols)
    symbols += tuple((n, a) for n, a in argument_symbols(program, module, in_code).items() if n not in known)
    warnings = tuple(d for d in diagnostics.since(checked) if d.severity is Severity.WARNING)
    probepoints = (*in_code, *elsewhere)
    image = encode_for(program, arch, of_c)
    return ResolvedModule(module, arch, image, probepoints, symbols, tuple(left_out), warnings, of_c)


def _events(program: Program, module: Module, diagnostics: Diagnostics) -> tuple[Probepoint, ...]:
    """Return the watchpoints and samplers of a program, in this order."""
    if all(definition.is_in_code for definition in program.definitions):
        return ()
    from dprobes.resolve.codeless_probes import resolve_samplers, resolve_watchpoints

    return (*resolve_watchpoints(program, module, diagnostics), *resolve_samplers(program, str(module.path)))


def encode_for(program: Program, arch: Architecture, of_c: frozenset[int]) -> CodeImage:
    """Return a program's code, in which the handlers of some definitions name the registers of C."""
    return encode(program, arch, dict.fromkeys(of_c, architecture(arch.name)))


def resolve_everywhere(program: Program, arch: Architecture, diagnostics: Diagnostics) -> tuple[Probepoint, ...]:
    """
    Return the probepoints that a program has without any file; raise ``SourceError`` if something is wrong.

    They are the same for all programs of a processor. A program about a module has none.
    """
    match space_of(program):
        case Space.PROCESSES:
            from dprobes.resolve.codeless_probes import resolve_watchpoints

            watchpoints = resolve_watchpoints(program, EveryProcess(arch), diagnostics)
            diagnostics.raise_if_errors()
            return watchpoints
        case Space.SYSTEM:
            from dprobes.resolve.codeless_probes import resolve_samplers

            return resolve_samplers(program, ANYWHERE)
        case Space.MODULE | Space.KERNEL:
            return ()
