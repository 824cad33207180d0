"""A disk becomes full: what could not be written is counted, by the run and by the manager; nothing else is lost."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import Sandbox
from integration.support import DPROBES, TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

HITS = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "dprobes-test", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT).returncode:
        pytest.skip("only root can mount a small file system, and this machine must allow it")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True, timeout=TIMEOUT)


@pytest.fixture
def source(tmp_path: Path, build: Builder) -> Path:
    path = tmp_path / "tick.rpn"
    # What is logged twice cannot be compressed away.
    path.write_text(f'name = "{build("hotloop.c")}"\noffset = tick\npush time\npush r, arg0\nlog 2\nexit\n')
    return path


def counts_in(text: str) -> tuple[int, int, int]:
    """Return hits, records and lost ones of a summary, or of a query."""
    found = re.search(r"^0,0 +tick +(?:[A-Z]+ +)?(\d+) +(\d+) +(\d+)\b", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]), int(found[2]), int(found[3])


def recorded(path: Path) -> tuple[int, int]:
    """Return how many records a trace file has, and how many are marked as lost in it."""
    command = [*DPROBES, "log", "--total", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    lost = re.search(r"warning: (\d+) records", done.stderr)
    return int(done.stdout), int(lost[1]) if lost else 0


@pytest.mark.parametrize("name", ["a.dpt", "a.dptz", "a.txt", "standard output"])
def test_a_run_ends_with_a_summary_of_what_is_missing(disk: Path, source: Path, build: Builder, name: str) -> None:
    path = disk / name
    options = [] if name == "standard output" else ["-o", str(path)]
    command = [*DPROBES, "run", str(source), "--engine", "ptrace", *options, "--", str(build("hotloop.c")), str(HITS)]
    with (disk / name if not options else source.with_name("out")).open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment(), check=False
        )
    assert done.returncode == 1, done.stderr
    what = name if not options else f"'{path}'"
    assert done.stderr.splitlines()[0] == (
        f"dprobes: error: {what}: no space left on device; the probepoints are removed"
    )
    hits, records, lost = counts_in(done.stderr)
    assert hits == records + lost
    assert lost > 0
    if name.endswith(".txt"):
        whole = re.findall(r"[\d:.]+  hotloop\[\d+\]  tick  arg0=(\d+) time=\d{6,}\n", text := path.read_text())
        assert [int(number) for number in whole] == list(range(records))
        assert text.count("\n") == records
        assert text.endswith("\n"), "whole records only"
    elif options:
        assert recorded(path) in ((records, lost), (records, 0))


def test_the_manager_counts_what_its_trace_file_could_not_take(
    disk: Path, tmp_path: Path, source: Path, build: Builder
) -> None:
    sandbox = Sandbox(tmp_path)
    sandbox.state = disk / "state"
    sandbox.environment["DPROBES_STATE_DIR"] = str(sandbox.state)
    try:
        program = build("hotloop.c")
        sandbox(f"dprobes insert {source} --engine ptrace --as svc -- {program} {HITS}")
        await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end", TIMEOUT)
        done = sandbox.shell("dprobes query")
        trace = sandbox.state / "trace.dpt"
        hits, records, lost = counts_in(done.stdout)
        assert (hits, records + lost) == (HITS, HITS)
        assert recorded(trace)[0] == records
        assert done.stdout.splitlines()[-1] == f"{lost} records were lost because the trace file could not be written"
        assert counts_in(sandbox("dprobes remove --all")) == (hits, records, lost)
    finally:
        sandbox.close()
