"""What is said of functions that were not reached, of which the compiler has made others."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from dprobes.cli.output.run_summary import advice_on_unreached
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Scope
from dprobes.resolve.local_module import resolve_here
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from pathlib import Path

ASSEMBLY = """
    .globl main, work
    .type main, @function
    .type work, @function
    .type work.constprop.0, @function
main: call work.constprop.0
    xor %eax, %eax
    ret
    .size main, . - main
work: nop
    ret
    .size work, . - work
work.constprop.0: nop
    ret
    .size work.constprop.0, . - work.constprop.0
    .section .note.GNU-stack
"""


def test_clones_are_named(tmp_path: Path) -> None:
    program = tmp_path / "cloned"
    subprocess.run(["gcc", "-x", "assembler", "-", "-o", program], input=ASSEMBLY, text=True, check=True)
    diagnostics = Diagnostics()
    source = SourceFile("p.rpn", f'name = "{program}"\noffset = work\nexit\n')
    compiled = resolve_here(parse_source(source, diagnostics, CompileOptions()), diagnostics)
    assert compiled.resolved is not None
    probes = compiled.resolved.probepoints
    assert advice_on_unreached(probes, Scope(command=(str(program),)), {}) == (
        "the compiler has made 'work.constprop.0' of 'work' for some of its calls: probe 'cloned:work.constprop.0'"
    )
    assert advice_on_unreached((), Scope(), {}) is None
