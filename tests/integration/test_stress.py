"""
Threads, forks, signals and libraries that come and go, all at once: no hit is missed or doubled, and no sum is wrong.

The program counts its calls itself. Each call bears the number of its caller and a position; those of one caller are
consecutive, so what was logged between an attach and a detach must be.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    code_is_original,
    is_traced,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.support import Builder, Runner

SITES = ("push", "load", "free", "repeat", "call", "system", "count")
LIBRARY = "libstress.so"
THREADS = 4
TORTURE_SECONDS = float(os.environ.get("DPROBES_TORTURE_SECONDS", "600"))

_ROW = re.compile(r"^0,(\d+) +\S+ in (\S+) +(\d+) +(\d+) +(\d+) +(\d+) ", re.MULTILINE)


class Stress(NamedTuple):
    """Hold the program, the library that it is linked with, and the copy that it loads and unloads."""

    program: Path
    linked: Path
    copy: Path

    def command(self, seed: int, rounds: int) -> list[str]:
        return [str(self.program), str(seed), str(THREADS), str(rounds), str(self.copy)]


class Report(NamedTuple):
    """Hold what the program printed: its checksum, and how often it called each site of each library."""

    checksum: int
    calls: dict[tuple[int, str], int]


@pytest.fixture(scope="module")
def stress(build: Builder) -> Stress:
    linked = build("stress_sites.c", "-shared", "-fPIC", name=LIBRARY)
    copy = build("stress_sites.c", "-shared", "-fPIC", "-DCOPY", name=LIBRARY)
    return Stress(build("stress.c", str(linked), f"-Wl,-rpath,{linked.parent}", "-ldl"), linked, copy)


def report_of(stress: Stress, text: str) -> Report:
    lines = text.splitlines()
    calls = {}
    for minor, line in enumerate(lines[-len(SITES) :]):
        name, of_linked, of_copy = line.split()
        assert name == SITES[minor]
        calls[minor, str(stress.linked)] = int(of_linked)
        calls[minor, str(stress.copy)] = int(of_copy)
    return Report(int(lines[-len(SITES) - 1]), calls)


def source(limits: dict[int, tuple[int, int]] | None = None) -> str:
    """Return a program with a probe for each site; ``limits`` are pass count and max hits of some."""
    text = f'name = "{LIBRARY}"\n'
    for minor, site in enumerate(SITES):
        text += f"offset = stress_{site}\nminor = {minor}\n"
        if limits and minor in limits:
            text += "passcount = {}\nmaxhits = {}\n".format(*limits[minor])
        text += "push r, arg5\npush r, arg4\nlog 2\nexit\n"
    return text


def positions_of(records: Iterable[dict[str, str]]) -> dict[int, list[int]]:
    """Return what each caller logged, in the order in which it was logged."""
    found = defaultdict(list)
    for record in records:
        data = bytes.fromhex(record["data"])
        found[int.from_bytes(data[:8], "little")].append(int.from_bytes(data[8:], "little"))
    return found


def missing_from(positions: dict[int, list[int]]) -> int:
    """Return how many positions are left out between the first and the last of each caller; none may be there twice."""
    missing = 0
    for caller, found in positions.items():
        assert found == sorted(set(found)), f"caller {caller} has hits twice, or out of order: {found}"
        missing += found[-1] - found[0] + 1 - len(found)
    return missing


def pages_for_slots(pid: int) -> list[str]:
    """Return the lines of a process's map that show executable memory of no file; the program itself has none."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "r-xp" in line and len(line.split()) == 5]


def await_traced_by(client: subprocess.Popen[str], pid: int) -> int:
    """Wait until a process is traced, and return the tracer's process id; a client that fails says why."""
    await_true(lambda: client.poll() is not None or tracer_of(pid) != 0, f"tracing of {pid}", timeout=TIMEOUT)
    assert client.poll() is None, client.communicate()
    return tracer_of(pid)


