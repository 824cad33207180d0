"""The seeds' programs for user space, run on the i386 program that they are written for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent.parent / "programs"
SEEDS = Path(__file__).parent.parent / "fixtures" / "seeds"


@dataclass(frozen=True)
class Result:
    records: list[dict[str, Any]]
    messages: str
    status: int

    @property
    def data(self) -> list[str]:
        return [record["data"] for record in self.records]


class Runner:
    """Run a program of the seeds on a copy of seed32 that has the name it probes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._program = directory / "seed32"
        item = directory / "seed32.o"
        subprocess.run(["as", "--32", "-o", item, PROGRAMS / "seed32.S"], check=True)
        subprocess.run(["ld", "-m", "elf_i386", "-o", self._program, item], check=True)

    def __call__(self, source: str, name: str, *arguments: str) -> Result:
        program = self._directory / name
        if not program.exists():
            shutil.copy(self._program, program)
        output = self._directory / "records"
        command: list[str | Path] = ["run", SEEDS / source, "--format", "json", "-o", output, *arguments, "--", program]
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", *command], capture_output=True, text=True, timeout=60, check=False
        )
        records = [json.loads(line) for line in output.read_text().splitlines()] if done.returncode == 0 else []
        return Result(records, done.stderr, done.returncode)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    if shutil.which("as") is None or shutil.which("ld") is None:
        pytest.skip("needs as and ld: apt-get install binutils")
    return Runner(tmp_path_factory.mktemp("seeds"))


def test_example_1_logs_the_segment_registers(run: Runner) -> None:
    result = run("man-example-1.rpn", "appln")
    assert [(r["major"], r["minor"], r["symbol"], r["name"]) for r in result.records] == [(1, 2, "main", "appln")]
    # ds was pushed last and is logged first; the values are Linux's selectors of 32-bit programs.
    assert result.data == ["2b00000023000000"]


def test_sample_1_logs_two_registers(run: Runner) -> None:
    assert run("man-sample-1.rpn", "testapp").data == ["2222222211111111"]


def test_sample_2_logs_words_after_the_exchange(run: Runner) -> None:
    assert run("man-sample-2.rpn", "testapp").data == ["02000000ff000000"]


def test_sample_3_operates_on_a_local_variable(run: Runner) -> None:
    assert run("man-sample-3.rpn", "testapp").data == ["ffffffff"]


def test_sample_4_adds(run: Runner) -> None:
    assert run("man-sample-4.rpn", "testapp").data == ["06000000"]


def test_sample_5_calls_a_procedure(run: Runner) -> None:
    assert run("man-sample-5.rpn", "testapp").data == ["01000000"]


def test_the_log_str_snippet_logs_the_string_that_ecx_points_to(run: Runner) -> None:
    result = run("man-logstr-snippet.rpn", "testapp")
    assert [r["fields"] for r in result.records] == [{"ecx": "a string that ECX points to"}]


@pytest.mark.parametrize(
    ("source", "hits", "records"),
    [
        ("paper-experiment-2.rpn", 3, 0),
        ("paper-experiment-3.rpn", 3, 0),
        ("paper-experiment-4.rpn", 3, 0),
        ("paper-experiment-5.rpn", 3, 3),
    ],
)
def test_the_papers_experiments_hit_at_each_turn_of_the_loop(run: Runner, source: str, hits: int, records: int) -> None:
    result = run(source, "bench_loop")
    assert result.status == 0
    assert len(result.records) == records
    assert result.messages.splitlines()[-1].split()[2:5] == [str(n) for n in (hits, records, 0)]


@pytest.mark.parametrize("source", ["man-example-2.rpn", "man-example-5.rpn", "slides-example-d.rpn"])
def test_programs_for_the_kernel_are_refused_before_anything_starts(run: Runner, source: str) -> None:
    result = run(source, "appln")
    assert result.status == 2
    message = r"'modtype = kernel' needs probes in the kernel or a kernel module, which the \w+ engine lacks"
    assert re.search(message, result.messages)
