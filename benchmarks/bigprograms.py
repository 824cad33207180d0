"""Measure what it costs to compile programs in DProbes C that are as big as generators write them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from debuginformation import processor_time
from table import Measurement
from tracing import DPROBES, byte_code

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["big_programs"]

LABELS = 3_000
STATEMENTS = 10_000
PROBES = 10_000


def big_programs(directory: Path) -> list[Measurement]:
    """Return two rows for each program: processor time of a whole process that checks it, and of one that builds it."""
    module = _module(directory)
    programs = {
        f"a switch of {LABELS} labels": _switch(),
        f"a handler of {STATEMENTS} statements": _statements(),
        f"{PROBES} probes": _probes(),
    }
    environment = os.environ | byte_code(directory, is_there=True)
    rows = []
    for what, text in programs.items():
        source = directory / "big.dpc"
        source.write_text(f'module "{module}";\nstatic long total;\n{text}')
        for verb in ("check", "build"):
            begin = processor_time()
            subprocess.run(
                [*DPROBES, verb, str(source), *(["-o", str(directory / "big.ppdf")] if verb == "build" else [])],
                capture_output=True,
                env=environment,
                check=True,
                timeout=600,
            )
            rows.append(Measurement(f"{verb}, processor time: {what}", (processor_time() - begin) * 1e6))
    return rows


def _module(directory: Path) -> Path:
    """Return a library with as many functions as there are probes."""
    source, library = directory / "functions.s", directory / "libfunctions.so"
    functions = "".join(f".globl f{n}\n.type f{n}, @function\nf{n}: ret\n.size f{n}, .-f{n}\n" for n in range(PROBES))
    source.write_text(f".text\n{functions}.section .note.GNU-stack\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    return library


def _switch() -> str:
    cases = "".join(f"case {n}: total += {n}; break;\n" for n in range(LABELS))
    return f"f0(unsigned long size) {{ switch (size) {{\n{cases}default: total++; }} }}\n"


def _statements() -> str:
    lines = "".join(f"total += size * {n} + (total ^ {n});\n" for n in range(STATEMENTS))
    return f"f0(unsigned long size) {{\n{lines}}}\n"


def _probes() -> str:
    return "".join(f"f{n} {{ total += {n}; }}\n" for n in range(PROBES))
