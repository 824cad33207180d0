"""Returns of functions by handlers in the process: those that breakpoints see, with the entries of their own calls."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, environment
from integration.test_inline import INLINE, ways
from integration.test_returns import FUNCTIONS, KINDS, own_counts, program_of, seen

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

FLAGS = ("-O1", "-fno-shrink-wrap", "-fno-reorder-blocks")
"""So each function has one return instruction, with dead bytes behind it."""
FIB = 21891
"""How often fib() is called for fib(20); the arguments are 46345 in all, and the results 100610."""
IN_PROCESS = ("step", "fib", "jump_out")


@pytest.fixture
def calls(build: Builder) -> Path:
    return build("recursion.c", *FLAGS)


def tables_of(source: str, *command: object) -> tuple[dict[str, object], str]:
    """Return what tables hold after a run, and what was said."""
    arguments = [*DPROBES, "run", "-e", source, *INLINE, "--format", "json", "--", *map(str, command)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["table"]: line["value"] for line in lines if "table" in line and not line.get("key")}, done.stderr


def test_returns_are_counted_with_the_arguments_of_their_calls(calls: Path) -> None:
    functions = (*IN_PROCESS, "deep")
    source = " ".join(
        f'return "{calls}":{f} {{ @n_{f} = count(); @a_{f} = sum(arg0); @r_{f} = sum(retval) }}' for f in functions
    )
    tables, said = tables_of(source, calls, 20_000)
    total, even = 20_000 * 19_999 // 2, sum(range(0, 20_000, 2))
    assert [tables[f"n_{f}"] for f in functions] == [20_000, FIB, 10_000, 5001]
    assert [tables[f"a_{f}"] for f in functions] == [total, 46_345, even, 5000 * 5001 // 2]
    assert [tables[f"r_{f}"] for f in functions[:3]] == [total + 20_000, 100_610, even]
    for function in IN_PROCESS:
        (line,) = [line for line in said.splitlines() if f"{function} (return)" in line]
        assert line.endswith("  jump")


def test_the_handler_of_an_entry_runs_where_that_is_kept_for_the_return(calls: Path) -> None:
    source = (
        f'"{calls}":fib(n) {{ @entered = count(); @first = sum(n) }} '
        f'return "{calls}":fib {{ @left = count(); @second = sum(arg0) }}'
    )
    tables, said = tables_of(source, calls, 10)
    assert tables == {"entered": FIB, "first": 46_345, "left": FIB, "second": 46_345}
    assert sum(line.endswith("  jump") for line in said.splitlines()) == 2


def test_a_call_takes_longer_than_those_within_it(calls: Path, run: Runner) -> None:
    program = (
        "name = recursion\nlogmax = 64\noffset = fib\nreturn = yes\nminor = 1\n"
        "push elapsed\npush entry, rdi\nlog 2\nexit\n"
    )
    result = run.command(program, calls, 5, options=INLINE)
    assert result.counts[1].hits == result.counts[1].records == FIB
    assert "inline" in ways(result)
    pending: list[tuple[int, int]] = []
    for number, elapsed in result.words():
        if number > 1:
            inner = [pending.pop() for _ in range(2)]
            assert [n for n, _ in inner] == [number - 2, number - 1]
            assert elapsed > sum(each for _, each in inner)
        pending.append((number, elapsed))
    assert [number for number, _ in pending] == [20]


@pytest.mark.parametrize("kind", ["O1", "O2", "O3 pie"])
def test_functions_may_be_left_in_any_way(build: Builder, run: Runner, kind: str) -> None:
    program = build("returns.c", *KINDS[kind])
    result = run.command(program_of("returns", FUNCTIONS), program, 8, 12, options=INLINE)
    expected = own_counts(result.stdout)
    expected["structure_tail"] = expected.pop("structure")
    found = seen(result, FUNCTIONS, 8)
    assert found["structure_tail"][0] == expected["structure_tail"][0]
    del found["structure_tail"], expected["structure_tail"]
    assert found == expected
    assert "inline" in ways(result, FUNCTIONS.index("leaf"))


def test_exceptions_and_other_stacks_change_nothing(build: Builder) -> None:
    flags = ("-O1", "-fno-reorder-blocks", "-fno-reorder-blocks-and-partition", "-pthread", "-lstdc++")
    program = build("unwound.cc", *flags)
    source = f'"{program}":thrown(n) {{ @n = count() }} return "{program}":thrown {{ @r = count(); @a = sum(arg0) }}'
    arguments = [*DPROBES, "run", "-e", source, *INLINE, "--", str(program), "150"]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    calls, returns, total, *tables = done.stdout.split()
    assert tables == ["@n:", calls, "@r:", returns, "@a:", total]
    assert sum(line.endswith("  jump") for line in done.stderr.splitlines()) == 2


def test_entries_are_those_that_breakpoints_see(build: Builder, run: Runner) -> None:
    program = build("returns.c", *FLAGS, "-pthread")
    functions = ("leaf", "partly", "tail", "forked")
    source = "name = returns\n" + "".join(
        f"offset = {f}\nreturn = yes\nminor = {n}\npush entry, rdi\npush r, retval\nlog 2\nexit\n"
        for n, f in enumerate(functions)
    )
    both = [run.command(source, program, 8, 100, options=["--engine", name]) for name in ("ptrace", "inline")]
    for minor in both[0].counts:
        first, second = (sorted(result.words(minor)) for result in both)
        assert first == second
    assert any("inline" in ways(both[1], minor) for minor in both[1].counts)
