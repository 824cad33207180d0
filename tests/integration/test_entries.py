"""
What handlers of returns know of the entry: how long this very call has taken, and with which arguments it was made.

The programs measure their calls themselves, and print their arguments.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.ebpf.kernel import has_begun
from integration.support import TIMEOUT, await_breakpoint, await_true, read_result

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

ENGINES = ("ptrace", "ebpf")

Calls = dict[tuple[str, int], list[tuple[int, int, int]]]
"""The argument, result and time of the calls of a function by a thread, in the order of their returns."""

UNSEEN = 1 << 63
"""What the handler logs for the time of a call whose entry was not seen."""


def program_of(module: str, functions: tuple[str, ...], argument: str = "arg0") -> str:
    definitions = (
        f"offset = {f}\nreturn = yes\nminor = {n}\nsx unseen{n}\npush r, retval\npush entry, {argument}\n"
        f"push elapsed\nlog 3\nexit\nunseen{n}: push r, retval\npush 0\npush {UNSEEN}\nlog 3\nexit\n"
        for n, f in enumerate(functions)
    )
    return f"name = {module}\nlogmax = 64\n" + "".join(definitions)


def own_calls(output: str, functions: tuple[str, ...]) -> Calls:
    calls: Calls = defaultdict(list)
    for name, *numbers in re.findall(r"^(\w+) (\d+) (-?\d+) (-?\d+) (\d+)$", output, re.MULTILINE):
        if name in functions:
            tid, argument, result, took = map(int, numbers)
            calls[name, tid].append((argument, result, took))
    return dict(calls)


def _words(record: dict[str, Any]) -> list[int]:
    """Return the time, the argument and the result that a record holds."""
    data = bytes.fromhex(record["data"])
    return [int.from_bytes(data[n : n + 8], "little", signed=n > 0) for n in (0, 8, 16)]


def seen_calls(result: Result, functions: tuple[str, ...]) -> Calls:
    calls: Calls = defaultdict(list)
    for record in result.records:
        took, argument, returned = _words(record)
        calls[functions[record["minor"]], record["tid"]].append((argument, returned, took))
    return dict(calls)


def compare(result: Result, functions: tuple[str, ...]) -> None:
    """Compare what was recorded of calls with what the program says of them."""
    own, seen = own_calls(result.stdout, functions), seen_calls(result, functions)
    assert own.keys() == seen.keys()
    for key, calls in own.items():
        assert [call[:2] for call in seen[key]] == [call[:2] for call in calls], key
        for (_, _, took), (argument, _, measured) in zip(seen[key], calls, strict=True):
            assert 0 < took <= measured, key
            if key[0] == "slow":
                assert took >= argument * 1_000_000


@pytest.mark.parametrize("engine", ENGINES)
def test_recursion_threads_longjmp_and_coroutines(build: Builder, run: Runner, engine: str) -> None:
    functions = ("leaf", "factorial", "slow", "jumper", "thrower", "passed")
    program = build("entered.c", "-O2", "-DSTACKS")
    result = run.command(program_of("entered", functions), program, 3, 12, options=("--engine", engine))
    compare(result, functions)
    assert all(c.hits == c.records for c in result.counts.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_has_not_seen_what_its_parent_has_entered(build: Builder, run: Runner, engine: str) -> None:
    program = build("entered.c", "-O2", "-DSTACKS")
    result = run.command(program_of("entered", ("forked", "leaf")), program, 1, 1, options=("--engine", engine))
    own, seen = (by(result, ("forked", "leaf")) for by in (lambda r, f: own_calls(r.stdout, f), seen_calls))
    own_process = min(tid for _, tid in own)
    for (name, tid), calls in seen.items():
        for (argument, returned, took), (true_argument, true_result, measured) in zip(
            calls, own[name, tid], strict=True
        ):
            assert returned == true_result
            if name == "forked" and returned % 10:
                assert (argument, took) == (0, UNSEEN), "a child has not entered"
            else:
                assert argument == true_argument
                assert took <= measured
    assert sum(call[2] == UNSEEN for calls in seen.values() for call in calls) == 4
    assert own_process in {tid for name, tid in seen if name == "forked"}


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_that_end_by_tail_calls(build: Builder, run: Runner, engine: str) -> None:
    functions = ("leaf", "slow", "tail", "twice", "even", "odd")
    program = build("entered.c", "-O2", "-DTAILS")
    result = run.command(program_of("entered", functions), program, 2, 9, options=("--engine", engine))
    calls: dict[int, list[tuple[str, int, int, int]]] = defaultdict(list)
    for record in result.records:
        took, argument, returned = _words(record)
        calls[record["tid"]].append((functions[record["minor"]], argument, returned, took))
    checked = 0
    for tid, seen in calls.items():
        printed = re.findall(rf"^(\w+) {tid} (-?\d+) (-?\d+) (\d+)$", result.stdout, re.MULTILINE)
        expected = [(name, *map(int, numbers)) for name, *numbers in printed if name in functions]
        assert [call[:3] for call in seen] == [call[:3] for each in expected for call in _returns_of(*each[:3])]
        position = 0
        for name, argument, returned, measured in expected:
            group = seen[position : position + len(list(_returns_of(name, argument, returned)))]
            position += len(group)
            times = [took for *_, took in group]
            assert times == sorted(times), "what was called last has taken the least time"
            assert times[0] > 0
            assert times[-1] <= measured
            checked += len(group)
    assert checked == len(result.records) > 1000


def _returns_of(name: str, argument: int, result: int) -> list[tuple[str, int, int]]:
    """Return the functions that return when a call of the program does, the innermost first."""
    if name in ("even", "odd"):
        names = ("even", "odd") if name == "even" else ("odd", "even")
        return [(names[n % 2], argument - n, result) for n in reversed(range(argument + 1))]
    if name == "tail":
        inner = ("slow", argument, result) if argument & 1 else ("leaf", 2 * argument, result)
        return [inner, (name, argument, result)]
    if name == "twice":
        first = argument + 1 if argument & 1 else 2 * argument + 3
        return [*_returns_of("tail", first & 7, result), (name, argument, result)]
    return [(name, argument, result)]


@pytest.mark.parametrize("engine", ENGINES)
def test_exceptions(build: Builder, run: Runner, engine: str) -> None:
    functions = ("thrower", "middle", "catcher")
    program = build("entered.cpp", "-O2", "-lstdc++")
    result = run.command(program_of("entered", functions), program, options=("--engine", engine))
    compare(result, functions)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_that_were_made_before_the_program_was_inserted(build: Builder, run: Runner, engine: str) -> None:
    program = build("entered.c", "-O2", "-DSTACKS")
    target = subprocess.Popen(
        [program, "0", "0", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert target.stdin is not None
    assert target.stdout is not None
    try:
        assert target.stdout.readline() == "waiting\n"
        source = program_of("entered", ("waiting",))
        client, output = run.start(source, ["-p", str(target.pid)], ["--engine", engine])
        await_breakpoint(target.pid, program, "waiting")
        if engine == "ebpf":
            await_true(lambda: has_begun(client.pid), "the run")
        target.stdin.write("\n\n")
        target.stdin.close()
        printed = target.stdout.read()
        assert target.wait(TIMEOUT) == 0
    finally:
        target.kill()
        target.wait()
        target.stdout.close()
    result = read_result(client, output)
    ((key, seen),) = seen_calls(result, ("waiting",)).items()
    own = own_calls(printed, ("waiting",))[key]
    depth = 5
    assert [call[1] for call in seen] == [call[1] for call in own]
    assert [call[0::2] for call in seen[: depth + 1]] == [(0, UNSEEN)] * (depth + 1)
    assert [call[0] for call in seen[depth + 1 :]] == [call[0] for call in own[depth + 1 :]] == list(range(depth + 1))
    assert all(0 < call[2] <= true[2] for call, true in zip(seen[depth + 1 :], own[depth + 1 :], strict=True))


def test_the_kernel_awaits_so_many_returns_and_those_are_right(build: Builder, run: Runner) -> None:
    program = build("entered.c", "-O2", "-DTAILS")
    functions = ("even", "odd")
    result = run(program_of("entered", functions), ["--", str(program), "1", "1", "deep"], ["--engine", "ebpf"])
    found = [(functions[record["minor"]], _words(record)) for record in result.records]
    deep = [(name, argument, took) for name, (took, argument, _) in found if argument > 41]
    # even(200) calls itself by way of odd: the calls on whose entry 64 returns were awaited have none.
    assert [(name, argument) for name, argument, _ in deep] == [(functions[n % 2], n) for n in range(200 - 64 + 1, 201)]
    times = [took for *_, took in deep]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_handler_gets_the_same_time_twice_and_other_hits_get_another(
    build: Builder, run: Runner, engine: str
) -> None:
    program = build("returns.c", "-O2")
    source = (
        f'name = "{program}"\noffset = factorial\nreturn = yes\nminor = 1\npush elapsed\npush elapsed\nlog 2\nexit\n'
    )
    result = run(source, ["--", str(program), "1", "6"], ["--engine", engine])
    times = result.words(1)
    assert len(times) > 1, result.stderr
    assert all(first == second for first, second in times)
    assert len({first for first, _ in times}) > 1


TIMED = "return = yes\nminor = 1\npush elapsed\nlog 1\nexit\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_goes_back_to_its_entry_is_refused(build: Builder, run: Runner, engine: str) -> None:
    program = build("entryless.c")
    options = ["--engine", engine]
    refused = run(f'name = "{program}"\noffset = again\n{TIMED}', ["--", str(program)], options)
    assert refused.status == 2
    why = "it jumps to its first instruction, which is then executed without a call"
    assert f"error: the entries of 'again' cannot be distinguished: {why}" in refused.stderr
    plain = run(f'name = "{program}"\noffset = again\nreturn = yes\nminor = 1\nexit\n', ["--", str(program)], options)
    assert plain.counts[1].hits == 1
    pattern = run(f'name = "{program}"\noffset = "[am]*n"\n{TIMED}', ["--", str(program)], options)
    assert {record["function"] for record in pattern.records} == {"main"}, pattern.stderr


def test_where_a_breakpoint_is_both_entry_and_return(build: Builder, run: Runner) -> None:
    program = build("entryless.c")
    source = f'name = "{program}"\noffset = bare\n{TIMED}'
    refused = run(source, ["--", str(program)], ["--engine", "ebpf"])
    assert refused.status == 2
    why = "it returns by its first instruction, where its entry is to be kept as well"
    assert f"error: the ebpf engine cannot probe the return of bare: {why}" in refused.stderr
    taken = run(source, ["--", str(program)], ["--engine", "auto"])
    assert len(taken.words(1)) == 3, taken.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_of_i386_programs_lie_in_memory(build: Builder, run: Runner, engine: str) -> None:
    program = build("returns.c", "-O2", i386=True)
    source = (
        "name = returns\noffset = factorial\nreturn = yes\nminor = 1\n"
        "push entry, arg0\npush r, retval\npush elapsed\nlog 4\nexit\n"
    )
    result = run.command(source, program, 1, 6, options=("--engine", engine))
    calls = [(argument, returned) for _, _, returned, argument in result.words(1, 4)]
    assert {argument for argument, _ in calls} == {0, 1, 2, 3, 4, 5}
    for argument, returned in calls:
        assert returned == (math.factorial(argument) if argument else 1)
    assert all(0 < low + (high << 32) < 60_000_000_000 for low, high, *_ in result.words(1, 4))


def test_tail_calls_of_i386_programs_are_refused_in_the_kernel(build: Builder, run: Runner) -> None:
    program = build("entered.c", "-O2", "-DTAILS", i386=True)
    refused = run(f"name = entered\noffset = tail\n{TIMED}", ["--", str(program), "1", "1"], ["--engine", "ebpf"])
    assert refused.status == 2
    why = "it may hand over to another function, and a uretprobe does not show in 32-bit code which call returns"
    assert f"error: the ebpf engine cannot probe the return of tail: {why}" in refused.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_slow_calls_are_found_with_their_arguments(run: Runner, engine: str) -> None:
    examples = Path(__file__).parents[2] / "examples"
    script = "import os, time\nr, w = os.pipe()\nprint(r, flush=True)\nif os.fork():\n    os.close(w)\n"
    script += "    for _ in range(4): os.read(r, 77)\nelse:\n    for n in range(3):\n"
    script += "        time.sleep(0.001 if n == 1 else 0.1)\n        os.write(w, b'x' * (n + 1))\n"
    options = ["--engine", engine, "--templates", str(examples / "templates")]
    result = run((examples / "slow-calls.rpn").read_text(), ["--", "/usr/bin/python3", "-c", script], options)
    assert result.status == 0, result.stderr
    descriptor = int(result.stdout)
    slow = [
        [int(value, 16) if isinstance(value, str) else value for value in record["fields"].values()]
        for record in result.records
    ]
    reads = [call for call in slow if call[0] == descriptor and call[2] == 77]
    sizes = [returned for *_, returned in reads]
    assert [size for size in sizes if size in (1, 3)] == [1, 3], "others may be slow by chance"
    assert all(took >= 10_000_000 for _, _, _, took, _ in reads)
