"""Programs in DProbes C that are compiled with the debug information of programs in C."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.dpc.modules.late_names import DescribedModule
from dprobes.errors import SourceError
from dprobes.preprocessor import preprocess
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["compiled", "errors_of", "rpn_of"]


def compiled(directory: Path, source: str, *flags: str) -> Path:
    """Return a program in C, compiled; skip the test without a compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (directory / "own.c").write_text(source)
    subprocess.run(["gcc", "-g", *flags, "own.c", "-o", "own"], cwd=directory, check=True)
    return directory / "own"


def rpn_of(elf: ElfFile, text: str, diagnostics: Diagnostics | None = None) -> str:
    """Return the RPN source of a program for a module; raise ``SourceError`` if it is wrong."""
    diagnostics = Diagnostics() if diagnostics is None else diagnostics
    module = DescribedModule(elf)
    source = preprocess(SourceFile("a.dpc", text), diagnostics)
    found = compile_text(source, diagnostics, module="own", module_of=lambda _name: module)
    return "\n".join(each.source for each in found.compilations)


def errors_of(elf: ElfFile, text: str) -> str:
    """Return what is wrong with a program, without places."""
    with pytest.raises(SourceError) as caught:
        rpn_of(elf, text)
    return "\n".join(f"{each.message} | {each.hint}" for each in caught.value.diagnostics)
