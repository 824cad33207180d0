"""
The eBPF engine on older kernels, in guests: what they lack is found out, and the rest does what it does elsewhere.

``make test`` boots the oldest one and takes samples; ``make torture`` all, with more of everything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature
from guests.features import FEATURES, lack_of
from integration.support import Builder
from support.rounds import IS_TORTURE

if TYPE_CHECKING:
    from guests.guest import Guest

KERNELS = [pytest.param("6.1"), pytest.param("6.12", marks=pytest.mark.torture)]
pytestmark = pytest.mark.parametrize("kernel", KERNELS, indirect=True)

COMPILED = "/programs"
REPOSITORY = Path(__file__).parents[2]


def compile_programs(build: Builder) -> None:
    """Compile what the tests that run in the guest use."""
    for name in ("family.c", "faults.c", "hotloop.c", "leaderless.c", "threads.c", "torture.c"):
        build(name)
    for name in ("ondemand.c", "threads.c"):
        build(name, "-pthread")
    for kind in ("-DSTACKS", "-DTAILS"):
        build("entered.c", "-O2", kind)
    build("threadvariables.c")
    for i386 in (False, True):
        for kind in ("-pie", "-no-pie", "-static"):
            build("hotloop.c", kind, i386=i386)


RUNS = (
    "test_runs.py::test_each_call_is_one_record_with_its_argument[x86_64--pie]",
    "test_runs.py::test_each_call_is_one_record_with_its_argument[i386--no-pie]",
    "test_runs.py::test_an_instruction_that_faults_leaves_no_record[pointer]",
    "test_runs.py::test_a_process_is_probed_with_the_children_that_it_has_and_gets",
    "test_runs.py::test_a_probepoint_that_ended_leaves_no_breakpoint[maxhits]",
    "../test_entries.py::test_recursion_threads_longjmp_and_coroutines[ebpf]",
    "../test_entries.py::test_functions_that_end_by_tail_calls[ebpf]",
    "../test_entries.py::test_a_child_has_not_seen_what_its_parent_has_entered[ebpf]",
    "../test_thread_variables.py::test_each_thread_counts_for_itself[ebpf]",
)
MORE_RUNS = (
    *(name for name in RUNS if "argument" not in name),
    "test_runs.py::test_each_call_is_one_record_with_its_argument",
    "test_runs.py::test_threads_miss_nothing",
    "test_runs.py::test_maxhits_and_passcount_are_exact_under_threads",
    "test_runs.py::test_only_processes_of_the_user_are_hit",
    "test_bpf_calls.py",
    "test_replacing.py::test_each_hit_is_one_of_exactly_one_program[perf events]",
    "test_replacing.py::test_the_kernel_runs_the_newest_program_first[perf events]",
    "test_scope.py",
    "test_signals.py",
    "test_switchover_handlers.py",
)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what the tests that run in the guest use, outside: nothing else is in the directory."""
    directory = tmp_path_factory.mktemp("programs")
    compile_programs(Builder(directory))
    return directory


@pytest.fixture
def compiled(guest: Guest, programs: Path) -> str:
    """Put the compiled programs into the guest, and return their directory there."""
    for path in programs.rglob("*"):
        if path.is_file():
            guest.put(f"{COMPILED}/{path.relative_to(programs)}", path)
    return COMPILED


def run_source(guest: Guest, source: str, timeout: float = 400) -> str:
    """Run a Python source that uses what the tests share; return what it printed."""
    return guest.python(source, timeout=timeout, environment={"REPOSITORY": str(REPOSITORY)}).stdout


def test_trial_loading_finds_what_the_kernel_has(guest: Guest) -> None:
    found = run_source(
        guest,
        "from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features\n"
        "features = Features()\n"
        "print(*(feature.name for feature in Feature if feature not in features))\n",
    )
    lacking = {name.upper() for name in FEATURES if lack_of(name, guest.image) is not None}
    assert set(found.split()) == lacking & {feature.name for feature in Feature}


