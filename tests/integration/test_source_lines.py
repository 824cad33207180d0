"""Probes at lines of the source are hit as often as gcov counts, those of inlined calls as often as they are made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["ptrace", "ebpf"]

SOURCE = """\
#include <stdio.h>

static int classify(int n)
{
    if (n % 15 == 0)
        return 3;
    if (n % 5 == 0)
        return 2;
    return n % 3 == 0;
}

static inline __attribute__((always_inline)) int twice(int n)
{
    return n + (n ^ 1);
}

int main(void)
{
    int kinds[4] = {0};
    int total = 0;
    int n = 1;
    while (n <= 40) {
        int kind = classify(n);
        switch (kind) {
        case 3:
            total += 100;
            break;
        case 2:
            total += 10;
            break;
        default:
            total -= twice(n);
        }
        kinds[kind]++;
        n++;
    }
    total += twice(total);
    printf("%d %d %d %d %d\\n", total, kinds[0], kinds[1], kinds[2], kinds[3]);
    return 0;
}
"""
LOOP = SOURCE[: SOURCE.index("while")].count("\n") + 1
OPENINGS = [number for number, line in enumerate(SOURCE.splitlines(), 1) if line == "{"]
"""Where functions begin: gcov counts that at the line before."""


def counted_by_gcov(directory: Path) -> dict[int, int]:
    """Return how often each line is executed that has code."""
    directory.mkdir()
    (directory / "lines.c").write_text(SOURCE.replace("always_inline", "noinline"))
    for command in (["gcc", "--coverage", "-O0", "lines.c", "-o", "lines"], ["./lines"], ["gcov", "lines.gcda"]):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    found = re.findall(r"^ *(\d+|#####): *(\d+):", (directory / "lines.c.gcov").read_text(), re.MULTILINE)
    return {int(line): int(count.replace("#####", "0")) for count, line in found}


def compiled(directory: Path, *options: str, source: str = SOURCE) -> Path:
    (directory / "lines.c").write_text(source)
    program = directory / "lines"
    subprocess.run(["gcc", "-g", *options, "lines.c", "-o", program], cwd=directory, check=True)
    return program


def table_of(program: Path, source: str, engine: str) -> dict[int, int]:
    """Return the counts in the only table of a program in DProbes C."""
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "--format", "json", "-e", source]
    done = subprocess.run([*command, "--", str(program)], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {int(row["keys"][0]): row["value"] for row in rows}


@pytest.mark.parametrize("engine", ENGINES)
def test_lines_are_hit_as_often_as_gcov_counts(tmp_path: Path, engine: str) -> None:
    expected = counted_by_gcov(tmp_path / "gcov")
    program = compiled(tmp_path, "-O0", source=SOURCE.replace("always_inline", "noinline"))
    last = SOURCE.count("\n") - 1
    hits = table_of(program, f'"{program}":lines.c:1-{last} {{ @[line] = count(); }}', engine)
    for opening in OPENINGS:
        assert hits.pop(opening) == expected.pop(opening - 1)
    for line in [line for line in hits if SOURCE.splitlines()[line - 1] == "}"]:
        del hits[line]  # the end of a function, which gcov does not count
    expected[LOOP] += 1  # a jump leads to the condition at first
    missing = expected.keys() - hits.keys()
    assert hits == {line: count for line, count in expected.items() if line in hits}
    assert {SOURCE.splitlines()[line - 1].strip() for line in missing} <= {"case 3:", "case 2:", "default:", "}"}
    assert len(hits) >= 20


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [("-O1",), ("-O2",), ("-O2", "-gdwarf-4")], ids=" ".join)
def test_inlined_calls_are_hit_as_often_as_they_are_made(tmp_path: Path, engine: str, options: tuple[str, ...]) -> None:
    program = compiled(tmp_path, *options)
    hits = table_of(program, f'inline "{program}":twice {{ @[(long)1] = count(); }}', engine)
    # Of 40 numbers 8 are multiples of 5; and there is one call behind the loop.
    assert hits == {1: 40 - 8 + 1}


@pytest.mark.parametrize(
    "point", ['inline "{0}":twice', 'inline "{0}":"twice"', 'inline "{0}:twice"', '"{0}:classify"']
)
def test_names_are_known_at_functions_in_quotes(tmp_path: Path, point: str) -> None:
    program = compiled(tmp_path, "-O0")
    hits = table_of(program, f"{point.format(program)} {{ @[(long)n] = count(); }}", "ptrace")
    numbers = range(1, 41)
    if "twice" in point:
        assert {n: 1 for n in numbers if n % 5} == {n: count for n, count in hits.items() if n in numbers}
        assert sum(hits.values()) == 40 - 8 + 1
    else:
        assert hits == dict.fromkeys(numbers, 1)


def refusal(source: str, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", "-e", source, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O2")
    assert refusal(f"inline {program}:main {{ }}", str(program)).splitlines() == [
        f"-e:1:1: error: no call of 'main' was inlined in '{program}'",
        f"    inline {program}:main {{ }}",
        f"    ^{'~' * (len(f'inline {program}:main') - 1)}",
        f"hint: write the function itself: {program}:main",
    ]
    assert refusal(f"{program}:lines.c:2 {{ }}", str(program)).splitlines()[-1] == (
        "hint: the nearest lines with instructions are 3 and 5"
    )
    subprocess.run(["strip", "-g", program], check=True)
    assert refusal(f"{program}:lines.c:5 {{ }}", str(program)).splitlines() == [
        f"-e:1:1: error: '{program}' has no debug information, and no separate file with it is installed",
        f"    {program}:lines.c:5 {{ }}",
        f"    ^{'~' * (len(f'{program}:lines.c:5') - 1)}",
        "hint: install the package with its debug information, or compile it with -g",
    ]


def test_the_programs_own_file_needs_no_module(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O0")
    command = [sys.executable, "-m", "dprobes", "run", "-e", 'lines.c:5 { printf("%d", n); }'.replace("n)", "arg0)")]
    done = subprocess.run([*command, "--", str(program)], capture_output=True, text=True, check=True)
    assert "classify" in done.stderr


def test_lines_are_those_of_the_file_that_a_program_is_built_for(tmp_path: Path) -> None:
    built = compiled(tmp_path, "-O2")
    source, output = tmp_path / "elsewhere.dpc", tmp_path / "elsewhere.ppdf"
    source.write_text('module "lines";\nlines.c:5 { @ = count(); }\ninline twice { @ = count(); }\n')
    dprobes = [sys.executable, "-m", "dprobes"]
    refused = subprocess.run([*dprobes, "check", source], capture_output=True, text=True, check=False)
    assert "error: there is no module 'lines' on this machine" in refused.stderr
    subprocess.run([*dprobes, "build", "--for", built, source, "-o", output], check=True, capture_output=True)
    shown = subprocess.run([*dprobes, "show", output], check=True, capture_output=True, text=True).stdout
    places = re.findall(r"^offset = (.+)$", shown, re.MULTILINE)
    assert len(places) == len(set(places)) >= 2
    assert all(place.startswith("main") for place in places)


def test_locate_lists_the_instructions_that_a_program_would_probe(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O2")
    tool = [sys.executable, "-m", "dprobes"]
    place = f"{program}:lines.c:5-14"
    located = subprocess.run([*tool, "locate", place], capture_output=True, text=True, check=True).stdout
    built = subprocess.run(
        [*tool, "build", "--emit", "rpn", "-e", f"{place} {{ }}"], capture_output=True, text=True, check=True
    ).stdout
    probed = re.findall(r"^offset = \S+", built, re.MULTILINE)
    assert len(probed) > 5
    assert set(re.findall(r"offset = \S+", located)) == set(probed)
    assert re.findall(r"^lines\.c:(\d+)$", located, re.MULTILINE)[0] == "5"
    offset, text = re.findall(r"^ +([0-9a-f]+) [+ ] offset = \S+ +(\S+)", located, re.MULTILINE)[0]
    there = subprocess.run(
        [*tool, "locate", f"{program}:0x{offset}"], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"^=> +{offset} .* {text} ", there, re.MULTILINE)


def test_locate_says_which_lines_have_instructions(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O2")
    for place, said in (
        (
            f"{program}:lines.c:2",
            (
                "dprobes: error: line 2 of 'lines.c' has no instructions\n"
                "hint: the nearest lines with instructions are 3 and 5\n"
            ),
        ),
        (f"{program}:other.c:2", "dprobes: error: no source file 'other.c' is known to the debug information\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", "locate", place], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (1, said)
