"""
Jumps over several instructions in a running program: by each method, with threads and signals in their middle.

What is probed is hot in several threads, which check their results (``programs/windows.c``).
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_message,
    await_traced,
    await_true,
    code_is_original,
    environment,
    executable_segments,
    is_traced,
    memory_at,
    processor_time,
    running,
    symbols_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder, Runner

INLINE = ["--engine", "inline"]
INT3 = 0xCC
METHODS = {
    "rows_7 + 4": "window",
    "dead_3 + 4": "dead bytes",
    "near_5 + 11": "short jump",
    "lead_9 + 10": "window before it",
    "call_11 + 4": "window",
    "loop_6 + 8": "window",
    "crossing_4": "jump",
    "marked_8": "window",
}
"""How each place is probed if no punned jump fits."""


def counting(*places: str) -> str:
    """Return a program that counts the hits of places."""
    return "name = windows\n" + "".join(f"offset = {p}\nminor = {n}\nabort\n" for n, p in enumerate(places))


@contextmanager
def hot(build: Builder, *more: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Let the program run; its results must be right in the end."""
    program = build("windows.c")
    with running(program, 600, 2, *more) as target:
        await_line(target)
        yield target, program
        assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def has_jump(pid: int, program: Path, place: str) -> bool:
    """Return whether the function of a place has been changed by more than breakpoints."""
    symbol = place.partition(" + ")[0]
    found, file = memory_at(pid, program, symbol, 16), code_of(program, symbol)
    return any(found[n] not in (file[n], INT3) for n in range(16))


def code_of(program: Path, symbol: str) -> bytes:
    address, data = symbols_of(program)[symbol], program.read_bytes()
    for offset, start, size in executable_segments(program):
        if start <= address < start + size:
            return data[offset + address - start :][:16]
    raise AssertionError(symbol)


def executed(stderr: str) -> dict[int, set[str]]:
    """Return how the probed instructions were executed, by the minor codes."""
    return {
        int(found[1]): set(re.findall(r"inline \(([^)]*)\)", found[2]))
        for found in re.finditer(r"^\d+,(\d+) .*?  ([a-z].*)$", stderr, re.MULTILINE)
    }


@pytest.mark.parametrize("place", METHODS)
def test_each_method_serves_a_hot_program(build: Builder, run: Runner, place: str) -> None:
    with hot(build, "near") as (target, program):
        for _ in range(2):
            client, _ = run.start(counting(place), ["-p", str(target.pid)], INLINE)
            await_traced(target.pid)
            await_true(lambda: has_jump(target.pid, program, place), "a jump")
            client.send_signal(signal.SIGINT)
            _, stderr = client.communicate(timeout=TIMEOUT)
            assert "Traceback" not in stderr, stderr
            await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
            assert code_is_original(target.pid, program)
    assert executed(stderr)[0] == {METHODS[place]}, stderr


def test_probes_share_what_is_displaced(build: Builder, run: Runner) -> None:
    places = ("lead_9 + 7", "lead_9 + 10")
    with hot(build, "near") as (target, program):
        client, _ = run.start(counting(*places), ["-p", str(target.pid)], INLINE)
        await_traced(target.pid)
        await_true(lambda: has_jump(target.pid, program, places[1]), "a jump")
        client.send_signal(signal.SIGINT)
        _, stderr = client.communicate(timeout=TIMEOUT)
    assert executed(stderr) == {0: {"window before it"}, 1: {"window before it"}}, stderr


def test_places_of_one_function_are_hit_equally_often(build: Builder, run: Runner) -> None:
    """Also while signal handlers and children call it, and the hits of the beginning are those of breakpoints."""
    places = ("rows_7", "rows_7 + 1", "rows_7 + 4", "rows_7 + 8", "rows_7 + 9")
    result = run(counting(*places), ["--exit-status", "--", str(build("windows.c")), "2", "2"], INLINE)
    assert result.status == 0
    hits = {result.counts[n].hits for n in range(len(places))}
    assert len(hits) == 1
    assert hits.pop() > 2 * int(result.stdout.split()[1])
    assert all("inline" in result.counts[n].executed for n in range(len(places)))


@pytest.mark.parametrize("more", ["near", ""])
def test_a_program_is_unharmed_whenever_jumps_come_and_go(build: Builder, run: Runner, more: str) -> None:
    with hot(build, *more.split()) as (target, program):
        for number, way in enumerate((signal.SIGINT, signal.SIGKILL, signal.SIGKILL)):
            places = list(METHODS)[number % 2 :: 2]
            client, _ = run.start(counting(*places), ["-p", str(target.pid)], INLINE)
            await_traced(target.pid)
            await_true(functools.partial(has_jump, target.pid, program, places[-1]), "a jump", TIMEOUT)
            client.send_signal(way)
            client.communicate(timeout=TIMEOUT)
            await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
            assert code_is_original(target.pid, program)


def test_a_killed_tracer_leaves_no_jump(build: Builder, run: Runner) -> None:
    places = ("loop_6 + 8", "crossing_4", "marked_8")
    with hot(build, "near") as (target, program):
        client, _ = run.start(counting(*places), ["-p", str(target.pid)], INLINE)
        tracer = await_traced(target.pid)
        for place in places:
            await_true(functools.partial(has_jump, target.pid, program, place), "a jump")
        os.kill(tracer, signal.SIGKILL)
        _, stderr = client.communicate(timeout=TIMEOUT)
        assert "Traceback" not in stderr, stderr
        assert code_is_original(target.pid, program)


def test_a_fault_in_displaced_code_is_at_the_original_instruction_and_can_be_put_right(
    build: Builder, run: Runner
) -> None:
    """The program looks at the address in its handler, which lets the instruction be tried once more."""
    with hot(build, "near") as (target, _):
        client, _ = run.start(counting("reads_0"), ["-p", str(target.pid)], INLINE)
        await_message(client, "active")
        before = processor_time(target.pid)
        await_true(lambda: processor_time(target.pid) > before + 50, "hits for half a second")
        client.send_signal(signal.SIGINT)
        stderr = client.communicate(timeout=TIMEOUT)[1]
    assert executed(stderr)[0] == {"window"}, stderr


def test_show_says_by_which_jump_each_probepoint_would_be_probed(build: Builder, tmp_path: Path) -> None:
    program = build("windows.c")
    places = ("call_11 + 4", "lead_9 + 10", "rows_7", "reads_0 + 4", "crossing_4")
    source = tmp_path / "all.rpn"
    text = counting(*places).replace("name = windows", f'name = "{program}"')
    source.write_text(
        text.replace("minor = 4\n", "minor = 4\npasscount = 5\n").replace(
            "minor = 2\nabort", "minor = 2\npush uid\nlog 1"
        )
    )
    command = [*DPROBES, "show", str(source), "--engine", "inline", "--allow-write"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert [line.removeprefix("// inline: by ") for line in done.stdout.splitlines() if "inline:" in line] == [
        "a jump over several instructions",
        "a punned jump, if the addresses that it leads to are free",
        "a breakpoint: its handler reads the process name or the user id, which only the kernel knows",
        "a punned jump, if the addresses that it leads to are free",
        "a punned jump, if the addresses that it leads to are free",
    ]
