"""``dprobes profile``: the calls of functions against the program's own counters, and the sums of their times."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

ENGINES = ("inline", "ptrace")
FLAGS = ("-O1", "-foptimize-sibling-calls", "-pthread")
ROUNDS = 30
FUNCTIONS = ("round_of", "leaf", "recursive", "jumping", "throwing", "tailed", "tail")


class Profile(NamedTuple):
    """The rows of a profile in JSON, and the numbers of calls that the program has counted, by caller and callee."""

    functions: dict[str, dict[str, Any]]
    edges: dict[tuple[str, str], dict[str, Any]]
    counted: dict[tuple[str, str], int]


def profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``dprobes profile``, and return its output."""
    return subprocess.run(
        [*DPROBES, "profile", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(),
        check=False,
    )


def profile_of(program: Path, pattern: str, engine: str) -> Profile:
    """Return the profile of the functions of a program that match a pattern."""
    done = profile(f"{program}:{pattern}", "--engine", engine, "--json", "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    counted = [line.split() for line in done.stderr.splitlines() if not line.startswith("dprobes: ")]
    return Profile(
        {row["function"]: row for row in rows if "function" in row},
        {(row["caller"] or "outside", row["callee"]): row for row in rows if "callee" in row},
        {(caller, callee): int(calls) for caller, callee, calls in counted},
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_calls_are_those_that_the_program_counts(build: Builder, engine: str) -> None:
    found = profile_of(build("profiled.c", *FLAGS), "[j-t]*", engine)  # neither "main" nor those of the C library
    calls = {key: row["calls"] for key, row in found.edges.items() if key[1] in FUNCTIONS}
    # Threads call the first function; "main" and "thread" are profiled as well.
    calls["outside", "round_of"] = calls.pop(("thread", "round_of"))
    assert calls == found.counted
    assert {name: row["left"] for name, row in found.functions.items() if row["left"]} == {
        "throwing": found.functions["throwing"]["calls"]
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_exclusive_times_add_up_to_the_inclusive_times_of_calls_from_outside(build: Builder, engine: str) -> None:
    found = profile_of(build("profiled.c", *FLAGS), "[j-t]*", engine)
    outside = sum(row["inclusive"] for (caller, _), row in found.edges.items() if caller == "outside")
    assert sum(row["exclusive"] for row in found.functions.values()) == outside
    for name, row in found.functions.items():
        into = [edge for (_, callee), edge in found.edges.items() if callee == name]
        out_of = [edge for (caller, _), edge in found.edges.items() if caller == name]
        assert sum(edge["calls"] for edge in into) == row["calls"]
        inclusive = sum(edge["inclusive"] for edge in into)
        assert row["exclusive"] == inclusive - sum(edge["inclusive"] for edge in out_of)
        within = sum(edge["inclusive"] for (caller, callee), edge in found.edges.items() if caller == callee == name)
        assert row["inclusive"] == inclusive - within


def test_time_in_other_functions_is_that_of_their_callers(build: Builder) -> None:
    found = profile_of(build("profiled.c", *FLAGS), "[jr]*ing", "inline")
    assert set(found.edges) == {("outside", "jumping")}
    row = found.functions["jumping"]
    assert (row["calls"], row["exclusive"]) == (2 * ROUNDS, row["inclusive"])


def test_the_format_of_callgrind_has_functions_and_edges(build: Builder, tmp_path: Path) -> None:
    program, file = build("profiled.c", *FLAGS), tmp_path / "callgrind.out"
    done = profile(f"{program}:[lr]*", "--callgrind", file, "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    lines = file.read_text().splitlines()
    assert lines[:2] == ["# callgrind format", "version: 1"]
    assert [line for line in lines if line.startswith(("fn=", "cfn=", "calls="))] == [
        "fn=leaf",
        "fn=recursive",
        "cfn=leaf",
        f"calls={2 * ROUNDS} 0",
        "cfn=recursive",
        f"calls={4 * ROUNDS} 0",
        "fn=round_of",
        "cfn=leaf",
        f"calls={6 * ROUNDS} 0",
        "cfn=recursive",
        f"calls={2 * ROUNDS} 0",
    ]
    costs = [int(line.split()[1]) for before, line in pairwise(lines) if before.startswith("fn=")]
    assert f"summary: {sum(costs)}" in lines


def test_with_callees_only_calls_within_calls_of_the_function_count(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    done = profile(f"{program}:recursive", "--callees", "--json", "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    counted = {(caller, callee): int(calls) for caller, callee, calls in map(str.split, lines_of_program(done.stderr))}
    edges = {(row["caller"], row["callee"]): row["calls"] for row in rows if "callee" in row}
    # Other calls of "leaf" are not within a call of "recursive".
    assert edges == {
        (None, "recursive"): counted["round_of", "recursive"],
        ("recursive", "recursive"): counted["recursive", "recursive"],
        ("recursive", "leaf"): counted["recursive", "leaf"],
    }
    outside = sum(row["inclusive"] for row in rows if row.get("caller", "") is None)
    assert sum(row["exclusive"] for row in rows if "function" in row) == outside
    assert (
        "dprobes: note: 2 functions of the module are profiled: the given ones, and those that calls from them may "
        "reach"
    ) in done.stderr.splitlines()


def test_with_callees_the_calls_that_are_known_at_run_time_only_are_counted(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    done = profile(f"{program}:round_of", "--callees", "--json", "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("dprobes: note: ")]
    what, calls, elsewhere = (note.removeprefix("dprobes: note: ") for note in notes[:3])
    assert what == ("7 functions of the module are profiled: the given ones, and those that calls from them may reach")
    assert calls == (
        "1 call in 1 function is indirect: a function that only such calls reach is not profiled, and its time counts "
        "as time of the caller"
    )
    assert elsewhere == ("2 functions of other files, such as '_setjmp', are called: their time is that of the callers")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["function"] for row in rows if "function" in row} == set(FUNCTIONS)


def lines_of_program(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("dprobes: ", "hint: "))]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_times_of_paths_add_up_to_the_exclusive_times_of_functions(
    build: Builder, tmp_path: Path, engine: str
) -> None:
    program, file = build("profiled.c", *FLAGS), tmp_path / "stacks.folded"
    done = profile(f"{program}:[j-t]*", "--engine", engine, "--json", "--stacks", file, "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    edges = {(row["caller"], row["callee"]) for row in rows if "callee" in row}
    times: dict[str, int] = {}
    for line in file.read_text().splitlines():
        path, _, weight = line.rpartition(" ")
        stack = path.split(";")
        times[stack[-1]] = times.get(stack[-1], 0) + int(weight)
        assert all(pair in edges for pair in pairwise(stack))
        assert stack[0] == "thread" or (None, stack[0]) in edges
    assert times == {row["function"]: row["exclusive"] for row in rows if "function" in row}
    paths = {line.rpartition(" ")[0] for line in file.read_text().splitlines()}
    assert {"thread;round_of;recursive;recursive;leaf", "thread;round_of;jumping;throwing;throwing"} <= paths


def test_a_flame_graph_and_a_profile_for_pprof_have_the_same_total(build: Builder, tmp_path: Path) -> None:
    program = build("profiled.c", *FLAGS)
    for name, start in (("graph.html", b"<!doctype html>"), ("profile.pb.gz", b"\x1f\x8b")):
        done = profile(f"{program}:[lr]*", "--json", "--stacks", tmp_path / name, "--", program, ROUNDS)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(start)
        total = sum(row["exclusive"] for row in map(json.loads, done.stdout.splitlines()) if "function" in row)
        assert f"dprobes: note: '{tmp_path / name}' has {total} nanoseconds in " in done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_that_an_exec_ends_are_not_callers_of_those_after_it(build: Builder, engine: str) -> None:
    program = build("reexecuted.c", "-O1")
    done = profile(f"{program}:step_*", "--engine", engine, "--json", "--", program, 3)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    edges = {(row["caller"], row["callee"]): row["calls"] for row in rows if "callee" in row}
    assert edges == {(None, "step_work"): 4, ("step_again", "step_work"): 3}  # no call of "step_again" has ended


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graph_has_the_calls_that_the_program_counts(build: Builder, engine: str) -> None:
    program = build("profiled.c", *FLAGS)
    done = profile(f"{program}:[j-t]*", "--graph", "--engine", engine, "--", program, 3)
    assert done.returncode == 0, done.stderr
    graph = [line for line in done.stdout.splitlines() if "|" in line]
    assert graph[0] == "  thread  duration  | function"
    counted: dict[tuple[str, str], int] = {}
    pending: dict[int, list[str]] = {}
    for line in graph[1:]:
        head, _, text = line.partition("| ")
        stack = pending.setdefault(int(head.split()[0]), [])
        depth = (len(text) - len(text.lstrip())) // 2
        name = text.strip().removeprefix("} /* ").split("(")[0].split(" */")[0].split(":")[0]
        if text.lstrip().startswith("}"):
            assert (len(stack), stack.pop()) == (depth + 1, name)
            continue
        assert len(stack) == depth
        pair = (stack[-1] if stack else "outside", name)
        counted[pair] = counted.get(pair, 0) + 1
        if text.endswith("{"):
            stack.append(name)
    lines = [line for line in done.stdout.splitlines() if "|" not in line]
    expected = {(caller, callee): int(calls) for caller, callee, calls in map(str.split, lines)}
    expected["thread", "round_of"] = expected.pop(("outside", "round_of"))
    assert {pair: calls for pair, calls in counted.items() if pair[1] in FUNCTIONS} == expected
    left = sum(line.endswith("/* throwing: left without a return */") for line in graph)
    assert left == expected["jumping", "throwing"] + expected["throwing", "throwing"]


def test_top_prints_the_calls_of_each_interval_while_the_program_runs(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    with subprocess.Popen([program, str(1 << 40)], stdout=subprocess.DEVNULL) as target:
        try:
            command = [*DPROBES, "profile", f"{program}:[lr]*", "--top", "--interval", "100ms", "-p", str(target.pid)]
            tracer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
            assert tracer.stdout is not None
            lines: list[str] = []
            while sum(line.startswith("the last ") for line in lines) < 4:
                line = tracer.stdout.readline()
                assert line, "the tracer ended early"
                lines.append(line)
            tracer.send_signal(signal.SIGINT)
            lines += tracer.communicate(timeout=TIMEOUT)[0].splitlines()
            assert tracer.returncode == 0
        finally:
            target.kill()
    counted = [int(line.split()[4]) for line in lines if line.startswith("the last ")]
    whole = sum(int(line.split()[1]) for line in lines[-3:])
    assert [line.split()[0] for line in sorted(lines[-3:])] == ["leaf", "recursive", "round_of"]
    assert 0 < sum(counted) <= whole


def test_what_cannot_be_profiled_is_refused_by_name(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    done = profile(f"{program}:absent*", "--", program, 1)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"dprobes: error: '{program.name}' has no function that matches 'absent*'",
        f"hint: dprobes list {program} prints the functions",
    ]
    done = profile(f"{program}:leaf")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "Error: profile needs a command (-c COMMAND, or -- COMMAND) or a process (-p PID)",
    )
    for arguments, message in (
        ((program, "--callees"), f"--callees needs the function whose calls count: {program}:FUNCTION"),
        (
            (program, "--stacks", "x.pftrace"),
            "--stacks: 'x.pftrace' would need the time of each call; profile adds the times up",
        ),
        ((program, "--graph", "--json"), "--graph prints each call instead of a profile: leave out --json"),
        ((program, "--top", "--json"), "--top prints tables: leave out --json"),
        ((program, "--interval", "1s"), "--interval needs --top"),
        (
            (program, "--stacks", "folded", "--json"),
            "--json and --stacks folded exclude each other: both print on standard output",
        ),
        ((program, "--json", "--rows", 1), "--rows is for the table: leave out --json"),
        ((program, "--stacks", "folded", "--rows", 1), "--rows is for the table: leave out --stacks folded"),
        (
            (program, "--stacks", "x.y"),
            "--stacks: 'x.y' is neither 'folded' nor a file that ends in .html, .folded, .pb.gz or .pftrace",
        ),
    ):
        done = profile(*arguments, "--", program, 1)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"Error: {message}")


def test_a_file_that_cannot_be_written_is_an_error_before_the_command_runs(build: Builder, tmp_path: Path) -> None:
    program, ran = build("profiled.c", *FLAGS), tmp_path / "ran"
    done = profile(f"{program}:[lr]*", "--callgrind", tmp_path / "no" / "file", "--", "touch", ran)
    assert done.returncode == 1
    assert done.stderr == f"dprobes: error: '{tmp_path}/no/file': no such file or directory\n"
    assert not ran.exists()


def test_folded_stacks_are_alone_on_standard_output(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    done = profile(f"{program}:leaf", "--stacks", "folded", "--", program, ROUNDS)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("leaf ")
    assert f"recursive leaf {2 * ROUNDS}" in done.stderr.splitlines()


def test_a_graph_without_calls_is_an_error_as_a_profile_is(build: Builder) -> None:
    program = build("profiled.c", *FLAGS)
    for options in ((), ("--graph",)):
        done = profile(f"{program}:leaf", *options, "--", program, 0)
        assert done.returncode == 1
        assert f"dprobes: error: no call of a function of '{program.name}' has ended" in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--graph",), "61 calls are missing: they were more than 239 calls deep"),
        ((), "61 calls were more than 239 calls deep: their time is that of their callers"),
    ],
)
def test_calls_that_are_too_deep_are_counted(build: Builder, tmp_path: Path, options: tuple[str], warning: str) -> None:
    source, program = tmp_path / "deep.c", tmp_path / "deep"
    source.write_text("""
        __attribute__((noinline)) int deep(int n) { return n ? deep(n - 1) * 3 + 1 : 0; }
        int main(void) { return deep(299) & 0; }
    """)
    flags = ("-O1", "-fno-optimize-sibling-calls", "-fno-ipa-cp")
    subprocess.run(["gcc", *flags, source, "-o", program], check=True, timeout=TIMEOUT)
    done = profile(f"{program}:deep", *options, "--", program)
    assert done.returncode == 0, done.stderr
    assert f"dprobes: warning: {warning}" in done.stderr.splitlines()


def test_a_graph_names_the_functions_that_took_breakpoints(build: Builder, tmp_path: Path) -> None:
    # No jump fits into the first byte of "slow": the next bytes are a loop, and as a distance they lead below 0.
    source, program = tmp_path / "slow.c", tmp_path / "slow"
    source.write_text("""
        __asm__(".globl slow\\n.type slow, @function\\nslow: .cfi_startproc\\nnop\\n1: dec %edi\\njnz 1b\\nret\\n"
                ".cfi_endproc\\n.size slow, .-slow\\n");
        extern void slow(int);
        __attribute__((noinline)) int fast(int n) { __asm__ volatile("" : "+r"(n)); return n * 77777; }
        int main(void) { slow(3); return fast(2) == 1; }
    """)
    subprocess.run(["gcc", "-O1", "-no-pie", source, "-o", program], check=True, timeout=TIMEOUT)
    found = [profile(f"{program}:[fs]*[tw]", *options, "--", program) for options in ((), ("--graph",))]
    warnings = [[line for line in done.stderr.splitlines() if "include breakpoints" in line] for done in found]
    assert warnings[0] == warnings[1] != [], found
