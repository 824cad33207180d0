"""What handlers of returns find elsewhere: variables of the module, and stacks beside what is kept of the entry."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["ptrace", "ebpf"]

SOURCE = """\
#include <stdio.h>
int total;
__attribute__((noinline)) int step(int n)
{
    if (n % 3 == 0) { total += 7; putchar('x'); return n; }
    if (n % 3 == 1) { total += n; fflush(stdout); return total * 2; }
    total -= 1;
    puts("");
    return 0;
}
__attribute__((noinline)) int walk(int n)
{
    int sum = 0;
    for (int i = 0; i < n; i++) sum += step(i);
    return sum;
}
int main(void) { return walk(9) & 1; }
"""
TOTALS = [7, 8, 7, 14, 18, 17, 24, 31, 30]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("returns")
    (directory / "returns.c").write_text(SOURCE)
    subprocess.run(["gcc", "-O2", "returns.c", "-o", "returns"], cwd=directory, check=True)
    return directory / "returns"


def records(program: Path, text: str, engine: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "--format", "json", "-e", text, "--"]
    output = subprocess.run([*command, str(program)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", ["step", "ste*"])
def test_variables_are_those_of_the_module(program: Path, engine: str, place: str) -> None:
    text = f'extern int total; return "{program}":{place} {{ printf("total=%d", total); }}'
    assert [record["fields"]["total"] for record in records(program, text, engine)] == TOTALS


@pytest.mark.parametrize("engine", ENGINES)
def test_the_entry_is_known_where_a_stack_is_logged(program: Path, engine: str) -> None:
    block = 'printf("n=%d elapsed=%d stack=%k", n, elapsed, ustack(2)); @[ustack(1)] = max(elapsed);'
    text = f'return "{program}":walk(int n) {{ {block} }}'
    record, table = records(program, text, engine)
    number, elapsed, stack = record["fields"].values()
    assert number == 9
    assert elapsed > 1000
    assert stack[0]["name"].partition("+")[0] == "main"
    assert table["value"] > 1000
