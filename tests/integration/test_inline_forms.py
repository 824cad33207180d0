"""
Every form of instruction does under a handler in the process what it does without one, faults among it.

The program of ``test_forms.py`` waits until the jumps are there. Each execution that completes is one hit with a
record, wherever its handler ran; most have run in the process.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from integration.form_programs import VARIANTS, Batch, Line, batches_of, lines_of
from integration.support import TIMEOUT, Runner, await_message, read_result, running, symbols_of

if TYPE_CHECKING:
    from support.form_table import Form

RUN_TIMEOUT = 100
VARIANT = VARIANTS["x86_64"]
WAITING = ("-", "waiting")

STEPPING = ("pushf_trap", "trap_nop", "trap_push", "trap_add", "trap_jump")
THROUGH_MEMORY = (
    "call_memory", "call_memory_index", "call_stack", "call_top_of_stack", "call_overwritten", "call_sp_register",
    "call_rip", "call_rip_bnd", "call_r12_memory",
)  # fmt: skip
SHOWN = dict.fromkeys(STEPPING, "a program that steps itself steps through the trampoline") | dict.fromkeys(
    THROUGH_MEMORY, "the copy of a call through memory leaves something below the return address"
)
"""Forms that show where they are executed."""
FIXED = {"mov_rip_unmapped", "store_rip_read_only"}
"""Forms that fault at a fixed place of their own module, which is not tried before: so they have a record."""


@dataclass
class Comparison:
    """The lines of both runs; of the probed one also what is said of each site."""

    plain: dict[str, Line]
    probed: dict[str, Line]
    symbols: dict[str, int]
    hits: dict[str, int] = field(default_factory=dict)
    records: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    executed: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    directory = tmp_path_factory.mktemp("forms")
    program = VARIANT.build(directory)
    done = subprocess.run([program, *WAITING], input="!", capture_output=True, text=True, timeout=TIMEOUT, check=True)
    sites = [site for form in VARIANT.forms for site in form.sites]
    definitions = (f"offset = {site}\nminor = {n}\npush r, eip\nlog 1\nexit\n" for n, site in enumerate(sites))
    runner = Runner(directory)
    try:
        with running(program, *WAITING, stdin=subprocess.PIPE) as target:
            source = f"name = {program.name}\n" + "".join(definitions)
            client, output = runner.start(source, ["-p", str(target.pid)], ["--engine", "inline", "--log", "TSC"])
            await_message(client, "probepoints are active")
            stdout, _ = target.communicate("!", timeout=RUN_TIMEOUT)
            assert target.returncode == 0
            result = read_result(client, output, RUN_TIMEOUT)
    finally:
        runner.close()
    found = Comparison(lines_of(done.stdout), lines_of(stdout), symbols_of(program))
    for n, site in enumerate(sites):
        if n in result.counts:
            counts = result.counts[n]
            found.hits[site], found.records[site], found.executed[site] = counts.hits, counts.records, counts.executed
    for record in result.records:
        address = int.from_bytes(bytes.fromhex(record["data"]), "little")
        found.seen.setdefault(sites[record["minor"]], set()).add(address)
    return found


def test_most_forms_have_handlers_in_the_process(comparison: Comparison) -> None:
    inside = [site for site, executed in comparison.executed.items() if "inline" in executed]
    assert len(inside) >= 0.75 * len(comparison.executed)
    assert comparison.probed.keys() == comparison.plain.keys()


@pytest.mark.parametrize("batch", batches_of("x86_64"), ids=str)
def test_forms(comparison: Comparison, batch: Batch) -> None:
    batch.need()
    batch.check(lambda form: problem_of(comparison, form))


def problem_of(comparison: Comparison, form: Form) -> str:
    """Return in what a form differs from what it is without a handler."""
    plain, probed = comparison.plain[form.name], comparison.probed[form.name]
    if probed != plain and form.name not in SHOWN:
        return f"{probed} is not {plain}"
    for n, site in enumerate(form.sites):
        expected = (1 if n else form.hits) * plain.runs - (0 if form.name in FIXED else plain.faults)
        hits, records = comparison.hits.get(site, 0), comparison.records.get(site, 0)
        if (hits, records) != (expected, expected):
            return f"{site} ({comparison.executed[site]}) has {hits} hits and {records} records, not {expected}"
        if more := comparison.seen.get(site, set()) - {comparison.symbols[site]}:
            return f"the records of {site} are of {sorted(map(hex, more))}, not {comparison.symbols[site]:#x}"
    return ""
