"""
Programs about the kernel that are compiled for builds of it: what is carried of each, and which of them runs here.

A build is resolved as the running kernel is; the answers that its symbols give on the way are carried. Tracepoints need
nothing of it: they are looked for where the program is inserted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import host_architecture
from dprobes.errors import TargetError
from dprobes.resolve.kernel_places import kernel_module_of, module_named_by, resolve_kernel
from dprobes.rpn.rpn_program import Address, Expression, Offset
from dprobes.target.kernel.kernel_files import running_build_id
from dprobes.target.kernel.kernel_image import KernelFile, moved_kernel, running_areas
from dprobes.target.kernel.kernel_symbols import KALLSYMS, CarriedKernel, KernelPlace, NeededKallsyms
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import Span

__all__ = ["build_kernel", "kernel_here"]


def build_kernel(
    program: Program, path: Path, diagnostics: Diagnostics, extra_symbols: Path | None = None
) -> CarriedKernel:
    """
    Return what a program needs to know of the kernel or module in a file; KALLSYMS stands for what runs here.

    Add to ``diagnostics`` what is wrong with the program for it; raise ``TargetError`` for a file that is neither.
    """
    name = module_named_by(program)
    if path == KALLSYMS:
        symbols = NeededKallsyms.read()
        kernel = RunningKernel(symbols)
        identity, areas = running_build_id(name), running_areas(kernel, name)
    else:
        file = KernelFile(path, name, extra_symbols)
        identity, areas, symbols, kernel = file.identity, file.areas, file.symbols, file.kernel()
    module = kernel_module_of(program, kernel)
    for span in _addresses(program):
        diagnostics.warning(
            span,
            "an address is that of one kernel after one boot: another one has something else there",
            hint="write a symbol, or 'offset =', which counts from the start of the kernel or module",
        )
    resolved = resolve_kernel(program, module, host_architecture(), diagnostics, with_tracepoints=False)
    diagnostics.raise_if_errors()
    symbols.need_names(probe.instruction.address for probe in resolved.in_code)
    places = (
        KernelPlace(probe.number, probe.instruction.address, probe.instruction.raw, probe.where)
        for probe in resolved.in_code
        if probe.instruction.raw
    )
    return CarriedKernel(identity, str(path), name, areas, symbols.needed, tuple(places))


def kernel_here(
    program: Program, carried: Sequence[CarriedKernel], running: RunningKernel, diagnostics: Diagnostics
) -> RunningKernel:
    """
    Return the running kernel with what is carried of it, or as it is if nothing is, which is noted.

    Raise ``TargetError`` if this is a carried build, and nothing shows where it lies.
    """
    name = module_named_by(program)
    if not carried or (name and name not in running.modules):
        return running
    span = program.spans.get("name")
    try:
        identity = running_build_id(name)
    except TargetError as error:
        diagnostics.note(span, f"it is not known whether the program was built for this kernel: {error.message}")
        return running
    same = next((kernel for kernel in carried if kernel.identity == identity), None)
    if same is not None:
        return moved_kernel(same, running)
    what = f"the module '{name}'" if name else "the kernel"
    known = ", ".join(f"{kernel.identity} ('{kernel.path}')" for kernel in carried)
    diagnostics.note(
        span,
        f"this is build {identity} of {what}, and the program was built for {known}: places are found by their names",
    )
    for number in _numbers(program):
        diagnostics.error(
            number,
            "an offset without a symbol is that of one build, and this is another one",
            hint="build the program for this kernel too (dprobes build --for FILE)",
        )
    return running


def _addresses(program: Program) -> Iterator[Span | None]:
    """Give the places where a program names an address in code, which has no symbol."""
    for definition in program.definitions:
        match definition.location:
            case Address(Expression(_, None)) if definition.watchpoint is None:
                yield definition.span("address")


def _numbers(program: Program) -> Iterator[Span | None]:
    """Give the places where a program names an offset that counts from no symbol."""
    for definition in program.definitions:
        match definition.location:
            case Offset(Expression(_, None)):
                yield definition.span("offset")
