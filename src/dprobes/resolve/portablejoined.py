"""Programs for several modules that were written as one, and blocks of the tool, as one ``Ppdf`` for other machines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.resolve.portable import build_ppdf, module_here
from dprobes.resolve.spaces import Space, space_of
from dprobes.rpn.program import ModuleType
from dprobes.target.modules import is_file_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.ppdf.model import Ppdf
    from dprobes.rpn.program import Program

__all__ = ["build_joined", "files_of_modules"]


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
    Return programs that are inserted as one, each compiled for the builds in its ``files``.

    ``blocks`` are those of the tool. All else is as with ``build_ppdf``.
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
    Return the files to compile each program for: those ``named`` that are of its module, or else that on this machine.

    Files that are named are for the only program, if there is only one. Raise ``TargetError`` for one that is of no
    module; else as ``module_here``, which knows what it means that the program's kernel is not here (``has_kernel``).
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
