"""The program that runs the instruction forms of ``tests/forms``: how it is made, and what it prints."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import I386_COMPILER, PROGRAMS, TIMEOUT
from support.form_table import Form, assembly, read_forms

if TYPE_CHECKING:
    from collections.abc import Callable

FLAGS = (
    "-O1", "-g", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-tree-loop-distribute-patterns",
    "-mgeneral-regs-only", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,--defsym=ABSOLUTE_28=0x28",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """
    A program for a processor, with its code at ``base``; ``restriction`` hinders the mapping of memory in it.

    ``engine`` is the one that probes it.
    """

    architecture: str
    word_size: int
    base: int
    restriction: str = ""
    engine: str = "ptrace"

    @property
    def forms(self) -> list[Form]:
        return [form for form in read_forms(self.architecture) if not (form.low and self.base >> 32)]

    def build(self, directory: Path) -> Path:
        compiler = "gcc" if self.word_size == 8 else I386_COMPILER
        if shutil.which(compiler) is None:
            pytest.skip(f"{compiler} is not installed")
        source = directory / "table.S"
        source.write_text(assembly(self.forms, self.word_size))
        harness, output = PROGRAMS / "forms", directory / "forms"
        inputs = (harness / "harness.c", harness / f"enter{8 * self.word_size}.S", source)
        where = ("-fPIE" if self.word_size == 8 else "-fno-pie", f"-Wl,-Ttext-segment={self.base:#x}")
        subprocess.run([compiler, *FLAGS, *where, "-o", output, *inputs], check=True, timeout=TIMEOUT)
        return output


VARIANTS = {
    "x86_64": Variant("x86_64", 8, 0x10000000),
    "x86_64_high": Variant("x86_64", 8, 0x700030000000),
    "x86_64_seccomp": Variant("x86_64", 8, 0x10000000, "seccomp"),
    "x86_64_inline": Variant("x86_64", 8, 0x10000000, engine="inline"),
    "i386": Variant("i386", 4, 0x10000000),
    "i386_full": Variant("i386", 4, 0x10000000, "full"),
}


# Intel's processors store the return address before they fault; the copy in a slot stores its own.
BY_VENDOR = {"call_non_canonical": "it stores below the stack pointer before it faults"}


@dataclass(frozen=True)
class Line:
    """What the program prints of a form."""

    runs: int
    signals: int
    faults: int
    digest: str


def lines_of(output: str) -> dict[str, Line]:
    rows = [line.split() for line in output.splitlines()]
    return {row[0]: Line(int(row[1], 16), int(row[2], 16), int(row[3], 16), row[4]) for row in rows if len(row) == 5}


def plain_output(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout[-500:]
    return done.stdout


@functools.cache
def processor_flags() -> frozenset[str]:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def lack_of(form: Form) -> str:
    """Return why this processor does not carry out a form as the table says, or nothing."""
    if form.name in BY_VENDOR and "vmmcall" not in processor_flags():
        return BY_VENDOR[form.name]
    if missing := set(form.needs) - processor_flags():
        return f"it lacks {', '.join(sorted(missing))}"
    return ""


@dataclass(frozen=True)
class Batch:
    """Forms of one section that need the same of the processor: one test carries them out, or is skipped."""

    variant: str
    title: str
    forms: list[Form]

    def __str__(self) -> str:
        return f"{self.variant}-{self.title}"

    def need(self) -> None:
        if lack := lack_of(self.forms[0]):
            pytest.skip(f"processor: {', '.join(form.name for form in self.forms)}: {lack}")

    def check(self, problem_of: Callable[[Form], str]) -> None:
        """Fail with each form that has a problem, and its place in the tables."""
        problems = ((form, problem_of(form)) for form in self.forms)
        failed = [f"{form.name} ({form.place}): {problem}" for form, problem in problems if problem]
        if failed:
            pytest.fail(f"{len(failed)} of {len(self.forms)} forms\n" + "\n".join(failed), pytrace=False)


def batches_of(*variants: str) -> list[Batch]:
    found: dict[tuple[str, str], list[Form]] = {}
    for variant in variants:
        for form in VARIANTS[variant].forms:
            section = form.place.partition("[")[2].rstrip("]")
            apart = [form.name] if form.name in BY_VENDOR else [f"needs {need}" for need in form.needs]
            found.setdefault((variant, " ".join((section, *apart))), []).append(form)
    return [Batch(variant, title, forms) for (variant, title), forms in found.items()]
