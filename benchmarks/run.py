"""
Measure what DProbes costs beside other tracers and the paper, and print one table.

Everything is measured in one run on one machine, each figure the best of some rounds; compare ratios, not numbers.
A hit is timed inside the probed program, so that nobody's start-up counts. Names of sections as arguments restrict the
run to them. A section that fails is a row that says why, and the status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accesses import accesses
from bigprograms import big_programs
from callprofiles import call_profiles
from debuginformation import debug_information
from draining import draining
from endurance import endurance
from guestkernels import guest_kernels
from inprocess import in_process
from inprocessreturns import returns_in_process
from kernel_hits import kernel_hits, papers_experiments
from latency import latency
from live import live
from managing import managing
from manyplaces import many_places
from patchplans import patch_plans
from placing import placing
from ptrace_costs import by_ptrace
from records import records
from returns import returns
from sinks import sinks
from starting import starting
from streams import streams
from stubs import behind_stubs
from table import BenchmarkError, Measurement, print_table
from tables import tables
from tracefiles import trace_files
from workloads import workloads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Sections = dict[str, Callable[[Path], list[Measurement]]]

PTRACE: Sections = {
    "ptrace": by_ptrace,
    "latency": latency,
    "plans": patch_plans,
    "placing": placing,
    "accesses": accesses,
    "live": live,
    "streams": streams,
}
RECORDS: Sections = {
    "process": in_process,
    "calls": returns_in_process,
    "profiles": call_profiles,
    "records": records,
    "sinks": sinks,
    "tables": tables,
    "types": debug_information,
    "compile": big_programs,
}
EBPF: Sections = {
    "hits": kernel_hits,
    "returns": returns,
    "paper": papers_experiments,
    "start": starting,
    "many": many_places,
    "drain": draining,
    "tracefiles": trace_files,
    "endurance": endurance,
    "manager": managing,
    "workloads": workloads,
}
STUBS: Sections = {"stubs": behind_stubs}
GUESTS: Sections = {"kernel": guest_kernels}
FAILURES = (BenchmarkError, OSError, ValueError, subprocess.SubprocessError)
"""How a section fails that cannot measure: one row says so, and the other sections are measured."""
SECTIONS = PTRACE | RECORDS | EBPF | STUBS | GUESTS


def main() -> int:
    """Measure what the arguments name, or everything."""
    if unknown := set(sys.argv[1:]) - set(SECTIONS):
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    if shutil.which("gcc") is None:
        print("the benchmark needs gcc: apt-get install gcc libc6-dev", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        measurements, failed = measure(sys.argv[1:] or list(SECTIONS), SECTIONS, Path(directory))
    print_table(measurements)
    return int(failed)


def measure(names: Sequence[str], sections: Sections, directory: Path) -> tuple[list[Measurement], bool]:
    """Measure sections; return the rows of all, and whether a section failed, of which one row says why."""
    measurements: list[Measurement] = []
    failed = False
    for name in names:
        if name in EBPF and os.geteuid() != 0:
            measurements.append(Measurement(f"{name}: the eBPF engine needs root", None))
            continue
        begin = time.monotonic()
        try:
            measurements += sections[name](directory)
        except FAILURES as error:
            failed = True
            print(f"{name}: failed after {time.monotonic() - begin:.0f} s: {error}", file=sys.stderr)
            measurements.append(Measurement(f"{name}: failed: {str(error).partition(chr(10))[0]}", None))
        else:
            print(f"{name}: measured in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return measurements, failed


if __name__ == "__main__":
    sys.exit(main())
