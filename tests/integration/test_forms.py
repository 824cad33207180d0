"""
Every form of instruction does under a probe what it does without one, and each execution is one hit.

``forms/*.forms`` lists the forms; ``programs/forms`` runs each from several initial states and prints a digest of all
registers, flags, extended state, memory and signals. One run has probes on all sites at once, the other has none.
"""

from __future__ import annotations

import difflib
import functools
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from integration.form_programs import VARIANTS, Batch, Line, Variant, batches_of, lines_of, plain_output
from integration.support import I386_COMPILER, TIMEOUT, Runner, read_result, symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.form_table import Form

RUN_TIMEOUT = 100
DETAILS = 40  # lines of a comparison that are shown

REFUSED = {
    "int3": ("int3", "int3", "it is a breakpoint instruction itself"),
    "int3_long": (".byte 0xcd, 3", "int 0x3", "it is a software interrupt"),
    "int1": (".byte 0xf1", "int1", "it raises a debug exception itself"),
    "int": ("int $0x80", "int 0x80", "it is a software interrupt"),
    "fwait": ("fwait", "fwait", "it only waits for a pending floating-point exception"),
    "into": (".byte 0xce", "into", "it may raise a software interrupt"),
    "lock_mov": (".byte 0xf0, 0x89, 0xc8", "(bad)", "it is not a valid instruction"),
}


@dataclass
class Comparison:
    """The lines of both runs; of the probed one also its hits, and what its records say of each site."""

    program: Path
    restriction: list[str]
    options: tuple[str, str]
    sites: list[str]
    plain: dict[str, Line] = field(default_factory=dict)
    probed: dict[str, Line] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def source(self) -> str:
        definitions = (f"offset = {site}\nminor = {n}\npush r, eip\nlog 1\nexit\n" for n, site in enumerate(self.sites))
        return f"name = {self.program.name}\n" + "".join(definitions)

    def details(self, name: str, run: Runner) -> str:
        """Return where the states of a form differ in the two runs."""
        plain = plain_output(self.program, name, *self.restriction).splitlines()
        command = [str(self.program), name, *self.restriction]
        probed = run(self.source, command, self.options, timeout=TIMEOUT).stdout.splitlines()
        lines = difflib.unified_diff(plain, probed, "without probes", "with probes", lineterm="", n=1)
        return "\n".join(line[:2000] for line in list(lines)[:DETAILS])


def compare(variant: Variant, directory: Path) -> Comparison:
    program = variant.build(directory)
    restriction = [variant.restriction] if variant.restriction else []
    sites = [site for form in variant.forms for site in form.sites]
    options, plain = ("--engine", variant.engine), lines_of(plain_output(program, "-", *restriction))
    comparison = Comparison(program, restriction, options, sites, plain, symbols=symbols_of(program))
    runner = Runner(directory)
    try:
        process, output = runner.start(
            comparison.source, ["--exit-status", "--", str(program), "-", *restriction], options
        )
        result = read_result(process, output, RUN_TIMEOUT)
    except AssertionError as error:
        comparison.problem = f"the last form that ended: {[*lines_of(str(error)), 'none'][-1]}"
        return comparison
    finally:
        runner.close()
    comparison.probed = lines_of(result.stdout)
    if result.status != 0:
        comparison.problem = f"status {result.status} after {[*comparison.probed, 'none'][-1]}: {result.stderr[-500:]}"
    comparison.hits = {site: result.counts[n].hits for n, site in enumerate(sites) if n in result.counts}
    for record in result.records:
        address = int.from_bytes(bytes.fromhex(record["data"]), "little")
        comparison.seen.setdefault(sites[record["minor"]], set()).add(address)
    return comparison


@pytest.fixture(scope="module")
def comparison_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Comparison]:
    """Return a function that gives the comparison for a variant, made when it is asked for first."""
    return functools.cache(lambda name: compare(VARIANTS[name], tmp_path_factory.mktemp(name)))


def test_the_tables_hold_what_was_asked_for() -> None:
    assert len({form.name for variant in VARIANTS.values() for form in variant.forms}) >= 300


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_probed_program_runs_to_its_end(comparison_of: Callable[[str], Comparison], variant: str) -> None:
    comparison = comparison_of(variant)
    assert comparison.problem == ""
    assert comparison.probed.keys() == comparison.plain.keys()


@pytest.mark.parametrize("batch", batches_of(*VARIANTS), ids=str)
def test_forms(comparison_of: Callable[[str], Comparison], run: Runner, batch: Batch) -> None:
    batch.need()
    comparison = comparison_of(batch.variant)
    batch.check(lambda form: problem_of(comparison, form, run))


def problem_of(comparison: Comparison, form: Form, run: Runner) -> str:
    """Return in what a form differs from what it is without a probe, or from what its table says."""
    plain, probed = comparison.plain[form.name], comparison.probed.get(form.name)
    if problem := form.problem(plain.runs, plain.signals):
        return problem
    if probed is None:
        return f"it was not reached: {comparison.problem}"
    if probed != plain:
        return f"{probed} is not {plain}\n{comparison.details(form.name, run)}"
    for n, site in enumerate(form.sites):
        expected = (1 if n else form.hits) * plain.runs - plain.faults
        if (hits := comparison.hits.get(site, 0)) != expected:
            return f"{site} has {hits} hits, not {expected}"
        if more := comparison.seen.get(site, set()) - {comparison.symbols[site]}:
            return f"the records of {site} are of {sorted(map(hex, more))}, not {comparison.symbols[site]:#x}"
    return ""


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_what_can_never_carry_a_probe_is_refused_by_name(run: Runner, tmp_path: Path, i386: bool) -> None:
    compiler = I386_COMPILER if i386 else "gcc"
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    refused = {name: row for name, row in REFUSED.items() if i386 or name != "into"}
    source = "".join(f".globl f_{n}\n.type f_{n}, @function\nf_{n}: {row[0]}\n" for n, row in refused.items())
    (tmp_path / "never.S").write_text(source + ".globl _start\n_start: mov $1, %eax\nmov $0, %ebx\nint $0x80\n")
    program = tmp_path / "never"
    command = [compiler, "-nostdlib", "-static", "-no-pie", "-o", str(program), str(tmp_path / "never.S")]
    subprocess.run(command, check=True, timeout=TIMEOUT)
    result = run("name = never\n" + "".join(f"offset = f_{n}\nexit\n" for n in refused), ["--", str(program)])
    found = re.findall(r"error: '(.*)' can never carry a probe: (.*)", result.stderr)
    assert found == [row[1:] for row in refused.values()]
    assert result.status == 2
