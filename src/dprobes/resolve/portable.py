"""
Programs for other machines: a ``Ppdf`` carries what their resolution needs to know of the module's symbols.

Each file is resolved as in a run; the answers that its symbols give on the way are carried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import architecture, host_architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.ppdf.images import HOSTS, MACHINES
from dprobes.ppdf.model import Ppdf
from dprobes.resolve.localmodule import open_named_module
from dprobes.resolve.resolution import check_with_extensions, resolve
from dprobes.resolve.spaces import Space, space_of
from dprobes.rpn.checker import check
from dprobes.rpn.needs import writing_instructions
from dprobes.rpn.program import Glob, calls_extensions
from dprobes.target.carriedsymbols import CarriedBuild, CarriedPlace
from dprobes.target.elf.file import ElfFile
from dprobes.target.elf.identity import module_identity
from dprobes.target.location import FileSymbols
from dprobes.target.neededsymbols import NeededSymbols
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.ppdf.model import EbpfCode
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.program import Program
    from dprobes.target.kernel.carriedkernel import CarriedKernel

__all__ = ["build_ppdf", "module_here", "needs_write"]

_NEIGHBOURHOOD = 64
"""Bytes behind a probepoint whose symbols are carried: they tell engines where code may be entered."""


def build_ppdf(
    program: Program,
    modules: Sequence[Path],
    diagnostics: Diagnostics,
    *,
    extra_symbols: Path | None = None,
    allow_write: bool = False,
    with_ebpf: bool = True,
    templates: Mapping[str, bytes] | None = None,
) -> Ppdf:
    """
    Return a program compiled for builds of its module, or of the kernel, which are in the files ``modules``.

    ``extra_symbols`` is what ``--sym`` names. What is doubtful goes to ``diagnostics``. Raise ``SourceError`` if the
    program is wrong for one of the files, and ``TargetError`` for a file that is no module.
    """
    builds: dict[str, CarriedBuild] = {}
    kernels: dict[str, CarriedKernel] = {}
    if space_of(program) is Space.KERNEL:
        check_with_extensions(program, host_architecture(), diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
        for path in modules:
            from dprobes.resolve.kernelbuilds import build_kernel

            kernel = build_kernel(program, path, diagnostics, extra_symbols)
            kernels.setdefault(kernel.identity, kernel)
        machines: tuple[str, ...] = (host_architecture().name,)
    else:
        for path in modules:
            build = _build(program, path, diagnostics, extra_symbols, allow_write=allow_write)
            builds.setdefault(build.identity, build)
        known = [build.machine for build in builds.values()]
        machines = _machines(program, known, diagnostics, allow_write=allow_write)
    ebpf: tuple[EbpfCode, ...] = ()
    if with_ebpf:
        from dprobes.resolve.carriedebpf import ebpf_codes

        ebpf = ebpf_codes(program, machines)
    return Ppdf(
        program,
        machines,
        tuple(builds.values()),
        needs_write(program),
        dict(templates or {}),
        ebpf,
        f"dprobes {__version__}",
        tuple(kernels.values()),
    )


def module_here(program: Program, advice: str, *, has_kernel: bool = True) -> Sequence[Path]:
    """
    Return the file of a program's module on this machine, nothing for a program that needs none.

    KALLSYMS stands for the kernel that runs, if it shows its symbols and is what the program is about; without
    ``has_kernel`` that is another one.
    Raise ``TargetError`` if there is none; ``advice`` is what to do about it. Raise ``SourceError`` if the file that
    the name stands for is no module.
    """
    if space_of(program) is Space.KERNEL:
        return _running_kernel(program) if has_kernel else ()
    if space_of(program) is not Space.MODULE:
        return ()
    from dprobes.target.modules import find_module, suggestion

    path = find_module(program.name)
    if path is None:
        near = suggestion(program.name)
        hint = advice if near is None else f"{advice}; {near}"
        raise TargetError(f"there is no module '{program.name}' on this machine", hint=hint)
    open_named_module(program, path, Diagnostics())
    return (path,)


def _running_kernel(program: Program) -> Sequence[Path]:
    from dprobes.resolve.kernelplaces import kernel_module_of
    from dprobes.target.kernel.kallsyms import KALLSYMS
    from dprobes.target.kernel.runningkernel import RunningKernel

    try:
        kernel_module_of(program, RunningKernel()).check()
    except TargetError:
        return ()  # the places are found by their names, where the program is inserted
    return (KALLSYMS,)


def _build(
    program: Program, path: Path, diagnostics: Diagnostics, extra_symbols: Path | None, *, allow_write: bool
) -> CarriedBuild:
    elf = ElfFile.open(path)
    module = FileSymbols(extra_symbols, NeededSymbols).module_of(elf)
    found = Diagnostics()
    try:
        resolved = resolve(program, module, found, allow_write=allow_write)
    finally:
        known = set(diagnostics)  # what is wrong with the program alone shows with each file
        diagnostics.extend(diagnostic for diagnostic in found if diagnostic not in known)
    symbols = module.symbols
    assert isinstance(symbols, NeededSymbols)
    for definition in program.definitions:
        if isinstance(definition.location, Glob):
            symbols.need_matching(definition.location.pattern)
    for probe in resolved.in_code:
        start = probe.instruction.address
        symbols.starting(start, start + _NEIGHBOURHOOD)
    return CarriedBuild(module_identity(elf), str(path), elf.machine, symbols.needed, tuple(_places(resolved)))


def _places(resolved: ResolvedModule) -> Iterator[CarriedPlace]:
    for probe in resolved.in_code:
        yield CarriedPlace(probe.number, probe.offset, probe.instruction.raw, probe.where)
        for leaving in probe.code.exits.exits:
            yield CarriedPlace(probe.number, leaving.offset, leaving.raw, probe.where, is_exit=True)


def _machines(
    program: Program, machines: Sequence[str], diagnostics: Diagnostics, *, allow_write: bool
) -> tuple[str, ...]:
    """
    Return the processors of modules, and those of hosts for which the program is right as well.

    A program for modules of other processors alone is for those.
    """
    may_be_here = not machines or not set(HOSTS).isdisjoint(machines)
    found = tuple(
        name for name in MACHINES if name in machines or (may_be_here and name in HOSTS and _is_right(program, name))
    )
    if not found:
        check(program, host_architecture(), diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
    if not machines:
        check_with_extensions(program, architecture(found[0]), diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
    return found


def _is_right(program: Program, machine: str) -> bool:
    diagnostics = Diagnostics()
    check(program, architecture(machine), diagnostics, allow_write=True)
    return not diagnostics.has_errors


def needs_write(program: Program) -> bool:
    """Return whether a program changes or stops its target."""
    if writing_instructions(program):
        return True
    if not calls_extensions(program):
        return False
    from dprobes.extensions.registry import called_extensions, load_extensions

    return any(extension.writes for extension in load_extensions(called_extensions(program)).values())
