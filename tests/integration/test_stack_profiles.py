"""Profiles of the stacks of real programs: each call weighs where it was made."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT
from support.perfetto_messages import read_samples

if TYPE_CHECKING:
    from integration.support import Builder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = "name = callstacks\nlogmax = 2048\nmajor = 1\noffset = here\nminor = 1\nlog ustack\nexit\n"


@pytest.fixture
def run_with(build: Builder, tmp_path: Path) -> Runner:
    return Runner(build("callstacks.c", "-O1", "-pthread", "-fno-optimize-sibling-calls"), tmp_path)


class Runner:
    """Run the program on a file with options."""

    def __init__(self, target: Path, directory: Path) -> None:
        self._target = target
        self._directory = directory
        self.source = directory / "stacks.rpn"
        self.source.write_text(PROGRAM)

    def __call__(self, *options: str, status: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the program ``text`` in DProbes C, or without it the one in the file ``source``."""
        engine = () if "--engine" in options else ("--engine", "ptrace")
        program = (str(self.source),) if text is None else ("-e", text)
        command = [*DPROBES, "run", *program, *engine, *options, "--", str(self._target)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, cwd=self._directory, check=False
        )
        assert done.returncode == status, done.stderr
        return done


def folded(text: str) -> Counter[tuple[str, ...]]:
    """Return the weights in a text that has other lines as well."""
    lines = (re.fullmatch(r"(callstacks;.*) (\d+)", line) for line in text.splitlines())
    return Counter({tuple(line[1].split(";")): int(line[2]) for line in lines if line is not None})


def test_each_call_weighs_in_its_stack(run_with: Runner) -> None:
    weights = folded(run_with("--stacks", "folded").stdout)
    below = ("callstacks", "_start", "__libc_start_main", "__libc_start_call_main", "main")
    for depth in range(60):
        assert weights[(*below, *["down"] * (depth + 1), "here")] == 1
    handler = [stack for stack in weights if "handle" in stack]
    assert len(handler) == 2
    (thread,) = (stack for stack in weights if "work" in stack)
    assert thread[-12:] == ("work", *["down"] * 10, "here")
    assert "main" not in thread


def test_a_flame_graph_is_compared_with_an_earlier_one(run_with: Runner, tmp_path: Path) -> None:
    run_with("--stacks", "before.folded")
    done = run_with("--stacks", "now.html", "--baseline", "before.folded")
    assert re.search(r"^dprobes: note: 'now.html' has (\d+) samples in \d+ stacks$", done.stderr, re.MULTILINE)
    match = re.search(r"^const data = (.*);$", (tmp_path / "now.html").read_text(), re.MULTILINE)
    assert match is not None
    _, name, weight, before = json.loads(match[1])["rows"][0]
    assert (name, weight) == ("all", before)
    assert weight > 65


def dprobes(directory: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*DPROBES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=directory, check=False)
    assert done.returncode == status, done.stderr
    return done


def test_trace_files_give_the_same_profiles(run_with: Runner, tmp_path: Path) -> None:
    weights = folded(run_with("--stacks", "folded").stdout)
    run_with("-o", "before.dpt")
    run_with("-o", "now.dptz")
    for name in ("before.dpt", "now.dptz"):
        assert folded(dprobes(tmp_path, "log", name, "--stacks", "folded").stdout) == weights
    some = folded(dprobes(tmp_path, "log", "now.dptz", "--filter", "tid == pid", "--stacks", "folded").stdout)
    assert sum(some.values()) == sum(weights.values()) - 1
    assert not any("work" in stack for stack in some)
    dprobes(tmp_path, "log", "now.dptz", "--stacks", "now.html", "--baseline", "before.dpt")
    match = re.search(r"^const data = (.*);$", (tmp_path / "now.html").read_text(), re.MULTILINE)
    assert match is not None
    data = json.loads(match[1])
    assert data["baseline"] == "before.dpt"
    assert all(weight == before for _, _, weight, before in data["rows"])
    both = folded(dprobes(tmp_path, "log", "before.dpt", "now.dptz", "--stacks", "folded").stdout)
    assert both == Counter({stack: 2 * weight for stack, weight in weights.items()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--total"], "--total prints nothing else: leave out --count, --hist, --sum and --stacks"),
        (["--count", "pid"], "--stacks prints nothing else: leave out --count, --hist and --sum"),
        (["--tail", "3"], "--stacks needs all records: leave out --follow, --head and --tail"),
        (["--weight", "size"], "records have no field 'size'"),
    ],
)
def test_what_does_not_go_together_in_a_log_is_refused(
    run_with: Runner, tmp_path: Path, options: list[str], said: str
) -> None:
    run_with("-o", "now.dpt")
    done = dprobes(tmp_path, "log", "now.dpt", "--stacks", "folded", *options, status=1 if "size" in options else 2)
    assert said in done.stderr


