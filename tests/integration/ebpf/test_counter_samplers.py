"""Samplers of performance counters: there is a hit at each n-th event of a CPU, by the counts of getrusage(2)."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.platform.linux.perf_calls import open_counter
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_message, running

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

PAGES, NAPS = 3000, 40


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.fixture
def counted(build: Builder) -> Path:
    """Return a program that knows its page faults and context switches."""
    return build("counted.c", "-O1")


def dprobes(*words: object) -> subprocess.CompletedProcess[str]:
    """Return the finished run of a command, whatever its status is."""
    command = [sys.executable, "-m", "dprobes", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the records or the entries of tables that a run with ``--format json`` has printed."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def numbers_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the numbers that the program has printed."""
    (line,) = re.findall(r"^\d+ \d+ \d+$", done.stdout + done.stderr, re.MULTILINE)
    return [int(number) for number in line.split()]


def words_of(record: dict[str, Any]) -> tuple[int, ...]:
    """Return the words that a record logs."""
    return struct.unpack("<2Q", bytes.fromhex(record["data"]))


def test_each_minor_fault_of_an_instruction_is_a_sample(counted: Path, tmp_path: Path) -> None:
    program = tmp_path / "faults.rpn"
    program.write_text(f'name = "{counted}"\nsampler = 1 minor-faults\npush r, eip\npush at_write\nlog 2\nexit\n')
    done = dprobes("run", program, "--engine", "ebpf", "--format", "json", "-c", f"{counted} {PAGES} 0")
    faults = [ip for at_write, ip in map(words_of, rows_of(done)) if ip == at_write]
    assert [len(faults), *numbers_of(done)] == [PAGES, PAGES, 0, 0]


def test_context_switches_are_those_of_getrusage(counted: Path) -> None:
    text = f"""
    thread int inside;
    "{counted}":begin {{ inside = 1; }}
    "{counted}":end {{ inside = 0; }}
    sample context-switches:1 when (inside) {{ @switches = count(); }}
    """
    done = dprobes("run", "--engine", "ebpf", "-e", text, "--format", "json", "-c", f"{counted} 1 {NAPS}")
    (row,) = rows_of(done)
    _, least, most = numbers_of(done)
    assert NAPS <= least <= row["value"] <= most


@pytest.mark.alone  # the kernel runs no program for an event in a program of another test on that CPU (bpf_prog_active)
@pytest.mark.parametrize("period", [2, 7, 100])
def test_there_are_as_many_events_from_sample_to_sample_as_the_program_says(
    counted: Path, tmp_path: Path, period: int
) -> None:
    """Count each event in a variable of the CPU, and compare the variable's values in two successive samples there."""
    if len(cpus := sorted(os.sched_getaffinity(0))) < 2:
        pytest.skip("processor: dprobes and the program need a CPU each")
    program = tmp_path / "periods.rpn"
    program.write_text(
        'name = "*"\ncvars = 1\n'
        "sampler = 1 page-faults\nminor = 1\ninc cv, 0\nabort\n"
        f"sampler = {period} page-faults\nminor = 2\npush procid\npush cv, 0\nlog 2\nexit\n"
    )
    ours, theirs = cpus[:2]
    command = [sys.executable, "-m", "dprobes", "run", program, "--engine", "ebpf", "--format", "json"]
    output = tmp_path / "records"
    with running("taskset", "-c", ours, *command, "-o", output, stderr=subprocess.PIPE) as client:
        await_message(client, "2 probepoints are active")
        subprocess.run(["taskset", "-c", str(theirs), counted, str(PAGES), "0"], check=True)
        client.send_signal(signal.SIGINT)
        await_message(client, f"{period} page-faults")
    records = [json.loads(line) for line in output.read_text().splitlines()]
    counts = [count for count, cpu in map(words_of, records) if cpu == theirs]
    assert len(counts) >= PAGES // period
    assert {second - first for first, second in pairwise(counts)} == {period}


def test_a_counter_that_the_machine_does_not_have_cannot_be_sampled() -> None:
    try:
        os.close(open_counter(0, 0, tid=0))
    except OSError:
        done = dprobes("run", "--engine", "ebpf", "-e", "sample cycles:1000000 { @ = count(); }", "--duration", 1)
    else:
        pytest.skip("this machine has a PMU")
    assert done.returncode == 1
    assert done.stderr == (
        "dprobes: error: the counter 'cycles' cannot be sampled: the processor shows no such counter (PMU)\n"
        "hint: virtual machines often hide the processor's counters; those of the kernel are task-clock, page-faults, "
        "context-switches, cpu-migrations, minor-faults, major-faults\n"
    )


def test_engines_that_sample_no_counters_refuse(counted: Path) -> None:
    text = "sample context-switches:1 { @ = count(); }"
    done = dprobes("run", "--engine", "ptrace", "-e", text, "-c", f"{counted} 1 1")
    assert done.returncode == 2
    assert done.stderr == (
        "-e:1:1: error: 'sample' needs samples of the events of performance counters, which the ptrace engine lacks\n"
        "    sample context-switches:1 { @ = count(); }\n"
        "    ^~~~~~~~~~~~~~~~~~~~~~~~~\n"
        "hint: use --engine ebpf\n"
    )
