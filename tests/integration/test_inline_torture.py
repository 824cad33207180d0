"""
Jumps that come and go while threads, processes, libraries and signals do: no hit is missed, and no sum is wrong.

Each time one program takes the place of another, breakpoints take the place of all jumps, and jumps that of breakpoints
again. Short forms run always; ``make torture`` has the long ones.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.inline.inline_engine import InlineEngine
from integration.support import TIMEOUT, await_line, await_message, read_result, running
from integration.test_replacing import Chain, check_replacements
from integration.test_stress import stress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Runner
    from integration.test_stress import Stress

__all__ = ["stress"]  # a fixture

SQL = "create table t(a, b); insert into t values(1, 'x'), (2, 'y'); select a + 1, upper(b) from t order by b desc;"
_ROW = re.compile(r"^0,\d+ +(\S+(?: \S+)*?) +(\d+) +\d+ +\d+ +\d+ +(\S.*)$", re.MULTILINE)


@pytest.fixture
def chain() -> Iterator[Chain]:
    chain = Chain(InlineEngine())
    yield chain
    chain.close()


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 150), *(pytest.param(n, 3000, marks=pytest.mark.torture) for n in range(3, 9))]
)
def test_no_hit_is_lost_as_jumps_come_and_go(
    stress: Stress, chain: Chain, seed: int, rounds: int, capfd: pytest.CaptureFixture[str]
) -> None:
    check_replacements(stress, chain, seed, rounds, lambda: capfd.readouterr().out)


def test_all_functions_of_a_library_are_counted_as_by_breakpoints(run: Runner, tmp_path: Path) -> None:
    text = 'name = "libsqlite3.so.0"\nlogonfault = yes\noffset = *\nminor = 1\nabort\n'
    found = {}
    for engine in ("ptrace", "inline"):
        with running("sqlite3", tmp_path / engine, stdin=subprocess.PIPE) as target:
            assert target.stdin is not None
            target.stdin.write("select 'ready';\n")
            target.stdin.flush()
            assert await_line(target) == "ready\n"
            client, output = run.start(text, ["-p", str(target.pid)], ["--engine", engine])
            await_message(client, "probepoints are active")
            assert target.communicate(SQL, timeout=TIMEOUT)[0] == "3|Y\n2|X\n"
            assert target.returncode == 0
        result = read_result(client, output)
        found[engine] = {place: int(hits) for place, hits, _ in _ROW.findall(result.stderr)}
        ways = {place: way for place, _, way in _ROW.findall(result.stderr)}
    assert len(found["inline"]) > 300
    assert found["inline"] == found["ptrace"]
    assert sum("inline" in way for way in ways.values()) > 0.9 * len(ways)
