"""
Instructions that may fault, with handlers in the process: a record is of what has completed, as with breakpoints.

Each program is probed before it runs what is probed, so that all hits find the jump.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_message,
    await_traced,
    await_true,
    code_is_original,
    is_traced,
    memory_at,
    read_result,
    running,
)
from integration.test_faults import COUNT, PROGRAM

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

INLINE = ["--engine", "inline"]
KINDS = ("protected", "pointer", "divide", "bus", "thread")
LIMITS = "passcount = 5\nmaxhits = 6\n"


def run_kind(build: Builder, run: Runner, kind: str, engine: str, extra: str = "") -> tuple[Result, int]:
    """Return the result, and how many faults the program saw."""
    program = build("faults.c")
    with running(program, kind, COUNT, "waiting", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(
            PROGRAM.format(kind=kind, extra=extra), ["-p", str(target.pid)], ["--engine", engine]
        )
        await_message(client, "is active")
        if engine == "inline":  # a breakpoint may be active before the jump replaces it
            await_true(lambda: memory_at(target.pid, program, f"at_{kind}", 1) in (b"\xe9", b"\x2e"), "a jump")
        else:
            assert memory_at(target.pid, program, f"at_{kind}", 1) not in (b"\xe9", b"\x2e")
        stdout, _ = target.communicate("!", timeout=TIMEOUT)
        assert target.returncode == 0
        return read_result(client, output), int(stdout)


def seen(result: Result) -> list[tuple[int, int]]:
    """Return what each record says: where in its page the instruction is, and the how manieth run it is of."""
    return [(place & 0xFFF, number) for place, number in result.words()]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [*((kind, "") for kind in KINDS), ("divide", LIMITS), ("protected", LIMITS), ("pointer", "logonfault = yes\n")],
    ids=[*KINDS, "divide-limits", "protected-limits", "pointer-logonfault"],
)
def test_what_is_recorded_is_the_same(build: Builder, run: Runner, kind: str, extra: str) -> None:
    (inside, faults), (outside, others) = (run_kind(build, run, kind, engine, extra) for engine in ("inline", "ptrace"))
    assert "inline" in inside.counts[1].executed
    assert faults >= COUNT
    if kind != "thread":  # how often it tries is by chance
        assert faults == others
        assert seen(inside) == seen(outside)
        for name in ("hits", "records", "lost", "passed"):
            assert getattr(inside.counts[1], name) == getattr(outside.counts[1], name)
    if not extra:
        assert inside.counts[1].hits == len(inside.records) == COUNT
        assert max(number for _, number in seen(inside)) == faults + COUNT
        assert f"0,1  {faults} handler runs at " in inside.stderr


def test_a_stack_without_room_for_a_handler_is_as_without_it(build: Builder, run: Runner) -> None:
    (inside, faults), (outside, others) = (run_kind(build, run, "stack", engine) for engine in ("inline", "ptrace"))
    assert faults == others >= COUNT
    assert seen(inside) == seen(outside)
    assert inside.counts[1].hits == outside.counts[1].hits == COUNT
    assert "inline" in inside.counts[1].executed


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_faults_all_the_time_is_unharmed_by_any_end(build: Builder, run: Runner, way: int) -> None:
    program = build("faults.c")
    source = PROGRAM.format(kind="protected", extra="")
    with running(program, "protected", 1 << 22, "waiting", stdin=subprocess.PIPE) as target:
        await_line(target)
        for number in range(4):
            client, _ = run.start(source, ["-p", str(target.pid)], INLINE)
            await_message(client, "is active")
            if not number:
                assert target.stdin is not None
                target.stdin.write("!")
                target.stdin.flush()
            await_traced(target.pid)
            client.send_signal(way)
            client.communicate(timeout=TIMEOUT)
            await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
            assert target.poll() is None
            assert code_is_original(target.pid, program)
        before = Path(f"/proc/{target.pid}/stat").read_text().split()[13]
        await_true(lambda: Path(f"/proc/{target.pid}/stat").read_text().split()[13] != before, "more work")
