"""Variables, limits and tables of handlers in processes, together with those of handlers at breakpoints."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

INLINE = ["--engine", "inline"]
THREADS, ROUNDS = 8, 100_000
HITS = THREADS * ROUNDS
RESTS = THREADS * -(-ROUNDS // 4096)
"""Hits of a place that has a breakpoint for good: nobody knows before whether an instruction of the FPU faults."""


def rivals(run: Runner, program: Path, source: str, *more: str) -> Result:
    text = f"name = rivals\nlogmax = 64\n{source}"
    return run(text, [*more, "--", str(program), str(THREADS), str(ROUNDS)], INLINE)


def ways(result: Result, minor: int) -> set[str]:
    return {way.partition(" (")[0] for way in result.counts[minor].executed.split(", ")}


def test_variables_lose_nothing_between_processes_and_breakpoints(build: Builder, run: Runner) -> None:
    source = (
        "vars = 2\ngvars = 1\ntvars = 1\noffset = step\nminor = 1\ninc lv, 1\ninc gv, 0\ninc tv, 0\nabort\n"
        "offset = rest\nminor = 2\ninc lv, 1\ninc gv, 0\npush lv, 1\npush gv, 0\npush tv, 0\nlog 3\nexit\n"
        "offset = finish\nminor = 3\npush lv, 1\npush gv, 0\nlog 2\nexit\n"
    )
    result = rivals(run, build("rivals.c", "-pthread"), source)
    assert "inline" in ways(result, 1)
    assert ways(result, 2) == {"in place"}
    assert (result.counts[1].hits, result.counts[2].hits) == (HITS, RESTS)
    assert "ran no handler" not in result.stderr
    before = result.words(2)
    assert result.words(3) == [[HITS + RESTS] * 2]
    assert len(before) == RESTS
    # Each thread has its own number, which goes on wherever its handlers run.
    assert sorted(own for own, *_ in before) == sorted([n + 1 for n in range(0, ROUNDS, 4096)] * THREADS)


def test_variables_of_processors_lose_nothing(build: Builder, tmp_path: Path) -> None:
    source = (
        "cvars = 2\noffset = step\nminor = 1\ninc cv, 1\nabort\n"
        "offset = rest\nminor = 2\ninc cv, 1\nabort\noffset = finish\nminor = 3\npush 0\npush 2\nlog cv\nexit\n"
    )
    program = build("rivals.c", "-pthread")
    (tmp_path / "a.rpn").write_text(f'name = "{program}"\nlogmax = 64\n{source}')
    command = ["taskset", "-c", "0", *DPROBES, "run", str(tmp_path / "a.rpn"), *INLINE]
    command += ["--", str(program), "4", "20000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert f"cv=0 {80_000 + 4 * 5}\n" in done.stdout
    assert "inline" in done.stderr


@pytest.mark.parametrize(("passcount", "maxhits"), [(0, 1), (0, 1000), (300_000, 0), (123_456, 4321), (HITS - 1, 5)])
def test_limits_are_exact_whoever_takes_the_hits(build: Builder, run: Runner, passcount: int, maxhits: int) -> None:
    limits = f"passcount = {passcount}\n" + (f"maxhits = {maxhits}\n" if maxhits else "")
    body = "inc lv, 0\npush lv, 0\nlog 1\nexit\n" if maxhits else "inc lv, 0\nabort\n"
    end = "offset = finish\nminor = 2\npush lv, 0\nlog 1\nexit\n"
    result = rivals(run, build("rivals.c", "-pthread"), f"vars = 1\noffset = step\nminor = 1\n{limits}{body}{end}")
    executed = min(maxhits or HITS, HITS - passcount)
    assert result.words(2) == [[executed]]
    if maxhits:
        # Another thread may count between the two instructions: two records may have the same number.
        assert len(result.words(1)) == executed
        assert {number for (number,) in result.words(1)} <= set(range(1, executed + 1))
    counts = result.counts[1]
    assert (counts.hits, counts.passed) == (passcount + executed, passcount)
    assert "ran no handler" not in result.stderr
    if passcount + executed > 1000:
        assert "inline" in ways(result, 1)


def test_handlers_in_processes_look_at_tables_and_delete_from_them(build: Builder) -> None:
    program = build("rivals.c", "-pthread")
    source = (
        f'"{program}":step {{ @begun[tid] = last(arg1 + 1); if (@begun[tid] != arg1 + 1) {{ @wrong = count(); }} '
        "@steps[arg0] = count(); @most = max(arg1); if (arg1 % 3 == 0) { delete(@begun[tid]); @gone = count(); } } "
        f'"{program}":rest {{ if (@begun[tid] != 0) {{ @late = count(); }} @steps[arg1] = count(); }}'
    )
    command = [*DPROBES, "run", "-e", source, *INLINE, "--", str(program), str(THREADS), str(ROUNDS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    lines = done.stdout.splitlines()
    assert [line for line in lines if "wrong" in line or "room" in line] == []
    assert f"@gone: {THREADS * -(-ROUNDS // 3)}" in lines
    assert f"@most: {ROUNDS - 1}" in lines
    steps = -(-ROUNDS // 4096)
    late = sum(1 for n in range(0, ROUNDS, 4096) if n % 3)
    assert f"@late: {THREADS * late}" in lines
    assert sorted(line for line in lines if "@steps" in line) == [
        f"@steps[{thread}]: {ROUNDS + steps}" for thread in range(THREADS)
    ]
    assert "inline" in done.stderr
    assert "a breakpoint instead of a jump: faults of its instruction cannot be predicted" in done.stderr


def test_programs_for_several_modules_share_their_variables_and_tables(tmp_path: Path) -> None:
    (tmp_path / "side.c").write_text("unsigned long side(unsigned long n) { return n * 3; }\n")
    (tmp_path / "two.c").write_text(
        "unsigned long side(unsigned long n);\n"
        "__attribute__((noipa)) unsigned long mine(unsigned long n) { return n + 1; }\n"
        "int main(void) { unsigned long sum = 0;\n"
        "for (unsigned long n = 0; n < 50000; n++) sum += side(n) + mine(n);\n"
        "return sum == 0; }\n"
    )
    library, program = tmp_path / "libside.so", tmp_path / "two"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "side.c"], check=True)
    subprocess.run(
        ["gcc", "-O1", "-o", program, tmp_path / "two.c", f"-L{tmp_path}", "-lside", f"-Wl,-rpath,{tmp_path}"],
        check=True,
    )
    body = "@calls = count(); @of[arg0 % 3] = count(); total += 1; all += 1;"
    source = (
        f'long total; global long all; "{program}":mine {{ {body} }} "{library}":side {{ {body} '
        'if (arg0 == 49999) { printf("%d %d", total, all); } } end { printf("%d in all", total); }'
    )
    command = [*DPROBES, "run", "-e", source, *INLINE, "--", str(program)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    lines = done.stdout.splitlines()
    assert lines[0].endswith("  99999 99999")
    assert "100000 in all" in lines
    assert "@calls: 100000" in lines
    assert sorted(line for line in lines if "@of" in line) == ["@of[0]: 33334", "@of[1]: 33334", "@of[2]: 33332"]
    assert sum(line.endswith("jump") for line in done.stderr.splitlines()) == 2
