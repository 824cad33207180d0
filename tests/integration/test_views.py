"""``run --top``, ``--count`` and ``--hist`` on real programs."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.support import PATIENCE, TIMEOUT, await_traced, environment

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from integration.support import Builder

TICK = "name = hotloop\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"


def dprobes(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())


def test_counts_are_those_of_the_records(build: Builder, tmp_path: Path) -> None:
    program = build("hotloop.c")
    source = tmp_path / "tick.rpn"
    source.write_text(TICK)
    lines = tmp_path / "lines.json"
    options = ["--engine", "ptrace", "--count", "name,word0", "--hist", "word0", "-o", lines, "--format", "json"]
    done = dprobes("run", source, *options, "--", program, "12")
    assert done.returncode == 0, done.stderr
    words = Counter(
        int.from_bytes(bytes.fromhex(json.loads(line)["data"]), "little") for line in lines.read_text().splitlines()
    )
    assert words.total() == 12
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("hotloop")]
    assert {int(row[1]): int(row[2]) for row in rows} == words
    (start,) = (n for n, line in enumerate(done.stdout.splitlines()) if line == "word0 at tick")
    buckets = [re.match(r"(\[.*?[\])]) +(\d+) \|", line) for line in done.stdout.splitlines()[start + 1 :]]
    found = {match[1]: int(match[2]) for match in buckets if match is not None and match[2] != "0"}
    sizes = Counter(number.bit_length() for number in words.elements())
    names = {0: "[0]", 1: "[1]", 2: "[2, 4)", 3: "[4, 8)", 4: "[8, 16)"}
    assert found == {names[size]: count for size, count in sizes.items()}


def test_a_wrong_field_ends_the_run_before_it_begins(build: Builder, tmp_path: Path) -> None:
    source = tmp_path / "tick.rpn"
    source.write_text(TICK)
    done = dprobes("run", source, "--engine", "ptrace", "--hist", "wrd0", "--", build("hotloop.c"), "12")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dprobes: error: records have no field 'wrd0'\nhint: did you mean 'word0'?\n"


def test_top_needs_a_terminal(tmp_path: Path) -> None:
    source = tmp_path / "tick.rpn"
    source.write_text(TICK)
    done = dprobes("run", source, "--top", "--", "true")
    assert done.returncode == 2
    assert "--top needs a terminal on standard output; --count and --hist do not" in done.stderr


def test_top_shows_rates_and_the_last_values(build: Builder, tmp_path: Path) -> None:
    loop = tmp_path / "shown"  # a name that no probe of other tests is about
    shutil.copy(build("hotloop.c"), loop)
    source = tmp_path / "tick.rpn"
    source.write_text(TICK.replace("hotloop", "shown"))
    with subprocess.Popen(
        ["sh", "-c", f"echo ready; while read count; do {loop} $count; done"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as shell:  # fmt: skip
        assert shell.stdin is not None
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        main, other = pty.openpty()
        command = [sys.executable, "-m", "dprobes", "run", str(source), "--top", "--engine", "ptrace"]
        view = subprocess.Popen(
            [*command, "-p", str(shell.pid)], stdin=other, stdout=other, stderr=other,
            env={**environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(other)
        seen = ""

        def read_until(pattern: str) -> None:
            nonlocal seen
            until = time.monotonic() + 20 * PATIENCE
            while not re.search(pattern, seen):
                assert time.monotonic() < until, seen
                if select.select([main], [], [], 0.1)[0]:
                    try:
                        seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(main, 65536).decode())
                    except OSError:
                        raise AssertionError(f"the command ended:\n{seen}") from None

        read_until(r"shown +\d+ s +0 hits +0/s")
        await_traced(shell.pid)  # the table is there before the probes are
        for count in (7, 4):
            shell.stdin.write(f"{count}\n")
            shell.stdin.flush()
            shell.stdout.readline()
        read_until(r"0,1 +tick +[1-9]\d* +11 +11 +arg0=3")
        read_until(r"0,1 +tick +0 +11 +11 +arg0=3")
        view.send_signal(signal.SIGINT)
        read_until(r"0,1 +tick +11 +11 +0 +[a-z]")  # the summary
        assert view.wait(TIMEOUT) == 0
        os.close(main)
        shell.stdin.close()
        assert shell.wait(TIMEOUT) == 0


ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_handlers_count_what_records_would_hold(engine: str, build: Builder, tmp_path: Path) -> None:
    """With -o records are carried, and counted one by one: the answers are the same."""
    program = build("tallied.c", "-pthread")
    source = tmp_path / "event.rpn"
    source.write_text(
        "name = tallied\noffset = event\nminor = 1\npush r, arg1\npush r, arg0\nlog 2\nexit\n"
        "offset = event\nminor = 2\nreturn = yes\npush r, retval\npush r, retval\npush 255\nand\nlog 2\nexit\n"
    )
    options = ["--hist", "word0", "--hist", "arg0", "--count", "minor,name", "--count", "symbol,uid", "-v"]
    options += ["--count", "arg0,word0", "--count", "word5,minor"]
    at_hits = dprobes("run", source, "--engine", engine, *options, "--", program, "300")
    carried = dprobes("run", source, "--engine", engine, *options, "-o", tmp_path / "x.json", "--", program, "300")
    assert "dprobes: note: handlers count at the hit, without records\n" in at_hits.stderr
    assert "note: records are counted after the hit: another output needs them\n" in carried.stderr
    found = [sorted(line for line in done.stdout.splitlines() if "|" not in line[:4]) for done in (at_hits, carried)]
    assert found[0] == found[1]
    assert any(line.startswith("[") for line in found[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("i386", [False, True])
def test_sums_by_fields_are_the_same_wherever_they_are_made(
    engine: str, i386: bool, build: Builder, tmp_path: Path
) -> None:
    """At the hit, of records that are carried, and of those of a trace file; also of numbers with the highest bit."""
    program = build("tallied.c", "-pthread", i386=i386)
    source, trace = tmp_path / "event.rpn", tmp_path / "a.dpt"
    source.write_text(
        "name = tallied\noffset = event\nminor = 1\npush r, arg0\npush r, arg0\npush r, arg0\nneg\nlog 3\nexit\n"
        "offset = event\nminor = 2\nreturn = yes\npush r, retval\npush r, retval\npush 7\nand\nlog 2\nexit\n"
    )
    options = ["--sum", "word0", "--sum", "word1", "--sum", "word2", "--sum", "pid", "--hist", "word1"]
    by = ["--by", "minor,symbol", "--by", "name"]
    run = ("run", source, "--engine", engine, "-v")
    at_hits = dprobes(*run, *options, *by, "--", program, "300")
    assert "dprobes: note: handlers count at the hit, without records\n" in at_hits.stderr
    carried = dprobes(*run, *options, *by, "-o", trace, "--", program, "300")
    logged = dprobes("log", trace, *options, *by)
    wanted = [done.stdout.splitlines() for done in (at_hits, carried, logged)]
    sums = [sorted(_without_pids(line for line in lines if not re.match(r"[^\[]+\|", line))) for lines in wanted]
    assert sums[0] == sums[1] == sums[2]
    assert sum("sum of word" in line for line in sums[0]) == 3
    assert any(len(words := line.split()) == 8 and words[0] in "12" and int(words[-1]) >> 31 for line in wanted[0])


def _without_pids(lines: Iterable[str]) -> list[str]:
    """Leave out the sums of process ids, which differ from run to run: their average is the least and the largest."""
    found = ((line, line.split()) for line in lines if "sum of pid" not in line)
    return [line for line, words in found if len(words) != 8 or len({*words[5:]}) > 1 or words[5] == "0"]
