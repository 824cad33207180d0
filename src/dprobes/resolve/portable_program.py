"""
Programs for other machines: a ``Ppdf`` carries the symbols of the module that their resolution needs.

Each file is resolved as in a run, and the symbols that are used on the way are carried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture, host_architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.ppdf.code_images import HOSTS, MACHINES
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.resolve.local_module import check_with_extensions, open_named_module, resolve
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.program_checker import check
from dprobes.rpn.program_needs import patched_definitions, writing_instructions
from dprobes.rpn.rpn_program import Glob, ModuleType, calls_extensions
from dprobes.target.carried_symbols import CarriedBuild, CarriedPlace, NeededSymbols
from dprobes.target.elf.elf_file import ElfFile, module_identity
from dprobes.target.module_lookup import is_file_of
from dprobes.target.probed_module import FileSymbols
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.ppdf.ppdf_model import EbpfCode
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.kernel_symbols import CarriedKernel

__all__ = ["build_joined", "build_ppdf", "files_of_modules", "needs_write", "selected"]

_NEIGHBOURHOOD = 64
"""Number of bytes after a probepoint whose symbols are carried: engines regard them as possible jump targets."""


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
    Return a program compiled for builds of its module, or of the kernel, in the files ``modules``.

    ``extra_symbols`` is the file of ``--sym``. Warnings are added to ``diagnostics``. Raise ``SourceError`` if the
    program is wrong for one of the files, and ``TargetError`` for a file that is not a module.
    """
    builds: dict[str, CarriedBuild] = {}
    kernels: dict[str, CarriedKernel] = {}
    if space_of(program) is Space.KERNEL:
        check_with_extensions(program, host_architecture(), diagnostics, allow_write=allow_write)
        diagnostics.raise_if_errors()
        for path in modules:
            from dprobes.resolve.kernel_places import build_kernel

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
        from dprobes.resolve.carried_ebpf import ebpf_codes

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

    KALLSYMS stands for the running kernel, if it shows its symbols and the program is about it; without ``has_kernel``
    the program is about another one.

    Raise ``TargetError`` with the hint ``advice`` if there is none. Raise ``SourceError`` if the named file is not a
    module.
    """
    if space_of(program) is Space.KERNEL:
        return _running_kernel(program) if has_kernel else ()
    if space_of(program) is not Space.MODULE:
        return ()
    from dprobes.target.module_lookup import find_module, suggestion

    path = find_module(program.name)
    if path is None:
        near = suggestion(program.name)
        hint = advice if near is None else f"{advice}; {near}"
        raise TargetError(f"there is no module '{program.name}' on this machine", hint=hint)
    open_named_module(program, path, Diagnostics())
    return (path,)


def _running_kernel(program: Program) -> Sequence[Path]:
    from dprobes.resolve.kernel_places import kernel_module_of
    from dprobes.target.kernel.kernel_symbols import KALLSYMS
    from dprobes.target.kernel.running_kernel import RunningKernel

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
        known = set(diagnostics)  # errors of the program alone occur with each file
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
    Return the processors of modules, and those of hosts for which the program is valid as well.

    If none of the modules is for a processor of hosts, only the modules' processors are returned. Raise ``SourceError``
    if the program is valid for no processor.
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
    """Return whether a program needs ``--allow-write``: it changes memory or registers of its target, or stops it."""
    if writing_instructions(program) or patched_definitions(program):
        return True
    if not calls_extensions(program):
        return False
    from dprobes.extensions.extension_registry import called_extensions, load_extensions

    return any(extension.writes for extension in load_extensions(called_extensions(program)).values())


def build_joined(
    programs: Sequence[Program],
    files: Sequence[Sequence[Path]],
    blocks: ToolProgram | None,
    diagnostics: Diagnostics,
    *,
    extra_symbols: Path | None = None,
    allow_write: bool = False,
    with_ebpf: bool = True,
    templates: Mapping[str, bytes] | None = None,
) -> Ppdf:
    """
    Return a program and its companions, which are inserted as one, each compiled for the builds in its ``files``.

    ``blocks`` are those of the tool. The other arguments are as for ``build_ppdf``.
    """
    first, *others = [
        build_ppdf(
            program,
            paths,
            diagnostics,
            extra_symbols=extra_symbols,
            allow_write=allow_write,
            with_ebpf=with_ebpf,
            templates=templates if number == 0 else None,
        )
        for number, (program, paths) in enumerate(zip(programs, files, strict=True))
    ]
    return replace(first, companions=tuple(others), blocks=blocks)


def files_of_modules(
    programs: Sequence[Program], named: Sequence[Path], advice: str, *, has_kernel: bool = True
) -> list[Sequence[Path]]:
    """
    Return the files for which each program is compiled: the ``named`` ones of its module, or else that of this machine.

    A single program gets all named files. Raise ``TargetError`` for a file that belongs to no module, and the errors of
    ``module_here``, to which ``has_kernel`` is passed.
    """
    if len(programs) == 1:
        return [list(named) or module_here(programs[0], advice, has_kernel=has_kernel)]
    found: list[list[Path]] = [[] for _ in programs]
    for path in named:
        of = [number for number, program in enumerate(programs) if _is_file_of(path, program)]
        if not of:
            names = ", ".join(f"'{each.name}'" for each in programs if space_of(each) in (Space.MODULE, Space.KERNEL))
            raise TargetError(f"'{path}' is the file of no module of the program: {names}")
        for number in of:
            found[number].append(path)
    return [
        paths or module_here(program, advice, has_kernel=has_kernel)
        for program, paths in zip(programs, found, strict=True)
    ]


def _is_file_of(path: Path, program: Program) -> bool:
    if space_of(program) is not Space.KERNEL:
        return is_file_of(path, program.name)
    if program.modtype is ModuleType.KMOD:
        return path.name.partition(".ko")[0].replace("-", "_") == program.name.replace("-", "_")
    return path.name.startswith("vmlinu")


def selected(ppdf: Ppdf, program: Program, chosen: Program) -> Ppdf:
    """Return a compiled file, without eBPF code, for ``chosen``: some of the definitions of ``program``."""
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