RANDOM_PROGRAMS = """
from dataclasses import replace
from random import Random
from support.differential_runs import bytes_agree, program_agrees, random_demand
from support.ebpf_abilities import loop_forms

print(*(form.name for form in loop_forms()))
agreed = {{}}
for name in ("i386", "x86_64"):
    for kind in ("defined", "wild"):
        for seed in range({start}, {start} + {rounds}):
            for form in loop_forms():
                demand = replace(random_demand(Random(seed)), loops=form)
                agreed[kind] = agreed.get(kind, 0) + program_agrees(seed, name, kind, demand, is_extreme=seed % 3 == 0)
    for seed in range({start}, {start} + {rounds}):
        agreed["bytes"] = agreed.get("bytes", 0) + bytes_agree(seed, name)
print(*agreed.values())
"""
LOOPS = {"6.1": ["CALLBACK"], "6.12": ["MAY_GOTO", "ITERATOR", "CALLBACK"]}


def test_random_programs_do_the_same_as_in_the_interpreter(guest: Guest) -> None:
    """None is refused by this kernel's verifier."""
    rounds = 150 if IS_TORTURE else 8
    loops, agreed = run_source(guest, RANDOM_PROGRAMS.format(start=1000, rounds=rounds), 3600).splitlines()
    assert loops.split() == LOOPS[guest.machine.kernel]
    defined, wild, random_bytes = (int(number) for number in agreed.split())
    total = 2 * rounds * len(LOOPS[guest.machine.kernel])
    assert defined == total
    assert wild >= total // 4
    assert random_bytes >= rounds // 2


CASES = """
import os
from pathlib import Path
from support.case_format import parse_case
from support.case_interpreter import check_compiled_case, is_compiled_case

count = 0
for path in sorted(Path(os.environ["REPOSITORY"], "tests/cases").rglob("*.case"))[::{step}]:
    case = parse_case(path, path.stem)
    for target in case.targets:
        if is_compiled_case(case, target):
            check_compiled_case(case, target)
            count += 1
print(count)
"""


def test_cases_hold(guest: Guest) -> None:
    step = 1 if IS_TORTURE else 10
    assert int(run_source(guest, CASES.format(step=step), 3600)) >= 200 // step


TESTS = """
import os, sys, pytest
os.environ |= {{"DPROBES_COMPILED_PROGRAMS": {compiled!r}, "DPROBES_TEST_PATIENCE": "5"}}
os.chdir(os.environ["REPOSITORY"])
options = ["-q", "--tb=short", "--noconftest", "-p", "integration.conftest", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *("tests/integration/ebpf/" + name for name in {names!r})]))
"""


def test_runs_of_the_engine_are_as_exact_as_elsewhere(guest: Guest, compiled: str) -> None:
    names = MORE_RUNS if IS_TORTURE else RUNS
    output = run_source(guest, TESTS.format(compiled=compiled, names=names), 3600)
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert passed is not None, output
    assert int(passed[1]) >= len(names)


NOTICE = """
import subprocess, sys
from pathlib import Path
Path("/tmp/tick.rpn").write_text("name = hotloop\\noffset = tick\\nminor = 1\\nexit\\n")
program = next(path for path in Path({compiled!r}).glob("*/hotloop"))
run = [sys.executable, "-m", "dprobes", "run", "/tmp/tick.rpn", "--engine", "ebpf", "--", program, "7"]
print(subprocess.run(run, capture_output=True, text=True, check=True).stderr)
"""


def test_without_uprobe_multi_breakpoints_are_inserted_one_by_one_which_is_said(guest: Guest, compiled: str) -> None:
    said = run_source(guest, NOTICE.format(compiled=compiled)).splitlines()
    is_old = lack_of("uprobe_multi", guest.image) is not None
    assert (said[0].startswith("dprobes: note: this kernel has no uprobe_multi links: the breakpoint has ")) == is_old
    assert any(line.split()[:4] == ["0,1", "tick", "7", "7"] for line in said)