def test_what_has_no_stack_is_said(run_with: Runner) -> None:
    run_with.source.write_text(PROGRAM.replace("log ustack", "push 1\nlog 1"))
    done = run_with("--stacks", "folded")
    count = len([line for line in done.stdout.splitlines() if re.match(r"-?\d+ 0x", line)])
    assert f"dprobes: note: {count} records have no call stack to be weighed; 'log ustack' and" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--stacks", "profile.svg"],
            "--stacks: 'profile.svg' is neither 'folded' nor a file that ends in .html, .folded, .pb.gz or .pftrace",
        ),
        (["--weight", "word0"], "--weight needs --stacks"),
        (["--stacks", "folded", "--baseline", "stacks.rpn"], "--baseline needs a flame graph: --stacks FILE.html"),
        (["--stacks", "folded", "--weight", "size"], "records have no field 'size'"),
    ],
)
def test_what_does_not_go_together_is_refused(run_with: Runner, options: list[str], said: str) -> None:
    done = run_with(*options, status=1 if "size" in options else 2)
    assert said in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_the_examples_find_what_is_busy_and_what_waits(tmp_path: Path) -> None:
    spinning = "import zlib\nfor _ in range(600): zlib.compress(bytes(range(256)) * 4000, 9)\n"
    sleeping = "import time\nfor _ in range(20): time.sleep(0.01)\n"
    for example, code, function, options in (
        ("cpu-profile", spinning, "deflate", ()),
        ("sched/off-cpu", sleeping, "clock_nanosleep", ("--weight", "us")),
    ):
        command = [
            *DPROBES,
            "run",
            example,
            *options,
            "--stacks",
            "folded",
            "--",
            "/usr/bin/python3",
            "-c",
        ]
        done = subprocess.run(
            [*command, code], capture_output=True, text=True, timeout=TIMEOUT, check=True, cwd=tmp_path
        )
        weights = Counter[bool]()
        for line in done.stdout.splitlines():
            stack, _, weight = line.rpartition(" ")
            weights[function in stack] += int(weight)
        assert weights[True] >= (200_000 if options else 10), done.stdout  # 20 times 10 ms of waiting


TABLES = (
    "callstacks:here() { @[comm, ustack(100)] = count(); @twice[ustack(100)] = sum(2); @most[ustack(100)] = max(2); }"
)


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_the_stacks_in_a_table_are_those_of_records(run_with: Runner, tmp_path: Path, engine: str) -> None:
    """Of a run and of its trace file: counts of a table weigh as records do, and sums by their value."""
    weights = folded(run_with("--stacks", "folded").stdout)
    options = ("--engine", engine, "--stacks")
    table = run_with(*options, "folded", "--weight", "@", "-o", "run.dpt", text=TABLES)
    assert folded(table.stdout) == weights
    assert "@[" not in table.stdout
    assert "@twice[" in table.stdout
    log = dprobes(tmp_path, "log", "run.dpt", "--stacks", "folded", "--weight", "@")
    assert folded(log.stdout) == weights
    for text in (run_with(*options, "folded", "--weight", "@twice", text=TABLES).stdout,
                 dprobes(tmp_path, "log", "run.dpt", "--stacks", "folded", "--weight", "@twice").stdout):  # fmt: skip
        found = [line.rpartition(" ") for line in text.splitlines() if line.startswith("_start;")]
        below = Counter({("callstacks", *stack.split(";")): int(weight) for stack, _, weight in found})
        assert below == {stack: 2 * weight for stack, weight in weights.items() if stack[1] == "_start"}
    dprobes(tmp_path, "log", "run.dpt", "--stacks", "now.html", "--weight", "@", "--baseline", "run.dpt")
    match = re.search(r"^const data = (.*);$", (tmp_path / "now.html").read_text(), re.MULTILINE)
    assert match is not None
    assert json.loads(match[1])["rows"][0][1:] == ["all", sum(weights.values()), sum(weights.values())]


