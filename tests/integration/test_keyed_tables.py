"""Keyed tables on a program that knows what they must hold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import DPROBES, TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
ENGINES = pytest.mark.parametrize("engine", ["ptrace", pytest.param("ebpf", marks=needs_root)])

KINDS = """
name = tallied
table = counts, count, str[20]
table = sums, sum, str[20]
table = least, min, str[20]
table = largest, max, str[20]
table = means, avg, str[20]
table = all, stats, str[20]
table = powers, hist
table = steps, lhist(-100, 1000, 50)
table = few, count, word, room = 3
offset = event
    push r, arg1; tally counts
    push r, arg1; push r, arg0; tally sums
    push r, arg1; push r, arg0; tally least
    push r, arg1; push r, arg0; tally largest
    push r, arg1; push r, arg0; tally means
    push r, arg1; push r, arg0; tally all
    push r, arg0; tally powers
    push r, arg0; tally steps
    push r, arg0; tally few
    abort
"""


def run(engine: str, source: Path, *arguments: object) -> tuple[dict[str, list[dict[str, Any]]], list[list[str]]]:
    """Return the rows of each table, and the lines of the program, split at '|'."""
    command = [sys.executable, "-m", "dprobes", "run", source, "--engine", engine, "--format", "json", *arguments]
    done = subprocess.run(
        [str(word) for word in command], check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment()
    )
    assert done.returncode == 0, done.stderr
    rows = defaultdict(list)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        if "table" in row:
            rows[row["table"]].append(row)
    return rows, [line.split("|") for line in done.stderr.splitlines() if "|" in line]


def values(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["keys"][0]: row["value"] for row in rows}


@ENGINES
@pytest.mark.parametrize("threads", [1, 4])
def test_every_kind_holds_what_the_program_says(engine: str, threads: int, build: Builder, tmp_path: Path) -> None:
    source = tmp_path / "kinds.rpn"
    source.write_text(KINDS)
    count = 20_000 if engine == "ebpf" else 2_000
    rows, lines = run(engine, source, "--", build("tallied.c", "-pthread"), count, threads)
    truth = {name[:20]: tuple(map(int, numbers)) for name, *numbers in lines if len(numbers) == 4}
    assert sum(numbers[0] for numbers in truth.values()) == count
    assert values(rows["counts"]) == {name: numbers[0] for name, numbers in truth.items()}
    assert values(rows["sums"]) == {name: numbers[1] for name, numbers in truth.items()}
    assert values(rows["least"]) == {name: numbers[2] for name, numbers in truth.items()}
    assert values(rows["largest"]) == {name: numbers[3] for name, numbers in truth.items()}
    for row in rows["all"]:
        assert (row["count"], row["sum"], row["min"], row["max"]) == truth[row["keys"][0]]
    assert {row["keys"][0]: (row["count"], row["sum"]) for row in rows["means"]} == {
        name: numbers[:2] for name, numbers in truth.items()
    }
    (powers,) = rows["powers"]
    powers_of_truth = {int(power): int(number) for _, power, number in (line for line in lines if line[0] == "bucket")}
    found = {low.bit_length(): number for low, _, number in powers["buckets"] if low >= 0}
    assert found == powers_of_truth
    assert sum(number for *_, number in powers["buckets"]) == count
    (steps,) = rows["steps"]
    assert sum(number for *_, number in steps["buckets"]) == count
    *few, lost = rows["few"]
    assert len(few) == 3
    assert sum(row["value"] for row in few) + lost["lost"] == count


@contextlib.contextmanager
def shown_at_intervals(build: Builder, tmp_path: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a run about a program that goes on, which shows a table at intervals; end both."""
    source = tmp_path / "hits.rpn"
    source.write_text("name = tallied\ntable = hits, count\noffset = event\ntally hits\nabort\n")
    command = [*DPROBES, "run", source, "--engine", "ptrace", "--format", "json", "--interval", "50ms", *options]
    with subprocess.Popen([build("tallied.c", "-pthread"), "1000000000", "1"], stdout=subprocess.DEVNULL) as target:
        client = subprocess.Popen(
            [*map(str, command), "-p", str(target.pid)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        try:
            yield client
            client.send_signal(signal.SIGINT)
            _, said = client.communicate(timeout=TIMEOUT)
            assert client.returncode == 0, said
        finally:
            client.kill()
            target.kill()


def test_a_table_is_shown_at_intervals(build: Builder, tmp_path: Path) -> None:
    with shown_at_intervals(build, tmp_path) as client:
        assert client.stdout is not None
        counts = [json.loads(client.stdout.readline())["value"] for _ in range(5)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] > 0


@pytest.mark.parametrize("log_format", ["text", "json", "csv"])
def test_log_targets_get_the_tables_in_formats_that_have_a_form_for_them(
    build: Builder, tmp_path: Path, log_format: str
) -> None:
    source, path = tmp_path / "kinds.rpn", tmp_path / "out"
    source.write_text(KINDS)
    options = ["--log-target", f"file:{path}", "--log-format", log_format]
    command = [sys.executable, "-m", "dprobes", "run", source, "--engine", "ptrace", "--format", "json", *options]
    done = subprocess.run(
        [*map(str, command), "--", str(build("tallied.c", "-pthread")), "200", "1"],
        check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment(),
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    content = path.read_text()
    match log_format:
        case "json":
            assert [json.loads(line) for line in content.splitlines()] == rows
        case "text":
            for key, value in values([row for row in rows if row["table"] == "counts"]).items():
                assert f"@counts[{key}]: {value}\n" in content
        case _:
            assert content == ""


def test_targets_get_the_tables_at_each_interval(build: Builder, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with shown_at_intervals(build, tmp_path, "--log-target", f"file:{path}", "--log-format", "json"):
        await_true(lambda: path.exists() and path.read_text().count("\n") >= 3, "three intervals")
    counts = [json.loads(line)["value"] for line in path.read_text().splitlines()]
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_a_trace_file_and_prometheus_get_the_tables(build: Builder, tmp_path: Path) -> None:
    source, trace, text = tmp_path / "kinds.rpn", tmp_path / "x.dpt", tmp_path / "x.prom"
    source.write_text(KINDS.replace("    abort", "    exit"))
    target = ["--", str(build("tallied.c", "-pthread")), "200", "1"]
    rows, _ = run("ptrace", source, "--prometheus", text, *target)
    command = [sys.executable, "-m", "dprobes", "run", str(source), "--engine", "ptrace", "-o", str(trace), *target]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    shown = subprocess.run(
        [sys.executable, "-m", "dprobes", "log", trace, "--format", "json"], check=True, capture_output=True, text=True
    )
    *records, last = [json.loads(line) for line in shown.stdout.splitlines()]
    from_trace = [each for each in (*records, last) if "table" in each]
    assert from_trace == [row for found in rows.values() for row in found]
    assert len(records) + 1 - len(from_trace) == 200
    only = subprocess.run(
        [sys.executable, "-m", "dprobes", "log", trace, "--tables"], check=True, capture_output=True, text=True
    )
    assert "@counts[alpha]: " in only.stdout
    samples = dict(line.rsplit(" ", 1) for line in text.read_text().splitlines() if not line.startswith("#"))
    for name, value in values(rows["counts"]).items():
        assert samples[f'dprobes_counts_total{{key0="{name}"}}'] == str(value)


STACKS = """
name = stacked
table = from, sum, ustack[3]
table = at, count, address
offset = leaf
    push r, arg0; tally from
    push r, pc; tally at
    abort
"""

STACKED = """
__attribute__((noinline, noclone)) long leaf(long n) { __asm__ volatile("nop"); return n; }
__attribute__((noinline, noclone)) long one(long n) { long r = leaf(n); __asm__ volatile(""); return r + 1; }
__attribute__((noinline, noclone)) long two(long n) { long r = one(n); __asm__ volatile(""); return r + leaf(1); }
int main(void) { long s = 0; for (long i = 0; i < 300; i++) s += two(i); return s == 42; }
"""


@ENGINES
def test_a_call_stack_is_a_key(engine: str, tmp_path: Path) -> None:
    """Without frame pointers; the process has ended when its frames are named."""
    (tmp_path / "stacked.c").write_text(STACKED)
    source, program = tmp_path / "stacks.rpn", tmp_path / "stacked"
    source.write_text(STACKS)
    subprocess.run(["gcc", "-O2", "-fomit-frame-pointer", "-o", program, tmp_path / "stacked.c"], check=True)
    rows, _ = run(engine, source, "--", program)
    functions = {tuple(frame.partition("+")[0].partition(" ")[0] for frame in row["keys"][0]): row["value"]
                 for row in rows["from"]}  # fmt: skip
    assert functions == {("leaf", "one", "two"): sum(range(300)), ("leaf", "two", "main"): 300}
    assert [(row["keys"], row["value"]) for row in rows["at"]] == [(["leaf [stacked]"], 600)]


KEPT = """
name = stacked
table = last, last, word, value = ustack[3]
table = names, last, ustack[2], value = comm
offset = leaf
    push r, arg0; tally last
    tally names
    push 7; delete last
    abort
"""


@ENGINES
def test_a_call_stack_is_kept_and_taken_out(engine: str, tmp_path: Path) -> None:
    (tmp_path / "stacked.c").write_text(STACKED.replace("i < 300", "i < 10"))
    source, program = tmp_path / "kept.rpn", tmp_path / "stacked"
    source.write_text(KEPT)
    subprocess.run(["gcc", "-O2", "-fomit-frame-pointer", "-o", program, tmp_path / "stacked.c"], check=True)
    rows, _ = run(engine, source, "--", program)

    def functions(frames: list[str]) -> list[str]:
        return [frame.partition("+")[0].partition(" ")[0] for frame in frames]

    kept = {row["keys"][0]: functions(row["value"]) for row in rows["last"]}
    assert kept == {1: ["leaf", "two", "main"]} | {n: ["leaf", "one", "two"] for n in range(10) if n not in (1, 7)}
    named = sorted((functions(row["keys"][0]), row["value"]) for row in rows["names"])
    assert named == [(["leaf", "one"], "stacked"), (["leaf", "two"], "stacked")]


@pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
def test_memory_is_bounded_however_many_keys_there_are(build: Builder, tmp_path: Path) -> None:
    """Each of a million calls has another key; the map has the size that it had at first."""
    source = tmp_path / "keys.rpn"
    source.write_text(
        "name = hotloop\ntable = keys, count, word, room = 1000\noffset = tick\npush r, arg0\ntally keys\nabort\n"
    )
    rows, _ = run("ebpf", source, "--", build("hotloop.c"), 1_000_000)
    *kept, lost = rows["keys"]
    assert len(kept) == 1000
    assert all(row["value"] == 1 for row in kept)
    assert lost["lost"] == 999_000
