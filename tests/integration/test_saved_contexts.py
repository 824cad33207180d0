"""
Contexts that a program has saved, and resumes: they may stand in the middle of what a jump displaces, or in our code.

The program switches between them by itself, from signal handlers (``programs/contexts.c``); nothing on the stacks of
its threads tells of them.
"""

from __future__ import annotations

import ctypes
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, await_line, await_true, is_traced, memory_at, running, symbols_of
from integration.test_inline_windows import code_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ADDR_NO_RANDOMIZE = 0x0040000
FIXED = ["-no-pie", "-fno-pie"]  # where few punned jumps fit
INLINE = ["--engine", "inline"]
PLACES = ("entered", "spot")
ENTERED = "name = contexts\noffset = entered\nabort\n"
BOTH = ENTERED + "offset = spot\nminor = 1\nabort\n"


def not_random() -> None:
    """Let the heap follow the program directly: so no jump can have bytes that trap."""
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


def say(target: subprocess.Popen[str], order: str) -> str:
    assert target.stdin is not None
    target.stdin.write(order)
    target.stdin.flush()
    return await_line(target, TIMEOUT).strip()


def has_jump(pid: int, program: Path, place: str) -> bool:
    return memory_at(pid, program, place, 1) == b"\xe9"


@pytest.mark.parametrize("is_random", [True, False], ids=["random", "not random"])
def test_a_context_in_the_middle_of_what_is_displaced_goes_on_as_before(
    build: Builder, run: Runner, is_random: bool
) -> None:
    program = build("contexts.c", *FIXED)
    assert symbols_of(program)["entered"] < 1 << 32
    before = None if is_random else not_random
    with running(program, stdin=subprocess.PIPE, preexec_fn=before) as target:
        assert await_line(target) == "ready\n"
        assert say(target, "f") == "right"
        client, output = run.start(ENTERED, ["-p", str(target.pid)], INLINE)
        await_true(lambda: memory_at(target.pid, program, "entered", 1) != code_of(program, "entered")[:1], "a probe")
        assert say(target, "r") == "right"
        assert say(target, "f") == "right"
        assert say(target, "r") == "right"
        result = run.end(client, output)
    assert result.counts[0].hits == 1, result.stderr  # that after the probe was inserted


def test_a_context_in_the_copy_goes_on_when_the_jump_is_gone(build: Builder, run: Runner) -> None:
    program = build("contexts.c", *FIXED)
    with running(program, stdin=subprocess.PIPE) as target:
        assert await_line(target) == "ready\n"
        client, output = run.start(BOTH, ["-p", str(target.pid)], INLINE)
        await_true(lambda: all(has_jump(target.pid, program, place) for place in PLACES), "jumps", TIMEOUT)
        assert say(target, "p") == "right"
        result = run.end(client, output)
        assert result.counts[1].hits > 0, result.stderr
        await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
        assert say(target, "r") == "right"