@pytest.mark.parametrize(
    ("text", "options", "said", "hint"),
    [
        (
            TABLES,
            ["folded"],
            "several tables have call stacks as keys: @, @twice",
            "name the one of the profile: --weight @",
        ),
        (
            TABLES,
            ["folded", "--weight", "@most"],
            "no table '@most' has call stacks as keys, and counts or sums",
            "tables for --weight: @, @twice",
        ),
        (
            TABLES,
            ["now.pftrace", "--weight", "@twice"],
            "table '@twice' has no times of its stacks, which a trace needs",
            "log the stacks instead, or write a flame graph: --stacks FILE.html",
        ),
        (
            "callstacks:here() { @[comm] = count(); }",
            ["folded", "--weight", "@"],
            "no table '@' has call stacks as keys, and counts or sums",
            None,
        ),
    ],
)
def test_a_table_that_makes_no_profile_is_refused(
    run_with: Runner, text: str, options: list[str], said: str, hint: str | None
) -> None:
    done = run_with("--stacks", *options, text=text, status=1)
    assert done.stderr == f"dprobes: error: {said}\n" + (f"hint: {hint}\n" if hint else "")


def test_conditions_do_not_select_from_a_table(run_with: Runner, tmp_path: Path) -> None:
    run_with("-o", "run.dpt", text=TABLES)
    options = ("--stacks", "folded", "--weight", "@", "--filter", "tid == pid")
    done = dprobes(tmp_path, "log", "run.dpt", *options, status=2)
    assert "--weight @ is a whole table: leave out the conditions" in done.stderr


def test_a_table_without_stacks_leaves_the_profile_empty(run_with: Runner) -> None:
    never = "callstacks:here() { if (pid == 0) @[ustack()] = count(); }"
    done = run_with("--stacks", "folded", text=never)
    assert "dprobes: note: table '@' is empty, and so is the profile\n" in done.stderr


@pytest.mark.parametrize("engine", ["ptrace", pytest.param("ebpf", marks=needs_root)])
def test_a_perfetto_trace_has_each_stack_at_its_time(run_with: Runner, tmp_path: Path, engine: str) -> None:
    """Of a run and of its records in a trace file: stacks as they are folded, in the order of the calls."""
    done = run_with("--stacks", "run.pftrace", "--engine", engine, "--log-target", "file:run.dpt")
    assert "the trace has 69 samples of" in done.stderr
    log = subprocess.run(
        [*DPROBES, "log", "run.dpt", "--stacks", "log.perfetto-trace"],
        capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "the trace has 69 samples of" in log.stderr
    below = ["_start", "__libc_start_main", "__libc_start_call_main", "main"]
    found = [read_samples(tmp_path / name) for name in ("run.pftrace", "log.perfetto-trace")]
    assert found[0] == found[1]
    threads, samples = found[0]
    assert len(samples) == 69
    times = [sample.time for sample in samples]
    assert times == sorted(times)
    for depth, sample in enumerate(samples[:60]):
        assert sample.stack == [*below, *["down"] * (depth + 1), "here"]
        assert (sample.weight, threads[sample.tid]) == (1, "callstacks")
    assert len({sample.tid for sample in samples}) == 2
    assert len({sample.pid for sample in samples}) == 1