def run_from_the_start(stress: Stress, run: Runner, seed: int, rounds: int, limited: bool) -> None:
    command = stress.command(seed, rounds)
    unprobed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert unprobed.returncode == 0
    dice = random.Random(seed)
    limits = {
        minor: (dice.choice([0, dice.randrange(100)]), dice.randrange(1, rounds * 4))
        for minor in range(len(SITES))
        if limited and dice.random() < 0.8
    }
    result = run(source(limits), ["--exit-status", "--", *command], timeout=TIMEOUT + rounds / 10)
    assert result.status == 0, f"seed {seed}: {result.stderr}"
    report = report_of(stress, result.stdout)
    assert report.checksum == report_of(stress, unprobed.stdout).checksum
    rows = {(int(r[1]), r[2]): [int(n) for n in r.groups()[2:]] for r in _ROW.finditer(result.stderr)}
    assert rows.keys() == report.calls.keys()
    for (minor, path), calls in report.calls.items():
        passcount, maxhits = limits.get(minor, (0, calls))
        hits = min(calls, passcount + maxhits)
        passed = min(passcount, hits)
        assert rows[minor, path] == [hits, hits - passed, 0, passed], (seed, SITES[minor], path, limits.get(minor))
    assert len(result.records) == sum(row[1] for row in rows.values())
    positions = positions_of(result.records)
    missing = missing_from(positions)
    if not limited:
        assert missing == 0
        assert all(found[0] == 0 for found in positions.values())


def attach_at_random(stress: Stress, run: Runner, seed: int, windows: int, until: float = float("inf")) -> None:
    dice = random.Random(seed)
    logged = 0
    with running(*stress.command(seed, 0)) as target:
        await_line(target)
        for number in range(windows):
            if time.monotonic() > until:
                break
            client, output = run.start(source(), ["-p", str(target.pid)])
            tracer = await_traced_by(client, target.pid)
            time.sleep(dice.choice([0, dice.uniform(0, 0.1), dice.uniform(0, 0.8)]))
            how = dice.choice(["SIGINT", "SIGTERM", "SIGKILL", "tracer SIGTERM"])
            if how == "tracer SIGTERM":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(tracer, signal.SIGTERM)
            else:
                client.send_signal(getattr(signal, how))
            _, stderr = client.communicate(timeout=TIMEOUT)
            where = f"seed {seed}, window {number}, ended by {how}"
            assert "Traceback" not in stderr, stderr
            await_true(lambda: not is_traced(target.pid), f"the end of tracing ({where})", timeout=TIMEOUT)
            assert target.poll() is None, where
            assert code_is_original(target.pid, stress.linked), where
            assert pages_for_slots(target.pid) == [], where
            lost = sum(int(r[5]) for r in _ROW.finditer(stderr))
            text = output.read_text() if output.exists() else ""
            # A client that is killed may leave half a line.
            records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            assert missing_from(positions_of(records)) <= lost, where
            logged += len(records)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    assert logged > 0


@pytest.mark.parametrize("limited", [False, True], ids=["all-hits", "with-limits"])
def test_counts_are_exact_from_the_start_to_the_end(stress: Stress, run: Runner, limited: bool) -> None:
    run_from_the_start(stress, run, seed=1, rounds=600, limited=limited)


@pytest.mark.parametrize("site", SITES)
def test_a_last_hit_leaves_its_instruction_alone(stress: Stress, run: Runner, site: str) -> None:
    # The page is given back at the hit that takes the last breakpoint out of it.
    result = run.command(
        f'name = "{LIBRARY}"\noffset = stress_{site}\nmaxhits = 5\nexit\n', *stress.command(seed=3, rounds=20)
    )
    rows = re.findall(r"^0,0 +stress_\S+(?: in \S+)? +(\d+) ", result.stderr, re.MULTILINE)
    assert "5" in rows, result.stderr


def test_each_attach_logs_every_hit_until_the_detach(stress: Stress, run: Runner) -> None:
    attach_at_random(stress, run, seed=1, windows=20)


@pytest.mark.torture
def test_counts_are_exact_for_as_long_as_asked(stress: Stress, run: Runner) -> None:
    until = time.monotonic() + TORTURE_SECONDS
    seed = 100
    while time.monotonic() < until:
        run_from_the_start(stress, run, seed, rounds=400, limited=bool(seed % 3))
        seed += 1


@pytest.mark.torture
def test_each_attach_logs_every_hit_for_as_long_as_asked(stress: Stress, run: Runner) -> None:
    until = time.monotonic() + TORTURE_SECONDS
    seed = 100
    while time.monotonic() < until:
        attach_at_random(stress, run, seed, windows=30, until=until)
        seed += 1
