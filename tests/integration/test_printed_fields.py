"""What ``printf`` of DProbes C prints is fields by the names of its expressions, in whatever shows records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]

SOURCE = r"""
serve(req, char *label) {
    printf("total %d bytes %s\n", req->total, str(label));
    printf("%d %d %s: %d", req->values, req->values[1], req->color, req->head.kind + 1);
}
return finish(code) { printf("%d of %s after %v", code, func, elapsed); }
"""


@pytest.fixture
def program(build: Builder) -> Path:
    return build("served.c", "-O1", "-g")


def dprobes(*arguments: str) -> str:
    command = [sys.executable, "-m", "dprobes", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(program: Path, source: str, engine: str, *options: str) -> list[str]:
    text = f'module "{program}"; {source}'
    return dprobes("run", "-e", text, "--engine", engine, *options, "--", str(program)).splitlines()


@pytest.mark.parametrize("engine", ENGINES)
def test_json_has_numbers_and_lists_by_the_names_of_their_expressions(program: Path, engine: str) -> None:
    records: list[dict[str, Any]] = list(map(json.loads, run(program, SOURCE, engine, "--format", "json")))
    served = [record["fields"] for record in records if record["minor"] == 1]
    assert served[0] == {
        "total": 4, "label": "even", "values": [7, -8, 9], "values2": -8, "color": 5, "value": -1
    }  # fmt: skip
    assert [fields["total"] for fields in served] == [4, 5, 6, 7, 8]
    finished = [record["fields"] for record in records if record["minor"] == 2]
    assert [(fields["code"], fields["func"]["name"].partition(" ")[0]) for fields in finished] == [
        (number, "finish") for number in range(5)
    ]
    assert all(0 < fields["elapsed"] < 60_000_000_000 for fields in finished)


@pytest.mark.parametrize("engine", ENGINES)
def test_trace_files_are_asked_by_these_names(program: Path, engine: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.dpt")
    run(program, SOURCE, engine, "-o", trace)
    lines = dprobes("log", trace, "--filter", "total > 6 and values2 == -8").splitlines()
    assert [line.split("]  ")[-1] for line in lines] == [
        "total 7 bytes odd", "    7 -8 9 -8 GREEN: -1", "total 8 bytes even", "    7 -8 9 -8 GREEN: -1"
    ]  # fmt: skip
    assert dprobes("log", trace, "--count", "label", "--filter", "minor == 1").split()[-6:] == [
        "even", "3", "60.0%", "odd", "2", "40.0%"
    ]  # fmt: skip
    query = 'select total, "values", values2, "value" from m0_1 where total < 6 order by total'
    assert dprobes("sql", "--csv", trace, query).splitlines() == [
        "total,values,values2,value", '4,"[7, -8, 9]",-8,-1', '5,"[7, -8, 9]",-8,-1'
    ]  # fmt: skip
    csv = dprobes("log", trace, "--format", "csv", "--filter", "total == 4")
    assert csv.endswith('total 4 bytes even\n7 -8 9 -8 GREEN: -1"\n')


@pytest.mark.parametrize("engine", ENGINES)
def test_what_cannot_be_read_is_a_fault_in_its_field(program: Path, engine: str) -> None:
    source = 'finish(struct req *bad) { printf("%d %d", bad->total, bad->values); }'
    (first, *_) = map(json.loads, run(program, source, engine, "--format", "json"))
    assert first["fields"] == {"total": {"fault": "0x8"}, "values": {"fault": "0x10"}}


@pytest.mark.parametrize("engine", ENGINES)
def test_places_that_a_pattern_finds_print_only_the_text(program: Path, engine: str) -> None:
    lines = run(program, '*i*s* { printf("hit by %s", sym(pc)); }', engine)
    assert lines
    for line in lines:
        time_of_day, process, text = line.split("  ", 2)
        assert (time_of_day.count(":"), process.partition("[")[0]) == (2, program.name[:15])
        assert text.startswith("hit by ")
    assert any("hit by finish" in line for line in lines)


@pytest.mark.parametrize("engine", ENGINES)
def test_times_have_a_unit_where_the_conversion_says_so(program: Path, engine: str) -> None:
    lines = run(program, 'return finish(code) { printf("%T %T %v", code * 1500, 2ms, elapsed); }', engine)
    assert [" ".join(line.split("]  ")[-1].split()[:4]) for line in lines] == [
        "0 ns 2 ms", "1.5 us 2 ms", "3 us 2 ms", "4.5 us 2 ms", "6 us 2 ms"
    ]  # fmt: skip
    assert all(line.split()[-1] in ("ns", "us", "ms", "s") for line in lines)
