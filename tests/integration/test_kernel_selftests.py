"""
The kernel's selftests for x86 say the same with a probepoint on each of their instructions as without.

Those that do not are listed with the reason: a test fails if another one differs, and if one of these no longer does.
"""

from __future__ import annotations

import difflib
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import PATIENCE
from support.instruction_places import accepted
from support.kernel_selftests import SELFTESTS, Outcome, Selftest, UnavailableError, outcome_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Result, Runner

PLAIN_RUNS = 3
MORE_RUNS = 10
"""How many runs without probepoints are made before a difference counts: some selftests print what varies."""

PROGRAM_TIMEOUT = 120 * PATIENCE
LIMIT = "maxhits = 2000;"

TRACES = "it traces its own processes, which have a tracer already"
HANDLER = "a breakpoint in its SIGTRAP handler, where the signal is blocked: the kernel puts the default action back"
NARROW = "32-bit code in a 64-bit process: the kernel steps a copy that such code does not reach"
SEGMENT = "code in a segment with a base: the kernel looks for its breakpoint at an address without, for ever"
NULL = "a return from an exception clears segment registers with null selectors, as the test itself says"

DIFFERENT: dict[str, dict[str, str]] = {
    "ptrace": {
        **dict.fromkeys(
            (
                "mov_ss_trap_64",
                "mov_ss_trap_32",
                "fsgsbase_restore_64",
                "fsgsbase_restore_32",
                "ptrace_syscall_64",
                "ptrace_syscall_32",
                "fsgsbase_64",
                "syscall_numbering_64",
                "amx_64",
                "test_syscall_vdso_32",
            ),
            TRACES,
        ),
        **dict.fromkeys(
            (
                "single_step_syscall_64",
                "single_step_syscall_32",
                "syscall_nt_64",
                "syscall_nt_32",
                "sigreturn_64",
                "sigreturn_32",
                "test_vsyscall_64",
                "sigtrap_loop_64",
                "sigtrap_loop_32",
                "syscall_arg_fault_64",
                "syscall_arg_fault_32",
                "unwind_vdso_32",
            ),
            HANDLER,
        ),
    },
    "inline": {
        **dict.fromkeys(
            (
                "fsgsbase_restore_64",
                "fsgsbase_restore_32",
                "ptrace_syscall_64",
                "ptrace_syscall_32",
                "fsgsbase_64",
                "syscall_numbering_64",
                "test_syscall_vdso_32",
            ),
            TRACES,
        ),
        **dict.fromkeys(
            (
                "single_step_syscall_32",
                "syscall_nt_64",
                "syscall_nt_32",
                "sigreturn_64",
                "sigreturn_32",
                "sigtrap_loop_32",
                "syscall_arg_fault_32",
                "unwind_vdso_32",
            ),
            HANDLER,
        ),
    },
    "ebpf": {
        "sysret_ss_attrs_64": NARROW,
        "sigreturn_64": NARROW,
        "sigreturn_32": SEGMENT,
        "fsgsbase_64": NULL,
        **dict.fromkeys(
            ("mov_ss_trap_64", "mov_ss_trap_32"),
            "the kernel's own single step takes traps of the debug registers that the test has set",
        ),
        "sysret_rip_64": "it maps a page over the one in which the kernel keeps its copies",
    },
}
"""Selftests that say something else with probepoints, for each engine, and why."""


def outcomes(program: Path, count: int) -> Iterator[Outcome]:
    for _ in range(count):
        done = subprocess.run(
            [program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PROGRAM_TIMEOUT, check=False
        )
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        yield outcome_of(status, done.stdout.decode(errors="replace"))


def difference(program: Path, found: Outcome) -> str:
    """Return how a run with probepoints differs from all of some without; nothing if it is like one."""
    plain = set(outcomes(program, PLAIN_RUNS))
    for more in outcomes(program, MORE_RUNS):
        if found in plain:
            return ""
        plain.add(more)
    nearest = min(plain, key=lambda one: len(list(difflib.ndiff(one.lines, found.lines))))
    lines = difflib.unified_diff(nearest.lines, found.lines, "without", "with", lineterm="", n=0)
    return f"status {nearest.status}, with probepoints {found.status}\n" + "\n".join(list(lines)[:40])


@pytest.mark.torture
@pytest.mark.parametrize("engine", ["ptrace", "ebpf", "inline"])
@pytest.mark.parametrize("selftest", SELFTESTS, ids=[selftest.name for selftest in SELFTESTS])
def test_a_selftest_with_every_instruction_probed(selftest: Selftest, engine: str, run: Runner, tmp_path: Path) -> None:
    if engine == "ebpf":
        require_bpf()
    try:
        program = selftest.build(tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))

    try:
        (plain,) = outcomes(program, 1)
    except subprocess.TimeoutExpired:
        pytest.skip("processor: the selftest does not end here without probepoints either")

    def probed(source: str) -> Result:
        # One that loops is ended, so that its output is closed.
        command = ["--exit-status", "--", "sh", "-c", f"timeout -s KILL {PROGRAM_TIMEOUT} {program} 2>&1"]
        return run(source, command, ["--engine", engine], timeout=2 * PROGRAM_TIMEOUT)

    places = selftest.places(program)
    taken, result = accepted(program, places, LIMIT, probed)
    assert len(taken) >= len(places) * 0.8, result.stderr[-2000:]
    hits = sum(counts.hits for counts in result.counts.values())
    assert hits > 0, result.stderr[-2000:]
    found = difference(program, outcome_of(result.status, result.stdout))
    print(f"{selftest.name}, {engine}: {len(taken)} of {len(places)} instructions, {hits} hits\n{found}")
    expected = DIFFERENT[engine].get(selftest.name)
    if expected is None:
        assert found == "", result.stderr[-1000:]
    elif not found and plain.status:
        pytest.skip("processor: the selftest fails here before it comes to that")
    else:
        assert found != "", f"no longer different: {expected}"
